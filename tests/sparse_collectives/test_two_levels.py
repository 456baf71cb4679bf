"""Sums over nodes of workers, HiTopKComm and the torus, and dense sums in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import _compat
from tests.sparse_collectives import helpers
from tests.sparse_collectives.helpers import slow
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


@pytest.mark.parametrize("shape", [(1, 3), *slow((3, 1), (2, 3))])
def test_scatter_and_gather_are_a_dense_sum(shape):
    size = 10
    gradients = np.random.default_rng(0).integers(-9, 9, (*shape, size)).astype(np.float32)
    step = pipeline(hierarchical(TOPK_A), size, 1.0, shape[0] * shape[1])
    total, shards, info = sc.simulate(step, axis=AXES, axis_size=shape)(gradients)
    expected = gradients.sum(axis=(0, 1))
    np.testing.assert_array_equal(total, np.broadcast_to(expected, gradients.shape))
    of_node = np.asarray(shards).reshape(shape[0], -1)[:, :size]
    np.testing.assert_array_equal(of_node, gradients.sum(axis=1))
    assert (np.asarray(info.delivered) == np.count_nonzero(expected)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "outer",
    [TOPK_A, sc.allreduce.published.gtopk(density=0.1), sc.allreduce.dense()],
    ids=lambda x: x.spec,
)
def test_info_reports_the_words_that_the_program_moves(outer):
    shape, size = (3, 2), 101
    step = pipeline(hierarchical(outer), size, 0.1, 6)
    gradients = np.random.default_rng(0).standard_normal((*shape, size)).astype(np.float32)
    _, _, info = sc.simulate(step, axis=AXES, axis_size=shape)(gradients)
    shard = jax.ShapeDtypeStruct((size,), jnp.float32)
    traffic = sc.traffic.of_function(step, shard, axis=AXES, axis_size=shape)
    np.testing.assert_allclose(info.words, traffic.words, rtol=1e-6)
    alone = sc.traffic.of_allreduce(outer, size=51, capacity=5, axis_size=3)
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
    between = 2 * density * size / inside * (nodes - 1)
    assert scopes["hierarchical/outer"] == between
    inner = 2 * size * (inside - 1) / inside + 3 * (inside - 1)
    assert scopes["hierarchical/inner"] == pytest.approx(inner)
    flat = sc.traffic.of_allreduce(
        TOPK_A, size=size, capacity=round(density * size), axis_size=nodes * inside
    )
    # Of what a worker receives in the flat one, (P - w) / (P - 1) comes from other nodes.
    from_outside = flat.words * (nodes * inside - inside) / (nodes * inside - 1)
    assert from_outside / between == pytest.approx(inside**2)


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
    rng = np.random.default_rng(0)
    vectors = rng.integers(-9, 9, (*shape, size)).astype(np.float32)
    total, _, info = sc.simulate(summed(TORUS, AXES), axis=AXES, axis_size=shape)(vectors)
    expected = vectors.sum(axis=(0, 1))
    np.testing.assert_array_equal(total, np.broadcast_to(expected, vectors.shape))
    assert (np.asarray(info.delivered) == np.count_nonzero(expected)).all()
    traffic = sc.traffic.of_allreduce(TORUS, size=size, capacity=size, axis=AXES, axis_size=shape)
    np.testing.assert_allclose(info.words, traffic.words)
    # No padding.
    np.testing.assert_array_equal(info.useful, info.words)
    nodes, inside = shape
    padded = -(-size // inside) * inside
    scopes = traffic.by_scope()
    assert scopes["torus_2d/inner"] == pytest.approx(2 * padded * (inside - 1) / inside)
    assert scopes["torus_2d/outer"] == pytest.approx(2 * padded / inside * (nodes - 1) / nodes)


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_torus_on_a_mesh(check_vma):
    mesh = Mesh(np.asarray(jax.devices()[:6]).reshape(2, 3), AXES, axis_types=(AxisType.Auto,) * 2)
    vectors = np.random.default_rng(0).standard_normal((6, 17)).astype(np.float32)

    def step(vector):
        return summed(TORUS, AXES)(vector[0])[0]

    run = jax.shard_map(step, mesh=mesh, in_specs=P(AXES), out_specs=P(), check_vma=check_vma)
    np.testing.assert_allclose(jax.jit(run)(vectors), vectors.sum(axis=0), rtol=1e-5, atol=1e-6)


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
