"""Options of Ok-Topk: fixed regions, balancing or none, and messages of several sizes."""

import functools
import math

import jax
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers

SIZE, WORKERS, DENSITY = 400, 4, 0.1
K = 40
SELECTOR = sc.select.topk(density=DENSITY)


@functools.cache
def allreduce(**options):
    return sc.allreduce.ok_topk(density=DENSITY, **options)


def run(acc, state=None, **options):
    out = helpers.run_once(SELECTOR, allreduce(**options), acc, state)
    helpers.check_conserved(out)
    return out


def words(**options):
    given = {"size": SIZE, "capacity": K, "axis_size": WORKERS}
    return sc.traffic.of_allreduce(allreduce(**options), **given).by_scope(depth=2)


@pytest.mark.slow
def test_equal_regions_stay_and_overflow_where_the_selection_is_uneven():
    options = {"regions": "equal", "balance": "always"}
    state = allreduce(**options).init(SIZE, WORKERS)
    # All entries are in the first region.
    acc = helpers.hard_accumulators(WORKERS, SIZE)["one region"]
    acc = np.where(np.arange(SIZE) < SIZE // WORKERS, acc + np.sign(acc), 0).astype(np.float32)
    for _ in range(3):
        out = run(acc, state, **options)
        state = helpers.next_state(out)
        assert state.boundaries.tolist() == [0, 100, 200, 300, 400]
        # A block has ceil(1.25 k / P) = 13 slots, and all 40 entries are for one owner.
        assert np.asarray(out["info"].overflow).tolist() == [K - 13] * WORKERS
    for others in ("balanced", "hashed"):
        overflow = np.asarray(run(acc, regions=others)["info"].overflow).sum()
        assert overflow < WORKERS * (K - 13) / 2
    for regions in ("equal", "hashed", "balanced"):
        scopes = words(balance="always", regions=regions)
        assert any("repartition" in scope for scope in scopes) == (regions == "balanced")


@pytest.mark.slow
def test_always_balancing_takes_a_block_and_never_leaves_what_does_not_fit():
    """test_starvation.py checks that it is not always the same entry that waits."""
    acc = np.random.default_rng(0).standard_normal((WORKERS, SIZE)).astype(np.float32)
    out = run(acc, regions="equal", balance="always")
    # A block of ceil(k / P) pairs to each of the others.
    scopes = words(regions="equal", balance="always")
    assert scopes["ok_topk/balance"] == 2 * 10 * (WORKERS - 1)
    assert round(float(out["info"].words[0])) == round(sum(scopes.values()))
    # The first worker's region gets the 13 entries that fit a block from each worker, at
    # different indices: 52 sums, of which 40 are selected, for 13 slots of the allgather.
    acc = np.zeros((WORKERS, SIZE), np.float32)
    for worker in range(WORKERS):
        acc[worker, 13 * worker : 13 * (worker + 1)] = 1 + np.arange(13)
    out = run(acc, regions="equal", balance="never", slack=1.25)
    assert int(out["info"].delivered[0]) == 13
    assert np.asarray(out["info"].overflow).tolist() == [K - 13, 0, 0, 0]
    scopes = words(regions="equal", balance="never")
    assert "ok_topk/balance" not in scopes
    assert round(float(out["info"].words[0])) == round(sum(scopes.values()))
    # An even selection has room.
    acc[:] = np.where(np.arange(SIZE) % 10, 0, 1 + np.arange(SIZE))
    out = run(acc, balance="never")
    np.testing.assert_array_equal(np.asarray(out["total"])[0], acc.sum(axis=0))
    assert (np.asarray(out["info"].overflow) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "changes", "options"),
    [
        (4, {"balance": "always"}, {"regions": "equal", "slack": math.inf}),
        # Both have room for everything: sufficient slack, and unlimited slack.
        *(
            (5, {"schedule": "rotation", "messages_in_flight": n, "slack": math.inf}, {"slack": 10})
            for n in (1, 2, 100)
        ),
    ],
)
def test_the_result_has_the_same_bits(workers, changes, options):
    ways = [allreduce(**options), allreduce(**{**options, **changes})]
    for case, acc in helpers.hard_accumulators(workers, 600).items():
        outs = [helpers.run_once(SELECTOR, each, acc) for each in ways]
        for field in ("total", "kept"):
            np.testing.assert_array_equal(outs[0][field], outs[1][field], case)
        assert outs[0]["info"].delivered[0] == outs[1]["info"].delivered[0], case


@pytest.mark.slow
def test_on_a_mesh_whose_groups_differ():
    """All devices take part in a rotation, including groups that have nothing to balance."""
    mesh = helpers.mesh((2, 4), ("group", "workers"))
    made = allreduce(schedule="rotation", regions="equal")
    even, crowded = np.random.default_rng(0).standard_normal((2, 4, SIZE)).astype(np.float32)
    crowded[:, 100:] *= 1e-3

    def step(acc):
        coo, _, _ = SELECTOR.select(acc[0, 0], SELECTOR.init(SIZE))
        total, *_ = made.reduce(coo, made.init(SIZE, 4), axis="workers")
        return total.to_dense()[None]

    spec = jax.sharding.PartitionSpec("group", "workers")
    step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    totals = np.asarray(jax.jit(step)(np.stack([even, crowded]))).reshape(2, 4, SIZE)
    for total, acc in zip(totals, (even, crowded), strict=True):
        alone = helpers.run_once(SELECTOR, made, acc)["total"]
        np.testing.assert_array_equal(total, alone)
