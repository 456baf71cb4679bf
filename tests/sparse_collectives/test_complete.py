"""Complete sums around other allreduces: the same with the indices alone, for fewer words."""

import itertools
import math

import jax
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.helpers import slow_rows

SIZE = 403
SELECTOR = sc.select.topk(density=table.DENSITY)


def stepper(inner, workers):
    """``step(acc, state) -> (total, residual, state, info)`` of all workers, and a state."""
    allreduce = sc.allreduce.complete(inner)

    def step(acc, state):
        coo, _, _ = SELECTOR.select(acc, SELECTOR.init(SIZE))
        total, kept, state, info = allreduce.reduce(coo, state, axis="workers", acc=acc)
        return total.to_dense(), kept.residual(acc, coo), state, info

    return sc.simulate(step, axis_size=workers, in_axes=(0, None)), allreduce.init(SIZE, workers)


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
    steps = [stepper(each, workers) for each in (alone, alone._replace(choose=None))]
    for case, acc in helpers.hard_accumulators(workers, SIZE).items():
        accs, states = [acc, acc], [state for _, state in steps]
        for count in range(3):
            accs = [np.roll(each, 7 * count, axis=1) for each in accs]
            outs = [run(*given) for (run, _), given in zip(steps, zip(accs, states), strict=True)]
            (total, residual, state, info), (expected, kept, _, wrapped) = outs
            np.testing.assert_array_equal(total, expected, case)
            np.testing.assert_array_equal(residual, kept, case)
            for field in ("delivered", "overflow"):
                np.testing.assert_array_equal(getattr(info, field), getattr(wrapped, field), case)
            assert (np.asarray(info.words) < np.asarray(wrapped.words)).all(), case
            # What is in the total waits nowhere, and what isn't is as it was.
            where = np.asarray(total[0]) != 0
            assert (np.asarray(residual)[:, where] == 0).all(), case
            if case != "subnormal":
                expected = accs[0].astype(np.float64)[:, where].sum(0)
                scale = np.abs(accs[0][:, where]).sum(0)
                assert (np.abs(total[0][where] - expected) <= 1e-6 * scale).all(), case
            accs = [np.asarray(residual), np.asarray(kept)]
            states = [jax.tree.map(lambda x: x[0], out[2]) for out in outs]


def words_of(allreduce, size, k, workers, **options):
    return sc.traffic.of_allreduce(
        sc.allreduce.complete(allreduce), size=size, capacity=k, axis_size=workers, **options
    ).words


# Of Ok-Topk without anything to balance, and with what a neighbour has room for.
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
    allreduce, workers = sc.allreduce.complete(inner), 3
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
