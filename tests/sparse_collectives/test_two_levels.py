"""Sums over nodes of workers, HiTopKComm and the torus, and dense sums in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import _compat
from tests.sparse_collectives import helpers, nodes

AXES = nodes.AXES
TORUS, TOPK_A = sc.allreduce.published.torus_2d(), sc.allreduce.topk_a()
GTOPK = sc.allreduce.published.gtopk(density=0.1)


def hierarchical(outer):
    return sc.allreduce.hierarchical(inner_axis="device", outer=outer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allreduce", "density", "outer"),
    [
        (TORUS, 1.0, None),
        *((hierarchical(TOPK_A), density, TOPK_A) for density in (1.0, 0.1)),
        (hierarchical(sc.allreduce.dense()), 0.1, sc.allreduce.dense()),
        (hierarchical(GTOPK), 0.1, GTOPK),
    ],
)
def test_info_reports_the_words_that_the_program_moves(allreduce, density, outer):
    shape, size, selector = (3, 2), 101, sc.select.topk(density=density)
    step, state = nodes.step_of(selector, allreduce), nodes.initial(allreduce, size, shape)
    gradients = np.random.default_rng(0).integers(-9, 9, (*shape, size)).astype(np.float32)
    out = sc.simulate(step, axis=nodes.AXES, axis_size=shape)(gradients, state)
    if density == 1.0:
        expected = gradients.sum(axis=(0, 1))
        np.testing.assert_array_equal(out["total"][0, 0], expected)
        assert out["info"].delivered[0, 0] == np.count_nonzero(expected)
    given = gradients[0, 0], jax.tree.map(lambda x: x[0, 0], state)
    traffic = sc.traffic.of_function(step, *given, axis=nodes.AXES, axis_size=shape)
    info = out["info"]
    np.testing.assert_allclose(info.words, traffic.words, rtol=1e-6)
    for field in (info.delivered, info.threshold, info.words):
        assert (np.asarray(field) == np.asarray(field)[0, 0]).all()
    if outer is None:
        # No padding.
        np.testing.assert_array_equal(info.useful, info.words)
    else:
        alone = sc.traffic.of_allreduce(outer, size=51, capacity=round(51 * density), axis_size=3)
        assert traffic.by_scope(2)["hierarchical/outer"] == pytest.approx(alone.words)


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
