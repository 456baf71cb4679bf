"""Ok-Topk against the oracle, and its phases one by one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import extend
from sparse_collectives.allreduce._parts import _hashed
from sparse_collectives.allreduce.ok_topk import (
    _global_selection,
    _plan,
    _regions,
    _split_reduce,
)
from tests.reference import ok_topk as oracle
from tests.reference import windows
from tests.sparse_collectives import helpers


def reduced(acc, density, **options):
    """One step with room for everything, unless ``options`` say otherwise."""
    options = {"slack": float(2 * len(acc)), **options}
    return helpers.run_once(*_algorithm(density, tuple(options.items())), acc)


@functools.cache
def _algorithm(density, options):
    return sc.select.topk(density=density), sc.allreduce.ok_topk(density=density, **dict(options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "density"),
    [
        *((workers, 0.05) for workers in helpers.WORKERS),
        *((workers, density) for density in (1 / 300, 1.0) for workers in (3, 8)),
    ],
)
def test_equals_topk_of_the_sum_of_topk(workers, density):
    size = 300
    k = max(1, round(density * size))
    for name, acc in helpers.hard_accumulators(workers, size).items():
        if name == "subnormal":
            continue  # has its own test
        out = reduced(acc, density)
        total, residuals = oracle.training_step(acc, k)
        assert (np.asarray(out["info"].overflow) == 0).all(), name
        got = np.asarray(out["total"], np.float64)[0]
        # Sums of equal magnitude tie in exact arithmetic and not always in
        # float32, and then another of them is taken: compare the magnitudes.
        scale = np.abs(acc).max() * 1e-6 * workers
        np.testing.assert_allclose(
            np.sort(np.abs(got)), np.sort(np.abs(total)), rtol=1e-5, atol=scale, err_msg=name
        )
        if name in ("normal", "one worker", "one region", "heavy tail", "disjoint"):
            np.testing.assert_allclose(got, total, rtol=1e-5, atol=scale, err_msg=name)
            kept = acc - np.asarray(out["sent"]) + np.asarray(out["kept"])
            np.testing.assert_array_equal(kept, residuals, name)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 6])
def test_equals_the_composition_of_lax_primitives(workers):
    """top_k, a dense psum, top_k."""
    acc = helpers.hard_accumulators(workers, 300)["normal"]
    k = 15

    def compose(acc):
        values = jnp.zeros(300).at[jax.lax.top_k(jnp.abs(acc), k)[1]].set(1.0) * acc
        total = jax.lax.psum(values, "workers")
        return jnp.zeros(300).at[jax.lax.top_k(jnp.abs(total), k)[1]].set(1.0) * total

    expected = sc.simulate(compose, axis_size=workers)(acc)
    np.testing.assert_allclose(reduced(acc, 0.05)["total"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", helpers.WORKERS)
def test_delivers_exactly_k_or_all_nonzeros(workers):
    size, density = 300, 0.05
    for name, acc in helpers.hard_accumulators(workers, size).items():
        out = reduced(acc, density)
        nonzeros = np.count_nonzero(np.asarray(out["sent"]).sum(axis=0))
        delivered = np.count_nonzero(np.asarray(out["total"])[0])
        assert delivered == out["info"].delivered[0], name
        if name == "subnormal":
            assert delivered == 0
            np.testing.assert_array_equal(out["kept"], out["sent"])
        elif name not in ("cancelling", "ties"):  # where a float32 sum may miss zero
            assert delivered == min(15, nonzeros), name


@pytest.mark.slow
def test_schedules_and_messages_in_flight_give_the_same_bits():
    workers = 5
    acc = helpers.hard_accumulators(workers, 403)["normal"]
    reference = reduced(acc, 0.05, schedule="all_to_all")
    for messages_in_flight in (1, 2, 100):
        out = reduced(acc, 0.05, schedule="rotation", messages_in_flight=messages_in_flight)
        for name in ("total", "kept"):
            np.testing.assert_array_equal(out[name], reference[name])


@pytest.mark.slow
def test_a_bucket_is_reduced_before_the_next_one_has_arrived_which_waits_for_it():
    """Section 3.1.1: communication in buckets, with the local reductions beside it."""
    allreduce = sc.allreduce.ok_topk(density=0.1, schedule="rotation", messages_in_flight=1)

    def step(values, indices):
        coo = sc.PaddedCOO(values, indices, 400)
        return allreduce.reduce(coo, allreduce.init(400, 4), axis="w")[0]

    given = jnp.zeros(40), jnp.zeros(40, jnp.int32)
    with extend.traced_for("portable"):
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
def test_unlimited_slack_has_room_for_everything():
    acc = helpers.hard_accumulators(4, 300)["one region"]
    out = reduced(acc, 0.05, slack=float("inf"))
    assert (np.asarray(out["info"].overflow) == 0).all()
    total, _ = oracle.training_step(acc, 15)
    np.testing.assert_allclose(np.asarray(out["total"])[0], total, rtol=1e-5)


@pytest.mark.slow
def test_a_buffer_of_two_thousand_million_entries_lowers():
    """Sums over workers pass 2**31 where the entries of one do not."""
    words = sc.traffic.of_allreduce(
        sc.allreduce.ok_topk(density=0.01), size=2**31 - 1, capacity=21_474_836, axis_size=1024
    ).words
    assert words < 7.5 * 21_474_836


@pytest.mark.slow
def test_a_reused_global_threshold_delivers_k_at_most_and_follows_the_count():
    size, density, workers = 2000, 0.05, 4
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(density=density, global_period=8)
    rng = np.random.default_rng(0)
    state = allreduce.init(size, workers)
    counts = []
    for step in range(32):
        acc = rng.standard_normal((workers, size)).astype(np.float32) * 1.02**step
        out = helpers.run_once(selector, allreduce, acc, state)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        counts.append(int(out["info"].delivered[0]))
    assert max(counts) <= 100
    assert counts[::8] == [100] * 4
    assert np.mean(counts) > 85


@pytest.mark.slow
def test_what_is_too_much_is_shared_out_evenly():
    rng = np.random.default_rng(0)
    for _ in range(300):
        workers, available = rng.integers(1, 9), int(rng.integers(0, 60))
        counts = rng.integers(0, 20, workers)
        share = np.zeros(workers, int)
        while share.sum() < min(available, counts.sum()):
            share[np.argmin(np.where(share < counts, share, 100))] += 1
        found = _global_selection._even_share(jnp.asarray(counts, jnp.int32), available)
        np.testing.assert_array_equal(found, share)


@pytest.mark.slow
def test_a_reused_threshold_that_is_too_low_leaves_nothing_to_balance():
    workers, size = 4, 20_000
    allreduce = sc.allreduce.ok_topk(density=0.02, global_period=32)
    selector = sc.select.topk(density=0.02)
    rng = np.random.default_rng(2)
    small = rng.standard_normal((workers, size)).astype(np.float32)
    out = helpers.run_once(selector, allreduce, small)
    state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
    # Three times as many of the sums reach the threshold of the step before.
    out = helpers.run_once(selector, allreduce, 3 * small, state)
    k, pairs = size // 50, 2
    info = jax.tree.map(lambda x: x[0], out["info"])
    assert info.delivered == k
    plan = _plan.make_plan(size, k, workers)
    counts = 3 * (workers - 1)
    assert info.words == pairs * (workers - 1) * (plan.split_slots + plan.gather_slots) + counts


@pytest.mark.slow
def test_in_a_full_block_other_entries_wait_at_each_step():
    """Everything of all workers in one region of fixed boundaries: still none starves."""
    workers, size, density = 4, 400, 0.1
    acc = np.zeros((workers, size), np.float32)
    acc[:, :40] = 1.0 + np.arange(40) / 100
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(
        density=density, slack=1.0, regions="balanced", repartition_period=1000
    )
    state = allreduce.init(size, workers)
    delivered = np.zeros(size, bool)
    # Ten slots for the 40 entries of each worker.
    for _ in range(windows.steps_for_all(10, 40)):
        frozen = state._replace(
            boundaries=jnp.asarray([0, 100, 200, 300, 400], jnp.int32), crowded=jnp.bool_(False)
        )
        frozen = frozen._replace(count=jnp.maximum(state.count, 1))
        out = helpers.run_once(selector, allreduce, acc, frozen)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        delivered |= np.asarray(out["total"])[0] != 0
    assert delivered[:40].all()


@pytest.mark.slow
def test_crowded_regions_are_cut_anew_before_their_period():
    workers, size = 8, 4000
    acc = helpers.hard_accumulators(workers, size)["one region"]
    selector = sc.select.topk(density=0.02)
    allreduce = sc.allreduce.ok_topk(density=0.02, regions="balanced")
    even = allreduce.init(size, workers)
    # As in the middle of a period, with the mass moved away from the regions.
    state = even._replace(count=jnp.int32(5), crowded=jnp.bool_(False))
    first = helpers.run_once(selector, allreduce, acc, state)
    assert first["allreduce_state"].crowded.all()
    state = jax.tree.map(lambda x: x[0], first["allreduce_state"])
    second = helpers.run_once(selector, allreduce, acc, state)
    assert 4 * np.sum(second["info"].overflow) < np.sum(first["info"].overflow)
    assert not second["allreduce_state"].crowded.any()


# Regions.


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_local_boundaries_split_the_selection_evenly(workers):
    rng = np.random.default_rng(1)
    indices = np.sort(rng.choice(5000, 500, replace=False)).astype(np.int32)
    padded = np.concatenate([indices, np.full(77, 5000, np.int32)])
    coo = sc.PaddedCOO(jnp.zeros(577), jnp.asarray(padded), 5000)
    boundaries = np.asarray(_regions.local_boundaries(coo, workers))
    counts = np.histogram(indices, boundaries)[0]
    assert boundaries[0] == 0
    assert boundaries[-1] == 5000
    assert counts.sum() == 500
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("workers", "size"), [(3, 900), (7, 2**31 - 1), (256, 85_002), (256, 2**31 - 1)]
)
def test_consensus_is_the_mean_of_the_local_boundaries(workers, size):
    rng = np.random.default_rng(2)
    indices = np.sort(rng.integers(size - size // 3, size, (workers, 600)), axis=1).astype(np.int32)

    def agree(indices):
        coo = sc.PaddedCOO(jnp.zeros(600), indices, size)
        return _regions.consensus(coo, workers, "workers"), _regions.local_boundaries(coo, workers)

    agreed, local = sc.simulate(agree, axis_size=workers)(indices)
    assert (np.asarray(agreed) == np.asarray(agreed)[0]).all()
    exact = np.asarray(local, np.int64).sum(axis=0) // workers
    np.testing.assert_array_equal(np.asarray(agreed)[0], exact)


def test_the_last_region_has_its_share():
    """Cuts that are all rounded down move P / 2 places to the left, and the last region grows."""
    workers, size = 256, 85_002
    rng = np.random.default_rng(3)
    indices = np.stack([np.sort(rng.choice(size, 8500, False)) for _ in range(workers)])
    indices = indices.astype(np.int32)

    def agree(indices):
        coo = sc.PaddedCOO(jnp.zeros(8500), indices, size)
        return _regions.consensus(coo, workers, "workers")

    boundaries = np.asarray(sc.simulate(agree, axis_size=workers)(indices)[0])
    counts = np.histogram(indices, boundaries)[0] / indices.size * workers
    # 8500 / 256 = 33 entries of each of 256 workers: a spread of about 1 %.
    assert 0.95 < counts[0] < 1.05
    assert 0.95 < counts[-1] < 1.05


def test_an_empty_selection_has_regions_of_equal_width():
    coo = sc.PaddedCOO(jnp.zeros(4), jnp.full(4, 100, jnp.int32), 100)
    assert _regions.local_boundaries(coo, 4).tolist() == [0, 25, 50, 75, 100]


# Hashed regions.


@pytest.mark.parametrize(
    ("workers", "size"), [(1, 7), (3, 900), (4, 901), (8, 5), (16, 12_015), (7, 2**31 - 1)]
)
def test_positions_are_a_bijection(workers, size):
    rng = np.random.default_rng(5)
    if size < 10**6:
        indices = np.arange(size)
    else:
        indices = np.append(np.sort(rng.integers(0, size - 2, 5000)), [size - 2, size - 1])
    padded = jnp.asarray(np.append(indices, size), jnp.int32)
    starts = np.asarray(_hashed.starts(size, workers))
    width = -(-size // workers)

    @jax.jit
    def there_and_back(step):
        row, owner = _hashed.row_and_owner(padded, size, workers, step)
        rows = sc.PaddedCOO(padded, jnp.where(padded < size, row, width), width)
        positions = _hashed.to_positions(rows, size, workers, owner)
        return owner, positions, _hashed.to_indices(positions, workers, step)

    for step in (0, 1, 2**31 - 1):
        owner, positions, back = there_and_back(jnp.int32(step))
        region = np.searchsorted(starts, np.asarray(positions.indices)[:-1], side="right") - 1
        np.testing.assert_array_equal(region, np.asarray(owner)[:-1])
        if size < 10**6:
            np.testing.assert_array_equal(np.sort(positions.indices), np.arange(size + 1))
            # Of each complete row every worker owns one index.
            complete = np.asarray(owner)[: size // workers * workers].reshape(-1, workers)
            assert (np.sort(complete, axis=1) == np.arange(workers)).all()
        np.testing.assert_array_equal(back.indices, padded)


def test_owners_change_from_step_to_step_and_have_equal_shares():
    size, workers = 80_000, 8
    indices = jnp.arange(size, dtype=jnp.int32)
    owners = [
        np.asarray(_hashed.row_and_owner(indices, size, workers, jnp.int32(step))[1])
        for step in range(3)
    ]
    assert 0.11 < (owners[0] == owners[1]).mean() < 0.14
    for owner in owners:
        # A layer, every eighth index, a column of a matrix: m entries, with at most four
        # times the spread of m throws of a die.
        for part in (owner[3000:3800], owner[5::8], owner[7::1000]):
            counts = np.bincount(part, minlength=workers)
            assert np.abs(counts - part.size / workers).max() < 4 * np.sqrt(part.size / workers)


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
    expected = oracle.ok_topk_by_owner(acc.sum(axis=0), turn, k)
    np.testing.assert_array_equal(np.asarray(out["total"])[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_workers_whose_mass_is_in_different_regions_do_not_crowd_any_owner(workers):
    """Boundaries that are averaged over the workers leave most of this waiting at each step."""
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
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        total, _ = oracle.training_step(acc, k)
        overflow.append(np.sum(out["info"].overflow) / (k * workers))
        missing.append(np.mean(np.asarray(out["total"])[0][total != 0] == 0))
    assert np.mean(overflow) < 0.01
    assert np.mean(missing) < 0.02


# Global selection: at once, or by rounds.


@pytest.mark.parametrize("workers", [2, *helpers.slow(8)])
def test_windows_and_rounds_select_the_same(workers, monkeypatch):
    size, density = 4000, 0.05
    selector = sc.select.topk(density=density)
    cases = helpers.hard_accumulators(workers, size)

    def run(cases):
        # One that was not compiled before, with the other way.
        allreduce = sc.allreduce.ok_topk(density=density)
        return {name: helpers.run_once(selector, allreduce, acc) for name, acc in cases.items()}

    # In each window more entries at the threshold than slots: it shows a part of what it should.
    rng = np.random.default_rng(0)
    full = np.zeros((workers, size), np.float32)
    for row in full:
        row[rng.choice(size, 100, replace=False)] = 1.0
    full[:, rng.choice(size, 100, replace=False)] = np.linspace(5, 9, 100, dtype=np.float32)
    cases["full windows"] = full
    # The same, and a few of the larger ones come last, where the window has no room for them.
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
    # Where the data are usual the windows are enough, and else the rounds come on top.
    plan = _plan.make_plan(size, 200, workers)
    pairs = 2 * (workers - 1) * (plan.split_slots + plan.gather_slots)
    monkeypatch.undo()
    plan = _plan.make_plan(size, 200, workers, windows=True)
    window = (plan.window + 5) * (workers - 1)
    assert at_once["normal"]["info"].words[0] == pairs + window
    assert at_once["ties"]["info"].words[0] > pairs + window


# Split and reduce.


def test_rotation_has_each_worker_receive_from_one_other_at_a_time():
    jaxpr = str(
        jax.make_jaxpr(
            lambda x: jnp.concatenate(
                list(_split_reduce.send_blocks(x, "w", schedule="rotation", messages_in_flight=2))
            ),
            axis_env=[("w", 4)],
        )(jnp.zeros((4, 6), jnp.int32))
    )
    for distance in (1, 2, 3):
        pairs = tuple((i, (i + distance) % 4) for i in range(4))
        assert str(pairs).replace(" ", "") in jaxpr.replace(" ", "")


# Global selection.


@pytest.mark.parametrize("k", [1, 37, 2000, 70_000])
def test_digits_cover_all_bits_within_their_share(k):
    digits = _plan.digits(k)
    top = 31
    for shift, width in digits:
        assert shift + width == top
        top = shift
    assert top == 0
    if k >= 2000:
        assert sum(2 << width for _, width in digits) <= k / 5


@pytest.mark.parametrize("k", [1, 40, 3000, 70_000])
def test_global_threshold_is_the_kth_of_the_union(k):
    workers, slots = 3, 40_000
    rng = np.random.default_rng(4)
    values = rng.standard_cauchy((workers, slots)).astype(np.float32)
    values[:, ::7] = 0
    bits = np.abs(values).view(np.int32)
    find = sc.simulate(
        lambda b: _global_selection.global_threshold(b, k, "workers"), axis_size=workers
    )
    expected = np.sort(bits.reshape(-1))[-k]
    assert np.asarray(find(bits)).tolist() == [expected] * workers


def test_global_threshold_with_fewer_than_k_nonzeros_is_the_smallest():
    bits = np.zeros((2, 50), np.int32)
    bits[0, :3] = [9, 77, 5]
    bits[1, 4] = 12345678
    for wanted, values in ((5, bits), (0, np.zeros_like(bits))):
        find = sc.simulate(
            lambda b: _global_selection.global_threshold(b, 10, "workers"), axis_size=2
        )
        assert find(values).tolist() == [wanted] * 2


# Bad input.
