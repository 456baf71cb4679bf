"""Ok-Topk against the oracle, and over steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._ok_topk import _plan
from sparse_collectives.allreduce._parts import _hashed
from tests.reference import ok_topk as oracle
from tests.sparse_collectives import helpers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "density"),
    [
        *((workers, 0.05) for workers in helpers.WORKERS),
        *((workers, density) for density in (1 / 300, 1.0) for workers in (3, 8)),
    ],
)
def test_equals_topk_of_the_sum_of_topk_and_delivers_k_or_all_nonzeros(workers, density):
    size = 300
    k = max(1, round(density * size))
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(density=density, slack=2.0 * workers)
    for name, acc in helpers.hard_accumulators(workers, size).items():
        out = helpers.run_once(selector, allreduce, acc)
        got = np.asarray(out["total"], np.float64)[0]
        delivered = np.count_nonzero(got)
        assert delivered == out["info"].delivered[0], name
        if name == "subnormal":
            assert delivered == 0
            np.testing.assert_array_equal(out["kept"], out["sent"])
            continue
        total, residuals = oracle.training_step(acc, k)
        assert (np.asarray(out["info"].overflow) == 0).all(), name
        if name not in ("cancelling", "ties"):  # where a float32 sum may miss zero
            assert delivered == min(k, np.count_nonzero(np.asarray(out["sent"]).sum(axis=0))), name
        # Sums of equal magnitude tie in exact arithmetic but not always in float32, and then
        # another of them is taken; so the magnitudes are compared.
        scale = np.abs(acc).max() * 1e-6 * workers
        np.testing.assert_allclose(
            np.sort(np.abs(got)), np.sort(np.abs(total)), rtol=1e-5, atol=scale, err_msg=name
        )
        if name in ("normal", "one worker", "one region", "heavy tail", "disjoint"):
            np.testing.assert_allclose(got, total, rtol=1e-5, atol=scale, err_msg=name)
            kept = acc - np.asarray(out["sent"]) + np.asarray(out["kept"])
            np.testing.assert_array_equal(kept, residuals, name)


@pytest.mark.slow
def test_ok_topk_reduces_a_bucket_before_the_next_one_has_arrived():
    """Section 3.1.1: communication in buckets, overlapped with the local reductions."""
    allreduce = sc.allreduce.ok_topk(density=0.1, schedule="rotation", messages_in_flight=1)

    def step(values, indices):
        coo = sc.PaddedCOO(values, indices, 400)
        return allreduce.reduce(coo, allreduce.init(400, 4), axis="w")[0]

    given = jnp.zeros(40), jnp.zeros(40, jnp.int32)
    with helpers.traced_for("cpu"):
        equations = jax.make_jaxpr(step, axis_env=[("w", 4)])(*given).jaxpr.eqns
    sent, reduced_from, before = 0, set(), {}
    for equation in equations:
        needed = set().union(*(before.get(id(x), set()) for x in equation.invars))
        if equation.primitive.name == "ppermute":
            # All messages before it have arrived.
            assert needed == set(range(sent))
            needed, sent = needed | {sent}, sent + 1
        elif equation.primitive.name == "scatter-add":
            reduced_from.add(frozenset(needed))
        for x in equation.outvars:
            before[id(x)] = needed
        if reduced_from >= {frozenset(range(i)) for i in (1, 2, 3)}:
            return
    raise AssertionError(f"{sent} messages, sums of those of {sorted(map(sorted, reduced_from))}")


@pytest.mark.slow
def test_ok_topk_reused_global_threshold_delivers_k_at_most_and_follows_the_count():
    size, density, workers = 2000, 0.05, 4
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(density=density, global_period=8)
    rng = np.random.default_rng(0)
    state, counts = allreduce.init(size, workers), []
    for step in range(32):
        acc = rng.standard_normal((workers, size)).astype(np.float32) * 1.02**step
        out = helpers.run_once(selector, allreduce, acc, state)
        state = helpers.next_state(out)
        counts.append(int(out["info"].delivered[0]))
    assert max(counts) <= 100
    assert counts[::8] == [100] * 4
    assert np.mean(counts) > 85
    # Three times as many sums reach the threshold of the step before.
    out = helpers.run_once(selector, allreduce, acc, allreduce.init(size, workers))
    out = helpers.run_once(selector, allreduce, 3 * acc, helpers.next_state(out))
    assert out["info"].delivered[0] == 100


@pytest.mark.slow
def test_crowded_regions_are_cut_anew_before_their_period():
    workers, size = 8, 4000
    acc = helpers.hard_accumulators(workers, size)["one region"]
    selector = sc.select.topk(density=0.02)
    allreduce = sc.allreduce.ok_topk(density=0.02, regions="balanced")
    even = allreduce.init(size, workers)
    # As in the middle of a period, with the mass moved away from the regions.
    state = even._replace(count=jnp.int32(5), overflowed=jnp.bool_(False))
    first = helpers.run_once(selector, allreduce, acc, state)
    assert first["allreduce_state"].overflowed.all()
    state = helpers.next_state(first)
    second = helpers.run_once(selector, allreduce, acc, state)
    assert 4 * np.sum(second["info"].overflow) < np.sum(first["info"].overflow)
    assert not second["allreduce_state"].overflowed.any()


@pytest.mark.slow
def test_ties_go_to_the_first_owners_and_there_to_the_lowest_rows():
    size, workers, k, step = 403, 5, 20, 3
    allreduce = sc.allreduce.ok_topk(density=k / size, slack=math.inf)
    state = allreduce.init(size, workers)._replace(count=jnp.int32(step))
    acc = np.zeros((workers, size), np.float32)
    acc[:, 7:207:5] = 2.0
    acc[:, 8:24:5] = 3.0
    out = helpers.run_once(sc.select.topk(density=44 / size), allreduce, acc, state)
    turn = np.asarray(_hashed.row_and_owner(jnp.arange(size), size, workers, jnp.int32(step))[1])
    by_owner, total = np.argsort(turn, kind="stable"), acc.sum(axis=0)
    chosen = by_owner[oracle.local_topk(total[by_owner], k)]
    expected = np.where(np.isin(np.arange(size), chosen), total, 0)
    np.testing.assert_array_equal(np.asarray(out["total"])[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_workers_whose_mass_is_in_different_regions_do_not_crowd_any_owner(workers):
    """With boundaries averaged over the workers, most of this would not be sent in a step."""
    size, density = 12_000, 0.02
    k = round(density * size)
    rng = np.random.default_rng(8)
    selector, allreduce = sc.select.topk(density=density), sc.allreduce.ok_topk(density=density)
    state, overflow, missing = allreduce.init(size, workers), [], []
    for _ in range(5):
        acc = np.zeros((workers, size), np.float32)
        for worker, part in enumerate(np.array_split(np.arange(size), workers)):
            acc[worker, part] = rng.standard_normal(part.size)
        out = helpers.run_once(selector, allreduce, acc, state)
        state = helpers.next_state(out)
        total, _ = oracle.training_step(acc, k)
        overflow.append(np.sum(out["info"].overflow) / (k * workers))
        missing.append(np.mean(np.asarray(out["total"])[0][total != 0] == 0))
    assert np.mean(overflow) < 0.01
    assert np.mean(missing) < 0.02


@pytest.mark.parametrize("workers", [2, *helpers.slow(8)])
@pytest.mark.slow
def test_windows_and_rounds_select_the_same(workers, monkeypatch):
    size, density = 4000, 0.05
    selector = sc.select.topk(density=density)
    cases = helpers.hard_accumulators(workers, size)

    def run(cases):
        # A new allreduce, which was not compiled with the other way.
        allreduce = sc.allreduce.ok_topk(density=density)
        return {name: helpers.run_once(selector, allreduce, acc) for name, acc in cases.items()}

    # Each window has more entries at the threshold than slots, and shows only some of them.
    rng = np.random.default_rng(0)
    full = np.zeros((workers, size), np.float32)
    for row in full:
        row[rng.choice(size, 100, replace=False)] = 1.0
    full[:, rng.choice(size, 100, replace=False)] = np.linspace(5, 9, 100, dtype=np.float32)
    cases["full windows"] = full
    # The same, with a few of the larger entries last, for which the window has no room.
    late = np.zeros((workers, size), np.float32)
    large, few = 200 // workers, 16 // workers
    for worker, row in enumerate(late):
        values = np.linspace(2, 9, large)
        row[worker : (large - few) * workers : workers] = values[few:]
        row[500 + worker : 500 + 200 * workers : workers] = 1.0
        row[size - few * workers + worker :: workers] = values[:few]
    cases["full of small ones"] = late
    at_once = run(cases)
    monkeypatch.setattr(_plan, "_window", lambda *_: (0, 0))
    by_rounds = run(cases)
    for name in cases:
        for field in ("total", "kept"):
            np.testing.assert_array_equal(at_once[name][field], by_rounds[name][field], name)
    # The windows are enough for usual data; otherwise the rounds are added.
    assert at_once["normal"]["info"].words[0] < at_once["ties"]["info"].words[0]
