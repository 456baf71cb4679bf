"""The balancing of Ok-Topk: whatever the counts, everything is delivered."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import _balance, _gather, _plan


@functools.cache
def _balancer(workers, k, slack, branch):
    plan = _plan.make_plan(10_000, k, workers, regions="equal", slack=slack)
    exchanges = _plan.exchanges(plan, lambda slots, size: 2 * slots)

    def run(values, indices, counts):
        entries = sc.PaddedCOO(values, indices, 10_000)
        chosen = _balance.choose_branch(counts, plan, "workers")
        moved = _balance.balance(
            entries,
            counts,
            jnp.int32(branch) if branch is not None else chosen,
            plan,
            axis="workers",
            codec=sc.wire.raw(),
            seed=jnp.uint32(0),
            exchanges=exchanges.balance,
        )
        gathered = _gather.gather(
            moved.entries,
            moved.entries.count(),
            moved.most,
            axis="workers",
            codec=sc.wire.raw(),
            seed=jnp.uint32(0),
            exchanges=exchanges.gather,
        )
        return gathered.total.to_dense(), moved.entries.count(), chosen, moved.most

    return plan, sc.simulate(run, axis_size=workers, in_axes=(0, 0, None))


def check_balance(counts, k, slack, branch=None):
    workers = len(counts)
    plan, run = _balancer(workers, k, slack, branch)
    indices = np.full((workers, k), 10_000, np.int32)
    values = np.zeros((workers, k), np.float32)
    expected = np.zeros(10_000, np.float32)
    first = 0
    for worker, count in enumerate(counts):
        indices[worker, :count] = 3 * np.arange(first, first + count)
        values[worker, :count] = 1 + np.arange(first, first + count)
        expected[indices[worker, :count]] = values[worker, :count]
        first += count
    total, moved, chosen, most = run(values, indices, np.asarray(counts, np.int32))
    assert (np.max(moved) <= np.asarray(most)).all()
    if branch == 3 or int(chosen[0]) == 3:
        # Each its share of what there is.
        share = -(-sum(counts) // workers)
        held = np.clip(sum(counts) - share * np.arange(workers), 0, share)
        assert np.asarray(moved).tolist() == held.tolist()
    np.testing.assert_array_equal(total, np.broadcast_to(expected, total.shape))
    assert np.asarray(moved).max() <= plan.gather_slots
    assert (np.asarray(chosen) == np.asarray(chosen)[0]).all()
    return _plan.BRANCHES[int(chosen[0])]


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
        # The neighbours have no room.
        ("spread", CROWD, 1.25),
        ("spread", CROWD[::-1], 1.25),
        ("spread", [18, 2, 18, 18, 18, 2, 2, 2], 1.25),
        # The extreme.
        ("all_to_all", [40, 0, 0, 0], 1.25),
        ("all_to_all", [0, 0, 0, 40], 1.25),
        ("all_to_all", [20, 20, 0, 0], 1.25),
    ],
)
def test_the_way_to_balance_is_the_shortest_that_has_room(branch, counts, slack):
    assert check_balance(counts, k=sum(counts), slack=slack) == branch


@pytest.mark.slow
@pytest.mark.parametrize(("branch", "slack"), [(None, 1.25), (3, 1.0)])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_balance_delivers_everything_whatever_the_counts(branch, slack, counts):
    """The last way also where the others would do."""
    # At most k = 40 in all, as the global selection guarantees.
    limited, left = [], 40
    for count in counts:
        limited.append(min(count, left))
        left -= limited[-1]
    check_balance(limited, k=40, slack=slack, branch=branch)


def test_from_which_k_on_balanced_regions_keep_the_bound():
    def share(k, workers, size=10**8):
        """Words of the worst of the first three branches, of 6 k (P-1)/P."""
        plan = _plan.make_plan(size, k, workers, regions="balanced")
        step = _plan.exchanges(plan, lambda slots, size: 2 * slots)
        most = max(branch.received(workers) if branch else 0 for branch in step.balance[:3])
        always = [*step.split, *step.threshold, step.counts, *step.gather]
        words = sum(each.received(workers) for each in always) + most
        words += step.consensus.received(workers) / _plan.REPARTITION_PERIOD
        return words / (6 * k * (workers - 1) / workers)

    # The numbers of docs/design.md.
    for workers, k in ((8, 580), (64, 1300), (256, 4000)):
        shares = [share(more, workers) for more in range(k, 4 * k, 7)]
        assert max(shares) <= 1
        assert share(k // 2, workers) > 1
    assert 1 < share(1000, 64, 10**5) < 1.015
