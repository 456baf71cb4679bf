"""A step of an allreduce over nodes of workers, for the tests: two mesh axes instead of one."""

import functools

import jax
import numpy as np

import sparse_collectives as sc
from tests.sparse_collectives import helpers

AXES = ("node", "device")


def step_of(selector: sc.Selector, allreduce: sc.SparseAllreduce):
    """``step(gradient[n], allreduce_state) -> dict`` of one worker, from a fresh selector."""

    def step(gradient, allreduce_state):
        shard = allreduce.scatter(gradient)
        coo, _, _ = selector.select(shard, selector.init(shard.shape[0]))
        total, undelivered, allreduce_state, info = allreduce.reduce(
            coo, allreduce_state, axis=AXES
        )
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return {
            "total": allreduce.gather(total, gradient.shape[0]),
            "sent": coo.to_dense(),
            "kept": helpers.as_coo(coo, undelivered),
            "allreduce_state": allreduce_state,
            "info": info,
        }

    return step


@functools.cache
def simulated_step(selector: sc.Selector, allreduce: sc.SparseAllreduce, shape: tuple[int, int]):
    """The step of all workers, jitted and cached; the workers' states are ``[m, w, ...]``."""
    return sc.simulate(step_of(selector, allreduce), axis=AXES, axis_size=shape)


def initial(allreduce: sc.SparseAllreduce, size: int, shape: tuple[int, int]):
    """The states of the workers, ``[m, w, ...]``."""

    def init(_):
        return allreduce.init(size, shape[0] * shape[1])

    for name, workers in reversed(list(zip(AXES, shape, strict=True))):
        init = jax.vmap(init, axis_name=name, axis_size=workers)
    return init(np.zeros(shape))


def run_once(selector, allreduce, acc, shape, allreduce_state=None):
    """One step, as :func:`helpers.run_once`, of P workers.

    Sent and kept entries have a row for each worker, or for each node that has dealt out its sum.
    """
    size = acc.shape[1]
    if allreduce_state is None:
        allreduce_state = initial(allreduce, size, shape)
    out = simulated_step(selector, allreduce, shape)(acc.reshape(*shape, size), allreduce_state)
    state = out.pop("allreduce_state")
    out = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), out)
    out["kept"] = helpers.added_up(out["kept"])
    if allreduce.shard_axis:
        for name in ("sent", "kept"):
            out[name] = out[name].reshape(shape[0], -1)[:, :size]
    return {**out, "allreduce_state": state}
