"""Finite gradients of any size leave finite residuals, and training continues after them.

tests/fuzz checks with gradients of this size that nothing is lost and skipped steps change nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback._nonfinite import LARGEST as BOUND
from tests.optax_ext.helpers import run, slow
from tests.sparse_collectives import table

SIZE, DENSITY, HUGE, NORMAL = 64, 0.125, 4, 8
LARGEST = float(np.finfo(np.float32).max)
OPTIONS = {
    "ok_topk, balanced regions": {"regions": "balanced"},
    "ok_topk, no slack": {"slack": 1.0},
    "ok_topk, the paper's": {"paper": True},
    "ring_sparse, no slack": {"slack": 1.0, "fill": 1.0},
    "ssar_recursive_double, bounded": {"capacity": 4},
    "partitioned_topk, few bits": {"bits": None},
    "partitioned_topk, few bits both ways": {"bits": (1, 3)},
}


def exchange(name, codec=None):
    return table.make(name.partition(",")[0], DENSITY, codec, **OPTIONS.get(name, {}))


PLAIN = {name: exchange(name) for name in (*table.ALGORITHMS, *OPTIONS)}
LOSSY = {
    name: exchange(name, sc.wire.narrow8()) for name in PLAIN if name.split(",")[0] in table.ENCODED
}
# Codecs with rounding errors of each kind: of own entries, sums, overflow and shares.
ROUNDED = (
    *("ok_topk", "gtopk", "spardl", "topk_a", "ring_sparse, no slack"),
    *("ssar_recursive_double, bounded", "dsar_split_allgather"),
)
QSGD = sc.wire.qsgd(bits=2, norm="l2")
CASES = PLAIN | {
    **{f"{name}, narrow8": LOSSY[name] for name in ROUNDED},
    **{f"{x}, qsgd": exchange(x, QSGD) for x in ROUNDED if x in ("ok_topk", "spardl", "topk_a")},
    "full_sums spardl": sc.allreduce.full_sums(PLAIN["spardl"]),
}
# The first had infinite residuals; so had gtopk, and the overflow of ssar and ring.
QUICK = [("spardl", 8), ("topk_a", 7)]
# Exchanges whose rounds depend on whether the number of workers is a power of two, or even.
BOTH = ("gtopk", "spardl", "ssar_recursive_double, bounded")
ALL = [(name, workers) for name in CASES for workers in ((7, 8) if name in BOTH else (7,))]


@functools.cache
def transformation(name, **options):
    selector = sc.select.topk(density=DENSITY)
    return optax_ext.sparse_allreduce(selector, CASES[name], axis="w", **options)


def trained(name, given, **options):
    """Updates, residuals and counters of each step, of all workers."""
    found = run(transformation(name, **options), given)
    return found.updates, found.residuals, found.state


def gradients(workers, seed):
    """Steps of signs times the largest number, of all workers or of one, then normal ones."""
    rng = np.random.default_rng(seed)
    given = rng.standard_normal((HUGE + NORMAL, workers, SIZE))
    signs = rng.choice([-1.0, 1.0], (HUGE, workers, SIZE))
    # Half of the entries have the same sign on all workers, so nothing cancels.
    signs[..., ::2] = 1.0
    given[:HUGE] = np.where(rng.random((HUGE, workers, SIZE)) < 0.8, signs * LARGEST, 0.5)
    given[1, 1:] = rng.standard_normal((workers - 1, SIZE))
    return given.astype(np.float32)


@pytest.mark.parametrize(("name", "workers"), [x if x in QUICK else slow(*x) for x in ALL])
@pytest.mark.one_in(2)
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


@pytest.mark.parametrize("name", ["spardl", slow("gtopk")])
@pytest.mark.slow
def test_residuals_grow_by_less_than_p_times_the_bound(name):
    """Gradients just below it are taken; they have one sign, so nothing cancels."""
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
def test_largest_gradients_are_dropped_by_option_entry_by_entry():
    given = gradients(7, 0)
    _, residuals, counters = trained("gtopk", given, nonfinite="drop")
    assert np.isfinite(residuals).all()
    large = np.abs(given) >= BOUND
    assert counters.dropped[:, 0].tolist() == np.cumsum(large.sum((1, 2))).tolist()
    assert not counters.skipped.any()


def test_largest_gradients_are_taken_where_nothing_of_others_is_kept():
    given = np.zeros((HUGE + NORMAL, 7, SIZE), np.float32)
    given[0, :, 3] = LARGEST
    updates, residuals, counters = trained("topk_a", given)
    assert not counters.skipped.any()
    assert (updates[0, :, 3] > 1e37).all()
    assert (residuals[0, :, 3] > 3e38).all()
    # A share of the residual is applied at each step.
    assert (np.diff(residuals[:, 0, 3]) < 0).all()


def test_allreduces_that_say_that_they_keep_parts_of_others():
    keep = {"gtopk", "spardl", "ssar_recursive_double, bounded"}
    keep |= {"ring_sparse", "ring_sparse, no slack", "partitioned_topk, few bits both ways"}
    assert {name for name, each in PLAIN.items() if each.may_keep_partial_sums} == keep
    # Sums are rounded, except if each worker encodes its own entries.
    own = {"topk_a", "sparse_allgather"}
    assert {name for name, each in LOSSY.items() if not each.may_keep_partial_sums} == own
    for name in ("spardl", "topk_a"):
        nodes = sc.allreduce.hierarchical(inner_axis="d", outer=LOSSY[name])
        assert nodes.may_keep_partial_sums == LOSSY[name].may_keep_partial_sums


@pytest.mark.slow
def test_allreduces_that_do_not_say_so_keep_none_of_others():
    def others(exchange):
        def step(values, indices):
            coo = sc.PaddedCOO(values, indices, SIZE)
            state = exchange.init(SIZE, 3)
            return exchange.reduce(coo, state, axis="w")[1].others.values

        shapes = (jax.ShapeDtypeStruct((3, 8), "float32"), jax.ShapeDtypeStruct((3, 8), "int32"))
        return jax.eval_shape(jax.vmap(step, axis_name="w"), *shapes).size

    for name, each in (*CASES.items(), *LOSSY.items()):
        assert each.may_keep_partial_sums or not others(each), name


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("policy", ["skip", "drop"])
def test_a_part_of_a_limited_or_rounded_mean_does_not_overflow(dtype, policy):
    """Every worker keeps a part of the mean, also one whose residual has the other sign."""
    options = {"limit": 1e35, "local": optax.scale(-1.0)} if dtype is np.float32 else {}
    given = gradients(7, 0).astype(dtype)
    given = np.where(np.isfinite(given), given, np.sign(given) * 3.38e38).astype(dtype)
    _, residuals, counters = trained("topk_a", given, nonfinite=policy, **options)
    assert np.isfinite(residuals).all()
    large = (np.abs(given.astype(np.float32)) >= BOUND).sum((1, 2))
    if policy == "drop":
        assert counters.dropped[:, 0].tolist() == np.cumsum(large).tolist()
    else:
        assert counters.skipped[:, 0].tolist() == np.cumsum(large > 0).tolist()


def test_a_local_step_that_overflows_is_left_out_whatever_the_decay():
    """The decay is applied at exchanges only, so it does not make room for a local step."""
    decay = optax_ext.residual(decay=0.5)
    options = {"every": 3, "residual": decay, "local": optax.scale(-1.0)}
    given = np.full((3, 2, SIZE), 0.6 * LARGEST, np.float32)
    given[1, 1] = 0.1 * LARGEST
    _, residuals, counters = trained("topk_a", given, **options)
    assert counters.missed[:, :, 0].tolist() == [[0, 0], [1, 0], [1, 0]]
    np.testing.assert_array_equal(residuals[1], [-given[0, 0], -given[0, 1] - given[1, 1]])
