"""PowerSGD and ACP-SGD in NumPy, in float64, for one matrix of all workers."""

import numpy as np


def powersgd(acc, q):
    """The update, residuals and next q, from ``acc f[W, rows, cols]`` and ``q f[cols, r]``."""
    p = np.mean([m @ q for m in acc], axis=0)
    p = np.linalg.qr(p)[0]
    own = [m.T @ p for m in acc]
    q = np.mean(own, axis=0)
    return p @ q.T, np.array([m - p @ mine.T for m, mine in zip(acc, own)]), q


def acp_sgd(acc, p, q, step):
    """The update, the residuals and both factors of a step; steps count from 0."""
    if step % 2 == 0:
        q = np.linalg.qr(q)[0]
        own = [m @ q for m in acc]
        p = np.mean(own, axis=0)
        kept = [m - mine @ q.T for m, mine in zip(acc, own)]
    else:
        p = np.linalg.qr(p)[0]
        own = [m.T @ p for m in acc]
        q = np.mean(own, axis=0)
        kept = [m - p @ mine.T for m, mine in zip(acc, own)]
    return p @ q.T, np.array(kept), p, q
