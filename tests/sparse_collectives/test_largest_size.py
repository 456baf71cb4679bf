"""The largest n there is, with everything selected: traced, not run."""

import math

import jax
import jax.numpy as jnp
import pytest

import sparse_collectives as sc
from tests.sparse_collectives.helpers import slow, slow_but

SIZE = 2**31 - 1
ALLREDUCES = {
    "ok_topk": sc.allreduce.ok_topk(density=1.0),
    "ok_topk, room for all": sc.allreduce.ok_topk(density=1.0, slack=math.inf),
    "ok_topk, no balance": sc.allreduce.ok_topk(density=1.0, balance="never"),
    "ssar_recursive_double": sc.allreduce.ssar_recursive_double(),
    "ssar_split_allgather": sc.allreduce.ssar_split_allgather(),
    "dsar_split_allgather": sc.allreduce.dsar_split_allgather(),
    "ring_sparse": sc.allreduce.ring_sparse(),
    "gtopk": sc.allreduce.gtopk(density=1.0),
    "spardl": sc.allreduce.spardl(density=1.0),
    "topk_a": sc.allreduce.topk_a(),
    "sparse_allgather": sc.allreduce.sparse_allgather(),
    "dense": sc.allreduce.dense(),
}
TRACED_FOR_LONG = {"ok_topk", "ok_topk, room for all", "ok_topk, no balance"}
TRACED_FOR_LONG |= {"spardl", "ring_sparse"}


@pytest.mark.parametrize("workers", [8, *slow(1000)])
@pytest.mark.parametrize("name", slow_but(ALLREDUCES.keys() - TRACED_FOR_LONG, ALLREDUCES))
def test_message_sizes_past_an_int32_are_no_error(name, workers):
    if name == "ring_sparse" and workers > 8:
        workers = 64  # Its program grows with P.
    allreduce = ALLREDUCES[name]

    def step(values, indices, state):
        return allreduce.reduce(sc.PaddedCOO(values, indices, SIZE), state, axis="w")

    values = jax.ShapeDtypeStruct((workers, SIZE), jnp.float32)
    indices = jax.ShapeDtypeStruct((workers, SIZE), jnp.int32)
    state = jax.eval_shape(lambda: allreduce.init(SIZE, workers))
    run = jax.vmap(step, in_axes=(0, 0, None), axis_name="w", axis_size=workers)
    total, _, _, info = jax.eval_shape(run, values, indices, state)
    assert (total.size if isinstance(total, sc.PaddedCOO) else total.shape[1]) == SIZE
    assert info.useful.dtype == jnp.float32
