"""Finite gradients of any size leave finite residuals, and training goes on behind them."""

import jax
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._step._nonfinite import LARGEST as BOUND
from tests.optax_ext.helpers import run

SIZE, DENSITY, HUGE, NORMAL = 64, 0.125, 4, 8
LARGEST = float(np.finfo(np.float32).max)
SELECTOR = sc.select.topk(density=DENSITY)


def exchanges(codec):
    ar = sc.allreduce
    return {
        "ok_topk": ar.ok_topk(density=DENSITY, codec=codec),
        "ok_topk, balanced regions": ar.ok_topk(density=DENSITY, regions="balanced", codec=codec),
        "ok_topk, no slack": ar.ok_topk(density=DENSITY, slack=1.0, codec=codec),
        "ok_topk, the paper's": ar.ok_topk(density=DENSITY, paper=True, codec=codec),
        "gtopk": ar.published.gtopk(density=DENSITY, codec=codec),
        "spardl": ar.spardl(density=DENSITY, codec=codec),
        "topk_a": ar.topk_a(codec=codec),
        "sparse_allgather": ar.published.sparse_allgather(codec=codec),
        "ring_sparse": ar.published.ring_sparse(codec=codec),
        "ring_sparse, no slack": ar.published.ring_sparse(slack=1.0, fill=1.0, codec=codec),
        "ssar_recursive_double": ar.published.ssar_recursive_double(codec=codec),
        "ssar_recursive_double, bounded": ar.published.ssar_recursive_double(
            capacity=4, codec=codec
        ),
        "ssar_split_allgather": ar.published.ssar_split_allgather(codec=codec),
        "dsar_split_allgather": ar.published.dsar_split_allgather(codec=codec),
    }


def transformation(exchange, axis="w", **options):
    return optax_ext.sparse_allreduce(SELECTOR, exchange, axis=axis, **options)


CASES = {name: transformation(exchange) for name, exchange in exchanges(None).items()}
# Codecs where what is rounded off differs in kind: own entries, sums, what found no slot, shares.
ROUNDED = {
    "narrow8": (
        *("ok_topk", "gtopk", "spardl", "topk_a", "ring_sparse, no slack"),
        *("ssar_recursive_double, bounded", "dsar_split_allgather"),
    ),
    "qsgd": ("ok_topk", "spardl", "topk_a", "dsar_split_allgather"),
}
CASES |= {
    f"{name}, {codec}": transformation(exchanges(made)[name])
    for codec, made in (("narrow8", sc.wire.narrow8()), ("qsgd", sc.wire.qsgd(bits=2, norm="l2")))
    for name in ROUNDED[codec]
}
CASES |= {
    "agreed": transformation(sc.allreduce.agreed(density=DENSITY)),
    "agreed, few bits": transformation(sc.allreduce.agreed(density=DENSITY, bits=None)),
    "leader": transformation(sc.allreduce.published.leader()),
    "complete spardl": transformation(sc.allreduce.complete(sc.allreduce.spardl(density=DENSITY))),
    "dense": transformation(sc.allreduce.dense()),
    "dense_bucketed": transformation(sc.allreduce.published.dense_bucketed(buckets=3)),
    "gtopk, drop": transformation(sc.allreduce.published.gtopk(density=DENSITY), nonfinite="drop"),
}


# The first had infinite residuals; so had gtopk, and what finds no slot in ssar and ring.
QUICK = {"spardl": 8, "topk_a": 7}
# Those whose rounds are others where the number of workers is no power of two, or odd.
BOTH = ("gtopk", "spardl", "ssar_recursive_double, bounded")


def trained(name, given):
    """Updates, residuals and counters of each step, of all workers."""
    found = run(CASES[name], given)
    return found.updates, found.residuals, found.state


def gradients(workers, seed):
    """Steps of signs times the largest number, of all workers or of one, then normal ones."""
    rng = np.random.default_rng(seed)
    given = rng.standard_normal((HUGE + NORMAL, workers, SIZE))
    signs = rng.choice([-1.0, 1.0], (HUGE, workers, SIZE))
    # Half of the entries have one sign everywhere: nothing cancels.
    signs[..., ::2] = 1.0
    given[:HUGE] = np.where(rng.random((HUGE, workers, SIZE)) < 0.8, signs * LARGEST, 0.5)
    given[1, 1:] = rng.standard_normal((workers - 1, SIZE))
    return given.astype(np.float32)


def all_cases():
    for number, name in enumerate(CASES):
        if "drop" not in name:
            other = QUICK.get(name, 7 + number % 2)
            for workers in (7, 8) if name in BOTH else (other,):
                marks = () if QUICK.get(name) == workers else pytest.mark.slow
                yield pytest.param(name, workers, marks=marks)


@pytest.mark.parametrize(("name", "workers"), list(all_cases()))
def test_residuals_stay_finite_and_training_goes_on(name, workers):
    for seed in range(3):
        given = gradients(workers, seed)
        updates, residuals, counters = trained(name, given)
        assert np.isfinite(updates).all()
        assert np.isfinite(residuals).all()
        skipped = np.diff(counters.skipped[:, 0], prepend=0)
        assert not skipped[HUGE:].any()
        # Two bits may round all of the few entries of a step to 0, and the paper's threshold, of
        # the large gradients, is reused for 32 steps.
        delivers = (updates[HUGE:, 0] != 0).any(axis=1)
        least = 0.0 if "paper" in name else 0.5 if "qsgd" in name else 1.0
        assert delivers.mean() >= least
        before = np.zeros((workers, SIZE))
        for step, gradient in enumerate(given):
            after = residuals[step].astype(np.float64)
            if skipped[step]:
                np.testing.assert_array_equal(after, before)
                assert not updates[step].any()
            acc = before + gradient * (1 - skipped[step])
            np.testing.assert_allclose(
                workers * updates[step, 0].astype(np.float64) + after.sum(0),
                acc.sum(0),
                rtol=0,
                atol=workers**2 * 2.0**-22 * np.abs(acc).max(),
            )
            before = after


BOUNDED = ["spardl", "gtopk"]


@pytest.mark.parametrize("name", [BOUNDED[0], pytest.param(BOUNDED[1], marks=pytest.mark.slow)])
def test_residuals_grow_by_less_than_p_times_the_bound(name):
    """Gradients just below it are taken, of one sign, where nothing cancels."""
    workers, steps = 8, HUGE + NORMAL
    below = np.float32(BOUND) * np.float32(1 - 2.0**-24)
    given = np.full((steps, workers, SIZE), below)
    updates, residuals, counters = trained(name, given)
    assert not counters.skipped.any()
    assert (updates != 0).any()
    grown = np.arange(1, steps + 1) * workers * float(below) * (1 + 1e-5)
    assert (np.abs(residuals.astype(np.float64)).sum(1) <= grown[:, None]).all()
    given[3, 2, 5] = BOUND
    assert trained(name, given)[2].skipped[:, 0].tolist() == [0] * 3 + [1] * (steps - 3)


@pytest.mark.slow
def test_by_option_only_the_entry_is_left_out():
    given = gradients(7, 0)
    _, residuals, counters = trained("gtopk, drop", given)
    assert np.isfinite(residuals).all()
    large = np.abs(given) >= BOUND
    assert counters.dropped[:, 0].tolist() == np.cumsum(large.sum((1, 2))).tolist()
    assert not counters.skipped.any()


def test_where_nothing_of_others_is_kept_every_finite_gradient_is_taken():
    given = np.zeros((HUGE + NORMAL, 7, SIZE), np.float32)
    given[0, :, 3] = LARGEST
    updates, residuals, counters = trained("topk_a", given)
    assert not counters.skipped.any()
    assert (updates[0, :, 3] > 1e37).all()
    assert (residuals[0, :, 3] > 3e38).all()
    # A share of it goes at each step.
    assert (np.diff(residuals[:, 0, 3]) < 0).all()


def test_which_allreduces_say_that_they_keep_parts_of_others():
    assert {name for name, each in exchanges(None).items() if each.keeps_others} == {
        "gtopk",
        "spardl",
        "ring_sparse",
        "ring_sparse, no slack",
        "ssar_recursive_double, bounded",
    }
    # Rounding is of sums, but where each worker encodes what is its own.
    lossy = exchanges(sc.wire.narrow8())
    assert {name for name, each in lossy.items() if not each.keeps_others} == {
        "topk_a",
        "sparse_allgather",
    }
    nodes = sc.allreduce.hierarchical(inner_axis="d", outer=lossy["spardl"])
    assert nodes.keeps_others
    assert not sc.allreduce.hierarchical(inner_axis="d", outer=lossy["topk_a"]).keeps_others


@pytest.mark.slow
def test_those_that_do_not_say_so_keep_none():
    made = exchanges(None)
    lossy = exchanges(sc.wire.narrow8())
    made |= {f"{name}, lossy": each for name, each in lossy.items()}
    made |= {"agreed": sc.allreduce.agreed(), "leader": sc.allreduce.published.leader()}
    made["complete"] = sc.allreduce.complete(made["gtopk"])
    made |= {
        "dense": sc.allreduce.dense(),
        "buckets": sc.allreduce.published.dense_bucketed(buckets=2),
    }

    def others(exchange):
        def step(values, indices):
            coo = sc.PaddedCOO(values, indices, SIZE)
            state = exchange.init(SIZE, 3)
            return exchange.reduce(coo, state, axis="w")[1].others.values

        shapes = (jax.ShapeDtypeStruct((3, 8), "float32"), jax.ShapeDtypeStruct((3, 8), "int32"))
        return jax.eval_shape(jax.vmap(step, axis_name="w"), *shapes).size

    for name, each in made.items():
        assert each.keeps_others or not others(each), name
