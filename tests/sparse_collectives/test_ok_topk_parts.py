"""The single phases of Ok-Topk: regions, the global selection, and its balancing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._ok_topk import (
    _balance,
    _exchanges,
    _global_selection,
    _plan,
    _state,
)
from sparse_collectives.allreduce._parts import _hashed

# Regions.


@pytest.mark.parametrize(
    ("workers", "size"), [(3, 900), (7, 2**31 - 1), (256, 85_002), (256, 2**31 - 1)]
)
def test_consensus_is_the_mean_of_boundaries_that_split_each_selection_evenly(workers, size):
    rng = np.random.default_rng(2)
    drawn = [rng.choice(size - size // 6, 600, replace=False) for _ in range(workers)]
    indices = (np.sort(drawn, axis=1) + size // 6).astype(np.int32)

    def agree(indices):
        coo = sc.PaddedCOO(jnp.zeros(600), indices, size)
        return _state.consensus(coo, workers, "workers"), _state.local_boundaries(coo, workers)

    agreed, local = map(np.asarray, sc.simulate(agree, axis_size=workers)(indices))
    # Local boundaries are not all rounded down, or the last region would grow by P / 2 places.
    np.testing.assert_array_equal(
        agreed, np.tile(local.sum(0, dtype=np.int64) // workers, (workers, 1))
    )
    assert (local[:, [0, -1]] == [0, size]).all()
    for row, edges in zip(indices, local, strict=True):
        counts = np.diff(np.searchsorted(row, edges))
        assert counts.sum() == 600
        assert counts.max() - counts.min() <= 1


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
            # Every worker owns one index of each complete row.
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
        # A layer, every eighth index, a column of a matrix: the deviation of m entries is at
        # most four times that in m throws of a die.
        for part in (owner[3000:3800], owner[5::8], owner[7::1000]):
            counts = np.bincount(part, minlength=workers)
            assert np.abs(counts - part.size / workers).max() < 4 * np.sqrt(part.size / workers)


# Global selection.


@pytest.mark.parametrize("k", [1, 40, 3000, 70_000])
def test_global_threshold_is_the_kth_of_the_union_or_its_smallest(k):
    workers, slots = 3, 40_000
    values = np.random.default_rng(4).standard_cauchy((workers, slots)).astype(np.float32)
    values[:, ::7] = 0
    bits = np.abs(values).view(np.int32)
    find = sc.simulate(
        lambda b: _global_selection.global_threshold(b, k, "workers"), axis_size=workers
    )
    assert np.asarray(find(bits)).tolist() == [np.sort(bits.reshape(-1))[-k]] * workers
    few = np.where(np.arange(slots) == 5, bits, 0)
    assert find(few)[0] == np.sort(few[few > 0])[-min(k, 3)]
    assert find(0 * bits)[0] == 0


CROWD = [18, 18, 18, 18, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "counts", "slack"),
    [
        ("none", [10, 10, 12, 8], 1.25),
        # They nearly fit.
        ("neighbours", [14, 10, 8, 8], 1.25),
        ("neighbours", [8, 8, 10, 14], 1.25),
        ("neighbours", [15, 25], 1.1),
        # The neighbors have no room.
        ("spread", CROWD, 1.25),
        ("spread", CROWD[::-1], 1.25),
        ("spread", [18, 2, 18, 18, 18, 2, 2, 2], 1.25),
        # The extreme.
        ("all_to_all", [40, 0, 0, 0], 1.25),
        ("all_to_all", [0, 0, 0, 40], 1.25),
        ("all_to_all", [20, 20, 0, 0], 1.25),
    ],
)
def test_balance_takes_the_shortest_way_that_has_room(branch, counts, slack):
    workers, size, k = len(counts), 10_000, sum(counts)
    plan = _plan.make_plan(size, k, workers, regions="equal", slack=slack)
    exchanges = _plan.exchanges(plan, lambda slots, size: 2 * slots)
    coded = {"axis": "workers", "codec": sc.wire.raw(), "seed": jnp.uint32(0)}

    def run(values, indices, counts):
        entries = sc.PaddedCOO(values, indices, size)
        chosen = _balance.choose_branch(counts, plan, "workers")
        moved = _balance.balance(
            entries, counts, chosen, plan, **coded, exchanges=exchanges.balance
        )
        held, count = moved.entries, moved.entries.count()
        gathered = _exchanges.gather(held, count, **coded, exchange=exchanges.gather)
        return gathered.total.to_dense(), count, chosen

    indices, values = np.full((workers, k), size, np.int32), np.zeros((workers, k), np.float32)
    ends = np.cumsum(counts)
    for worker, (count, end) in enumerate(zip(counts, ends, strict=True)):
        indices[worker, :count] = 3 * np.arange(end - count, end)
        values[worker, :count] = 1 + np.arange(end - count, end)
    expected = np.zeros(size, np.float32)
    expected[: 3 * k : 3] = 1 + np.arange(k)
    run = sc.simulate(run, axis_size=workers, in_axes=(0, 0, None))
    total, moved, chosen = run(values, indices, np.asarray(counts, np.int32))
    assert [_plan.BRANCHES[each] for each in chosen] == [branch] * workers
    np.testing.assert_array_equal(total, np.tile(expected, (workers, 1)))
    assert np.max(moved) <= plan.gather_slots
    if branch == "all_to_all":
        # Each worker has its share of all entries.
        assert np.asarray(moved).tolist() == [k // workers] * workers


def test_balanced_regions_keep_the_bound_from_some_k_on():
    def share(k, workers, size=10**8):
        """Words of the worst of the first three branches, as a share of 6 k (P-1)/P."""
        plan = _plan.make_plan(size, k, workers, regions="balanced")
        step = _plan.exchanges(plan, lambda slots, size: 2 * slots)
        most = max(branch.received(workers) if branch else 0 for branch in step.balance[:3])
        always = [step.split, *step.threshold, step.counts, step.gather]
        words = sum(each.received(workers) for each in always) + most
        words += step.consensus.received(workers) / _plan.REPARTITION_PERIOD
        return words / (6 * k * (workers - 1) / workers)

    # The numbers are in docs/architecture.md.
    for workers, k in ((8, 580), (64, 1300), (256, 4000)):
        shares = [share(more, workers) for more in range(k, 4 * k, 7)]
        assert max(shares) <= 1
        assert share(k // 2, workers) > 1
    assert 1 < share(1000, 64, 10**5) < 1.015
