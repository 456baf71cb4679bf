"""Complete sums around other allreduces: the same with the indices alone, for fewer words."""

import math

import jax
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import _plan
from tests.sparse_collectives import helpers

SIZE, DENSITY = 403, 0.05
SELECTOR = sc.select.topk(density=DENSITY)
SLOW = pytest.mark.slow


def stepper(inner, workers):
    """``step(acc, state) -> (total, residual, state, info)`` of all workers, and a state."""
    allreduce = sc.allreduce.complete(inner)

    def step(acc, state):
        coo, _, _ = SELECTOR.select(acc, SELECTOR.init(SIZE))
        total, kept, state, info = allreduce.reduce(coo, state, axis="workers", acc=acc)
        return total.to_dense(), kept.residual(acc, coo), state, info

    return sc.simulate(step, axis_size=workers, in_axes=(0, None)), allreduce.init(SIZE, workers)


def inner(name, **options):
    return sc.cost_model.ALGORITHMS[name].factory(density=DENSITY, **options)


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
    alone = inner(name, **options)
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


def traffic_of(allreduce, size, k, workers, branch=None):
    one_hot = {} if branch is None else {"balance": tuple(float(i == branch) for i in range(4))}
    return sc.traffic.of_allreduce(
        allreduce, size=size, capacity=k, axis_size=workers, frequencies=one_hot
    )


NUMBERS = (2, 3, 6, 16, 100, 384)


@pytest.mark.parametrize(
    ("workers", "branch"),
    [
        pytest.param(p, branch, marks=() if (p, branch) == (6, 1) else SLOW)
        for p in NUMBERS
        for branch in range(4)
    ],
)
def test_ok_topk_takes_less_than_six_words_for_an_entry(workers, branch):
    size, k = 10**7, 10**5
    allreduce = sc.allreduce.complete(sc.allreduce.ok_topk(density=k / size))
    plan, share = _plan.make_plan(size, k, workers, windows=True), (workers - 1) / workers
    threshold = sum(2 * (1 << width) for _, width in _plan.digits(k)) * share
    slots = 2 * plan.split_slots + plan.gather_slots
    counts = _plan._COUNTS * (workers - 1)
    window = (plan.window + _plan._WINDOW_COUNTS) * (workers - 1) if plan.window else 0
    fixed = slots * (workers - 1) + window + threshold + counts + 2 * k * share
    # Nothing to balance, a neighbour, dealt out, all anew.
    dealt = plan.spread_slots, plan.rank_slots
    moved = (0, plan.neighbour_slots, *(each * (workers - 1) for each in dealt))
    words = traffic_of(allreduce, size, k, workers, branch).words
    assert words == pytest.approx(fixed + moved[branch], rel=1e-9)
    if branch < 2:
        assert words < 6 * k * share


@pytest.mark.slow
@pytest.mark.parametrize("workers", NUMBERS)
def test_spardl_takes_five_words_for_an_entry(workers):
    size, k = 10**5, 1000
    allreduce = sc.allreduce.complete(sc.allreduce.spardl(density=k / size))
    slots = math.ceil(k / workers)
    words = traffic_of(allreduce, size, k, workers).words
    assert words == pytest.approx(5 * slots * (workers - 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "spardl"])
@pytest.mark.parametrize("codec", ["bf16", "narrow16", "narrow8", "qsgd"])
def test_pairs_stay_where_a_codec_makes_them_shorter(name, codec):
    made = sc.cost_model.ALGORITHMS[name].factory(density=0.01, codec=getattr(sc.wire, codec)())
    one = made, made._replace(choose=None)
    words = [traffic_of(sc.allreduce.complete(each), 10**5, 1000, 4).words for each in one]
    # A pair of `narrow16` is little more than a word, and one of `narrow8` little more than half.
    assert words[0] <= words[1]
    if codec in ("bf16", "qsgd"):
        assert words[0] < words[1] - 0.2 * 1000 * 3 / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "spardl"])
@pytest.mark.parametrize("codec", ["raw", "narrow8", "qsgd"])
def test_nothing_is_lost_with_a_codec(name, codec):
    workers = 4
    run, state = stepper(inner(name, codec=getattr(sc.wire, codec)()), workers)
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    for count in range(4):
        total, residual, state, info = run(acc, state)
        state = jax.tree.map(lambda x: x[0], state)
        lost = acc.sum(0, dtype=np.float64) - np.asarray(residual).sum(0, dtype=np.float64)
        np.testing.assert_allclose(lost, total[0], rtol=0, atol=1e-5)
        assert (np.asarray(total) == np.asarray(total)[0]).all()
        assert info.delivered[0] > 0
        acc = np.roll(np.asarray(residual), count, axis=1)


@pytest.mark.parametrize(
    ("inner", "share"),
    # Few entries in a dense total; a stream that is dense because pairs would be longer.
    [
        pytest.param(sc.allreduce.topk_a(), 0.05, marks=SLOW),
        pytest.param(sc.allreduce.published.ring_sparse(), 0.6, marks=SLOW),
        (sc.allreduce.dense(), 0.6),
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
