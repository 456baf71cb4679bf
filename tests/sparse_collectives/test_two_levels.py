"""Sums over nodes of workers, HiTopKComm and the torus, and dense sums in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import _compat
from tests.sparse_collectives import helpers
from tests.sparse_collectives.nodes import AXES

TORUS, TOPK_A = sc.allreduce.published.torus_2d(), sc.allreduce.topk_a()


def hierarchical(outer):
    return sc.allreduce.hierarchical(inner_axis="device", outer=outer)


def pipeline(h, size, density, workers):
    """A step without residuals: scatter, select, reduce, gather."""
    selector = sc.select.topk(density=density)

    def step(gradient):
        shard = h.scatter(gradient)
        coo, _, _ = selector.select(shard, selector.init(shard.shape[0]))
        state = h.init(size, workers)
        total, undelivered, _, info = h.reduce(coo, state, axis=AXES)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return h.gather(total, size), shard, info

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "density"),
    [
        *((TOPK_A, 1.0), (TOPK_A, 0.1), (sc.allreduce.dense(), 0.1)),
        (sc.allreduce.published.gtopk(density=0.1), 0.1),
    ],
)
def test_info_reports_the_words_that_the_program_moves(outer, density):
    shape, size = (3, 2), 101
    step = pipeline(hierarchical(outer), size, density, 6)
    gradients = np.random.default_rng(0).integers(-9, 9, (*shape, size)).astype(np.float32)
    total, shards, info = sc.simulate(step, axis=AXES, axis_size=shape)(gradients)
    # What is scattered and gathered is the sum of a node, padded by one.
    of_node = np.asarray(shards).reshape(shape[0], -1)[:, :size]
    np.testing.assert_array_equal(of_node, gradients.sum(axis=1))
    if density == 1.0:
        np.testing.assert_array_equal(total[0, 0], gradients.sum(axis=(0, 1)))
    traffic = sc.traffic.of_function(step, gradients[0, 0], axis=AXES, axis_size=shape)
    np.testing.assert_allclose(info.words, traffic.words, rtol=1e-6)
    alone = sc.traffic.of_allreduce(outer, size=51, capacity=round(51 * density), axis_size=3)
    assert traffic.by_scope(2)["hierarchical/outer"] == pytest.approx(alone.words)
    for field in (info.delivered, info.threshold, info.words):
        assert (np.asarray(field) == np.asarray(field)[0, 0]).all()


def test_words_between_nodes_are_those_of_the_paper():
    """16 nodes of 8 workers: 2 rho d / n (m - 1) words (equation 9, values and indices)."""
    nodes, inside, size, density = 16, 8, 80_000, 0.01
    step = pipeline(hierarchical(TOPK_A), size, density, nodes * inside)
    gradient = jax.ShapeDtypeStruct((size,), jnp.float32)
    traffic = sc.traffic.of_function(step, gradient, axis=AXES, axis_size=(nodes, inside))
    scopes = traffic.by_scope(2)
    assert scopes["hierarchical/outer"] == 2 * density * size / inside * (nodes - 1)
    inner = 2 * size * (inside - 1) / inside + 3 * (inside - 1)
    assert scopes["hierarchical/inner"] == pytest.approx(inner)


def test_names_of_the_axes():
    outer_axis = _compat.outer_axis
    assert outer_axis(("node", "device"), "device") == "node"
    assert outer_axis(("device", "node"), "device") == "node"
    assert outer_axis(("rack", "node", "device"), "device") == ("rack", "node")
    assert outer_axis(("rack", "node", "device"), ("node", "device")) == "rack"
    for axis, inner in ((("node",), "device"), ("device", "device"), (("a", "b"), ("a", "b"))):
        with pytest.raises(ValueError, match="must name the axis of the nodes and inner_axis"):
            outer_axis(axis, inner)


# Dense sums.


def summed(allreduce, axis):
    """The total, what is kept, and the info, from dense vectors."""

    def step(vector):
        size = vector.shape[0]
        coo = sc.PaddedCOO(vector, jnp.arange(size, dtype=jnp.int32), size)
        total, undelivered, _, info = allreduce.reduce(coo, allreduce.init(size, 1), axis=axis)
        return total, helpers.sum_of_parts(helpers.as_coo(coo, undelivered)), info

    return step


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("size", [1, 24, 101])
def test_torus_sums_up_along_both_axes(shape, size):
    vectors = np.random.default_rng(0).integers(-9, 9, (*shape, size)).astype(np.float32)
    total, _, info = sc.simulate(summed(TORUS, AXES), axis=AXES, axis_size=shape)(vectors)
    expected = vectors.sum(axis=(0, 1))
    np.testing.assert_array_equal(total, np.broadcast_to(expected, vectors.shape))
    assert (np.asarray(info.delivered) == np.count_nonzero(expected)).all()
    traffic = sc.traffic.of_allreduce(TORUS, size=size, capacity=size, axis=AXES, axis_size=shape)
    np.testing.assert_allclose(info.words, traffic.words)
    # No padding.
    np.testing.assert_array_equal(info.useful, info.words)
    (nodes, inside), scopes = shape, traffic.by_scope()
    padded = -(-size // inside) * inside
    assert scopes["torus_2d/inner"] == pytest.approx(2 * padded * (inside - 1) / inside)
    assert scopes["torus_2d/outer"] == pytest.approx(2 * padded / inside * (nodes - 1) / nodes)


@pytest.mark.parametrize("check_vma", [True, False])
def test_torus_on_a_mesh(check_vma):
    mesh = jax.make_mesh((2, 3), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    vectors = np.random.default_rng(0).standard_normal((6, 17)).astype(np.float32)
    run = jax.shard_map(
        lambda vector: summed(TORUS, AXES)(vector[0])[0],
        mesh=mesh,
        in_specs=P(AXES),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(run)(vectors), vectors.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("largest", [1.0, 3e38])
def test_torus_delivers_everything_but_what_would_overflow(largest):
    vectors = np.full((2, 3, 8), largest, np.float32)
    vectors[1] /= 4
    out = sc.simulate(summed(TORUS, AXES), axis=AXES, axis_size=(2, 3))(vectors)
    total, kept = map(np.asarray, out[:2])
    assert np.isfinite(total).all()
    assert (kept == 0).all() == (largest == 1.0)
    both = total[0, 0].astype(np.float64) + kept.sum((0, 1), dtype=np.float64)
    np.testing.assert_allclose(both, vectors.sum((0, 1), dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("buckets", [1, 3, 1000])
def test_buckets_have_the_bits_of_one_dense_allreduce(buckets):
    acc = helpers.hard_accumulators(3, 101)["normal"]
    dense, bucketed = (
        sc.simulate(summed(allreduce, "workers"), axis_size=3)(acc)
        for allreduce in (
            sc.allreduce.dense(),
            sc.allreduce.published.dense_bucketed(buckets=buckets),
        )
    )
    np.testing.assert_array_equal(bucketed[0], dense[0])
    np.testing.assert_array_equal(bucketed[2].words, dense[2].words)


def test_the_last_bucket_comes_first_and_none_waits_for_another():
    step = summed(sc.allreduce.published.dense_bucketed(buckets=4), "w")
    jaxpr = jax.make_jaxpr(step, axis_env=[("w", 2)])(jnp.ones(10)).jaxpr
    sums = helpers.independent_psums(jaxpr)
    assert [variable.aval.shape for variable in sums] == [(1,), (3,), (3,), (3,)]
