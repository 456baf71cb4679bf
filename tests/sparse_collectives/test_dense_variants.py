"""The dense allreduces by two axes and in buckets: the sum that psum computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from tests.sparse_collectives import helpers

AXES = ("node", "device")
TORUS = sc.allreduce.torus_2d()


def summed(allreduce, axis):
    """The total and the words, from dense vectors."""

    def step(vector):
        size = vector.shape[0]
        coo = sc.PaddedCOO(vector, jnp.arange(size, dtype=jnp.int32), size)
        total, _, _, info = allreduce.reduce(coo, allreduce.init(size, 1), axis=axis)
        return total, info.words, info.delivered

    return step


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("size", [1, 24, 101])
def test_torus_sums_up_along_both_axes(shape, size):
    rng = np.random.default_rng(0)
    vectors = rng.integers(-9, 9, (*shape, size)).astype(np.float32)
    run = sc.simulate(summed(TORUS, AXES), axis=AXES, axis_size=shape)
    total, words, delivered = run(vectors)
    expected = vectors.sum(axis=(0, 1))
    np.testing.assert_array_equal(total, np.broadcast_to(expected, vectors.shape))
    assert (np.asarray(delivered) == np.count_nonzero(expected)).all()
    traffic = sc.traffic.of_allreduce(TORUS, size=size, capacity=size, axis=AXES, axis_size=shape)
    np.testing.assert_allclose(words, traffic.words)
    nodes, inside = shape
    padded = -(-size // inside) * inside
    scopes = traffic.by_scope()
    assert scopes["torus_2d/inner"] == pytest.approx(2 * padded * (inside - 1) / inside)
    assert scopes["torus_2d/outer"] == pytest.approx(2 * padded / inside * (nodes - 1) / nodes)


@pytest.mark.parametrize("largest", [1.0, 3e38])
def test_torus_delivers_everything_but_what_would_overflow(largest):
    vectors = np.full((2, 3, 8), largest, np.float32)
    vectors[1] /= 4

    def step(vector):
        coo = sc.PaddedCOO(vector, jnp.arange(8, dtype=jnp.int32), 8)
        total, undelivered, _, _ = TORUS.reduce(coo, TORUS.init(8, 6), axis=AXES)
        return total, helpers.sum_of_parts(helpers.as_coo(coo, undelivered))

    total, kept = map(np.asarray, sc.simulate(step, axis=AXES, axis_size=(2, 3))(vectors))
    assert np.isfinite(total).all()
    assert (kept == 0).all() == (largest == 1.0)
    both = total[0, 0].astype(np.float64) + kept.sum((0, 1), dtype=np.float64)
    np.testing.assert_allclose(both, vectors.sum((0, 1), dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_torus_on_a_mesh(check_vma):
    mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(2, 3), AXES, axis_types=(AxisType.Auto,) * 2)
    vectors = np.random.default_rng(0).standard_normal((6, 17)).astype(np.float32)

    def step(vector):
        return summed(TORUS, AXES)(vector[0])[0]

    run = jax.shard_map(step, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(run)(vectors), vectors.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", ["node", ("node",), ("node", "node"), ("a", "b", "c")])
def test_torus_needs_two_axes(axis):
    with pytest.raises(ValueError, match=r"axis must be a pair \(outer, inner\).*torus_2d"):
        sc.simulate(summed(TORUS, axis), axis="node", axis_size=2)(jnp.ones((2, 4)))


def test_torus_needs_axes_that_are_bound():
    with pytest.raises(ValueError, match="is not bound here"):
        sc.simulate(summed(TORUS, AXES), axis="node", axis_size=2)(jnp.ones((2, 4)))


@pytest.mark.parametrize("buckets", [1, 3, 1000])
def test_buckets_have_the_bits_of_one_dense_allreduce(buckets):
    acc = helpers.hard_accumulators(3, 101)["normal"]
    steps = [
        sc.simulate(summed(allreduce, "workers"), axis_size=3)
        for allreduce in (sc.allreduce.dense(), sc.allreduce.dense_bucketed(buckets=buckets))
    ]
    (expected, words, _), (total, bucket_words, _) = (step(acc) for step in steps)
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(words, bucket_words)


def test_the_last_bucket_comes_first_and_none_waits_for_another():
    step = summed(sc.allreduce.dense_bucketed(buckets=4), "w")
    jaxpr = jax.make_jaxpr(step, axis_env=[("w", 2)])(jnp.ones(10)).jaxpr
    sums = helpers.independent_psums(jaxpr)
    assert [variable.aval.shape for variable in sums] == [(1,), (3,), (3,), (3,)]


@pytest.mark.parametrize("buckets", [0, -1, 1.5, True])
def test_a_number_of_buckets(buckets):
    with pytest.raises(ValueError, match="buckets must be an integer of at least 1"):
        sc.allreduce.dense_bucketed(buckets=buckets)
