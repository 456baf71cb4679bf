"""Allreduces around others, for sums over nodes and for full sums; and dense sums.

Full sums (``full_sums``) are the same if only indices are exchanged, for fewer words.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import _axes
from tests.sparse_collectives import helpers, nodes, table
from tests.sparse_collectives.helpers import slow_rows

AXES = nodes.AXES
TORUS = sc.allreduce.published.torus_2d()


def test_names_of_the_axes():
    outer_axis = _axes.outer_axis
    assert outer_axis(("node", "device"), "device") == "node"
    assert outer_axis(("device", "node"), "device") == "node"
    assert outer_axis(("rack", "node", "device"), "device") == ("rack", "node")
    assert outer_axis(("rack", "node", "device"), ("node", "device")) == "rack"
    for axis, inner in ((("node",), "device"), ("device", "device"), (("a", "b"), ("a", "b"))):
        with pytest.raises(ValueError, match="must name the axis of the nodes and inner_axis"):
            outer_axis(axis, inner)


# Dense sums.


def summed(allreduce, axis):
    def step(vector):
        size = vector.shape[0]
        coo = sc.PaddedCOO(vector, jnp.arange(size, dtype=jnp.int32), size)
        return allreduce.reduce(coo, allreduce.init(size, 1), axis=axis)[0]

    return step


@pytest.mark.parametrize("check_vma", [True, False])
def test_torus_on_a_mesh(check_vma):
    vectors = np.random.default_rng(0).standard_normal((6, 17)).astype(np.float32)
    run = jax.shard_map(
        lambda vector: summed(TORUS, AXES)(vector[0]),
        mesh=helpers.mesh((2, 3), AXES),
        in_specs=P(AXES),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(run)(vectors), vectors.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_torus_delivers_everything_but_what_would_overflow():
    vectors = np.full((6, 8), 3e38, np.float32)
    vectors[3:] /= 4
    out = nodes.run_once(sc.select.topk(density=1.0), TORUS, vectors, (2, 3))
    assert np.isfinite(out["total"]).all()
    assert out["kept"].any()
    both = out["total"][0].astype(np.float64) + out["kept"].sum(0, dtype=np.float64)
    np.testing.assert_allclose(both, vectors.sum(0, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("buckets", [1, 3, 1000])
def test_buckets_have_the_bits_of_one_dense_allreduce(buckets):
    acc, everything = helpers.hard_accumulators(3, 101)["normal"], sc.select.topk(density=1.0)
    dense = helpers.run_once(everything, sc.allreduce.dense(), acc)
    bucketed = sc.allreduce.published.dense_bucketed(buckets=buckets)
    bucketed = helpers.run_once(everything, bucketed, acc)
    np.testing.assert_array_equal(bucketed["total"], dense["total"])
    np.testing.assert_array_equal(bucketed["info"].words, dense["info"].words)


def test_the_last_bucket_comes_first_and_none_waits_for_another():
    step = summed(sc.allreduce.published.dense_bucketed(buckets=4), "w")
    jaxpr = jax.make_jaxpr(step, axis_env=[("w", 2)])(jnp.ones(10)).jaxpr
    sums = helpers.independent_psums(jaxpr)
    assert [variable.aval.shape for variable in sums] == [(1,), (3,), (3,), (3,)]


# Full sums.

SIZE = 403
SELECTOR = sc.select.topk(density=table.DENSITY)


@pytest.mark.parametrize(
    ("name", "options", "workers"),
    [
        ("ok_topk", {}, 3),
        ("ok_topk", {"balance": "always"}, 4),
        ("ok_topk", {"regions": "equal", "slack": 1.0}, 5),
        ("ok_topk", {"regions": "balanced", "global_period": 3}, 8),
        ("spardl", {}, 2),
        ("spardl", {}, 5),
    ],
)
@pytest.mark.slow
def test_the_indices_alone_give_the_same_sums(name, options, workers):
    alone = table.make(name, **options)
    ways = [sc.allreduce.full_sums(each) for each in (alone, alone._replace(choose=None))]
    ways = [helpers.completed(SELECTOR, each, SIZE, workers) for each in ways]
    for case, acc in helpers.hard_accumulators(workers, SIZE).items():
        states = [start for _, start in ways]
        for count in range(3):
            acc = np.roll(acc, 7 * count, axis=1)
            outs = [run(acc, state) for (run, _), state in zip(ways, states, strict=True)]
            states, (out, other) = [after for _, after in outs], [made for made, _ in outs]
            for field in ("total", "kept"):
                np.testing.assert_array_equal(out[field], other[field], case)
            for field in ("delivered", "overflow"):
                mine, wrapped = getattr(out["info"], field), getattr(other["info"], field)
                np.testing.assert_array_equal(mine, wrapped, case)
            assert (np.asarray(out["info"].words) < np.asarray(other["info"].words)).all(), case
            # Entries of the total are in no residual.
            total, kept = np.asarray(out["total"][0]), np.asarray(out["kept"])
            gone = total != 0
            assert (kept[:, gone] == 0).all(), case
            if case != "subnormal":
                expected = acc.astype(np.float64)[:, gone].sum(0)
                scale = np.abs(acc[:, gone]).sum(0)
                assert (np.abs(total[gone] - expected) <= 1e-6 * scale).all(), case
            acc = kept


def test_workers_select_where_the_inner_allreduce_lets_them():
    """A worker shows its selector the last six entries only; full sums are made of all workers'."""

    def to_global(coo, size, state, *, axis):
        return sc.PaddedCOO(coo.values, coo.indices + size - 6, size)

    inner = sc.allreduce.topk_a()._replace(
        local_view=lambda acc, state, *, axis: acc[-6:], to_global=to_global
    )
    allreduce, selector = sc.allreduce.full_sums(inner), sc.select.topk(density=0.5)

    def step(acc):
        state = allreduce.init(10, 2)
        mine = allreduce.local_view(acc, state, axis="workers")
        coo, _, _ = selector.select(mine, selector.init(6))
        coo = allreduce.to_global(coo, 10, state, axis="workers")
        return allreduce.reduce(coo, state, axis="workers", acc=acc)[0].to_dense()

    acc = np.arange(20.0, dtype=np.float32).reshape(2, 10)
    total = sc.simulate(step, axis_size=2)(acc)[0]
    np.testing.assert_array_equal(total, np.where(np.arange(10) < 7, 0, acc.sum(axis=0)))


def words_of(allreduce, size, k, workers, **options):
    return sc.traffic.of_allreduce(
        sc.allreduce.full_sums(allreduce), size=size, capacity=k, axis_size=workers, **options
    ).words


# Ok-Topk with nothing to balance, and with a surplus that fits into a neighbor's slots.
@pytest.mark.parametrize(
    ("name", "workers"),
    [("ok_topk", 6), *slow_rows(*itertools.product(("ok_topk", "spardl"), (2, 3, 16, 100, 384)))],
)
def test_an_entry_takes_less_than_six_words(name, workers):
    size, k = (10**7, 10**5) if name == "ok_topk" else (10**5, 1000)
    allreduce, share = table.make(name, k / size), (workers - 1) / workers
    if name == "spardl":
        slots = math.ceil(k / workers)
        assert words_of(allreduce, size, k, workers) == pytest.approx(5 * slots * (workers - 1))
        return
    for branch in range(2):
        one_hot = {"balance": tuple(float(i == branch) for i in range(4))}
        assert words_of(allreduce, size, k, workers, frequencies=one_hot) < 6 * k * share


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "spardl"])
@pytest.mark.parametrize("codec", ["bf16", "narrow16", "narrow8", "qsgd"])
def test_pairs_stay_where_a_codec_makes_them_shorter(name, codec):
    made = table.make(name, 0.01, getattr(sc.wire, codec)())
    words = [words_of(each, 10**5, 1000, 4) for each in (made, made._replace(choose=None))]
    # A pair of `narrow16` is little more than a word, and one of `narrow8` little more than half.
    assert words[0] <= words[1]
    if codec in ("bf16", "qsgd"):
        assert words[0] < words[1] - 0.2 * 1000 * 3 / 4


@pytest.mark.parametrize(
    ("inner", "share"),
    # Few entries in a dense total; a stream that is dense because pairs would be longer.
    [
        (sc.allreduce.dense(), 0.6),
        *slow_rows((sc.allreduce.topk_a(), 0.05), (sc.allreduce.published.ring_sparse(), 0.6)),
    ],
    ids=lambda x: getattr(x, "spec", x),
)
def test_a_dense_total_is_complete_where_it_is_not_zero(inner, share):
    allreduce, workers = sc.allreduce.full_sums(inner), 3
    selector = sc.select.topk(density=share)

    def step(acc):
        coo, _, _ = selector.select(acc, selector.init(SIZE))
        state = allreduce.init(SIZE, workers)
        total, kept, _, _ = allreduce.reduce(coo, state, axis="workers", acc=acc)
        assert isinstance(total, sc.PaddedCOO)
        assert total.capacity == min(SIZE, workers * coo.capacity)
        return total.to_dense(), kept.residual(acc, coo), coo.to_dense()

    acc = np.random.default_rng(0).normal(size=(workers, SIZE)).astype(np.float32)
    total, residual, selected = map(np.asarray, sc.simulate(step, axis_size=workers)(acc))
    chosen = selected.sum(0) != 0
    np.testing.assert_allclose(total[0], np.where(chosen, acc.sum(0), 0), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(residual, np.where(chosen, 0, acc))
