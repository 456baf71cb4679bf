"""A function of each layer, computed by one worker for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext.contrib._distributed import deal
from tests.optax_ext.helpers import mesh, slow

SHAPES = {"embed": (40, 8), "bias": (5,), "kernel": (8, 24), "scale": (), "head": (12, 9)}


def tree(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(s), dtype) for name, s in SHAPES.items()}


def statistics(leaf, other):
    """Of several shapes and dtypes."""
    return {
        "norm": jnp.linalg.norm(leaf),
        "dot": jnp.vdot(leaf, other),
        "largest": jnp.argmax(jnp.abs(leaf)),
        "finite": jnp.all(jnp.isfinite(leaf)),
        "narrow": jnp.ravel(leaf)[:3].astype(jnp.bfloat16),
        "sign": -0.0 * jnp.ones(2),
    }


def same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("check_vma", [slow(True), False])
def test_the_result_is_that_of_every_leaf_by_itself(check_vma):
    given, other = tree(), tree(1)
    given["bias"] = given["bias"].at[2].set(jnp.nan)
    on = mesh(3, "w")
    fn = optax_ext.contrib.distributed(statistics, axis="w")
    mapped = jax.jit(
        jax.shard_map(fn, mesh=on, in_specs=(P(), P()), out_specs=P(), check_vma=check_vma)
    )
    got = mapped(given, other)
    same_bits(got, {name: jax.jit(statistics)(given[name], other[name]) for name in SHAPES})
    assert got["bias"]["finite"].dtype == bool
    for leaf in jax.tree.leaves(got):
        replicas = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(set(replicas)) == 1


def test_each_worker_computes_its_own_and_one_message_follows():
    on = mesh(4, "w")
    fn = optax_ext.contrib.distributed(lambda x: jnp.linalg.svd(jnp.atleast_2d(x))[1][0], axis="w")
    program = jax.jit(jax.shard_map(fn, mesh=on, in_specs=P(), out_specs=P())).trace(tree())
    text = program.lower().as_text()
    assert text.count("stablehlo.all_reduce") == 1
    assert text.count("stablehlo.case") == 1
    # Five numbers, and nothing for the leaves themselves.
    assert sc.traffic.of_traced(program).words == pytest.approx(2 * 5 * 3 / 4)


def test_pieces_of_one_tensor_are_leaves():
    """Equations 12 to 14: each worker computes a piece, and one message brings them together."""
    x = tree()["embed"]
    on = mesh(4, "w")

    def pieces(x):
        return jnp.concatenate(
            optax_ext.contrib.distributed(jnp.exp, axis="w")(jnp.array_split(x, 4))
        )

    mapped = jax.jit(jax.shard_map(pieces, mesh=on, in_specs=P(), out_specs=P()))
    same_bits(mapped(x), jax.jit(jnp.exp)(x))
    program = mapped.trace(x)
    assert sc.traffic.of_traced(program).words == pytest.approx(2 * x.size * 3 / 4)
    # One piece in each branch.
    branches = program.lower().as_text().split("stablehlo.case")[1].split("stablehlo.all_reduce")[0]
    assert branches.count("stablehlo.exponential") == 4
    assert branches.count("tensor<10x8xf32>") >= 4


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers(workers):
    fn = optax_ext.contrib.distributed(lambda x, y: jnp.sum(x * y), axis="w")
    step = sc.simulate(fn, axis="w", axis_size=workers, in_axes=None)
    got = step(tree(), tree(1))
    for name in SHAPES:
        expected = np.sum(np.float64(tree()[name]) * np.float64(tree(1)[name]))
        np.testing.assert_allclose(got[name], [expected] * workers, rtol=1e-5)


def test_leaves_are_dealt_out_by_size():
    assert deal([10, 1, 9, 2, 8], 3) == [0, 1, 1, 2, 2]
    loads = np.bincount(deal([5] * 12, 4), weights=[5] * 12)
    assert loads.tolist() == [15] * 4


def test_what_can_be_wrong():
    fn = optax_ext.contrib.distributed(jnp.sum, axis="w")
    with pytest.raises(ValueError, match="axis='w' is not bound here"):
        fn(tree())
    two = optax_ext.contrib.distributed(lambda x, y: jnp.sum(x + y), axis="w")
    with pytest.raises(ValueError, match="kernel|structure|key"):
        sc.simulate(two, axis="w", axis_size=2, in_axes=None)(tree(), {"embed": jnp.ones(3)})
