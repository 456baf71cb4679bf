"""HiTopKComm in plain NumPy (Algorithm 2 of the paper), with error feedback on the shards."""

import numpy as np

from tests.reference.ok_topk import local_topk


def training_step(gradients: np.ndarray, residuals: np.ndarray, k: int):
    """One step with an allgather of the selections, k of each shard, between the nodes.

    It takes ``gradients f[m, w, n]`` and ``residuals f[m, w, s]``, s = ceil(n / w), and returns the
    total ``f64[n]`` and the new residuals.
    """
    nodes, inside, size = gradients.shape
    shard = residuals.shape[-1]
    padded = np.zeros((nodes, inside * shard), np.float32)
    padded[:, :size] = gradients.astype(np.float64).sum(axis=1)
    accs = residuals + padded.reshape(nodes, inside, shard)
    total, kept = np.zeros((inside, shard)), accs.copy()
    for i in range(nodes):
        for j in range(inside):
            chosen = local_topk(accs[i, j], k)
            total[j][chosen] += accs[i, j][chosen]
            kept[i, j][chosen] = 0
    return total.reshape(-1)[:size], kept
