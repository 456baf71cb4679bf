"""Options of Ok-Topk: fixed regions, balancing or none, and messages of several sizes."""

import functools
import math

import jax
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import _plan
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


NARROW8 = {"codec": sc.wire.narrow8(block=8, escapes=0.0), "slack": math.inf}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "changes", "options"),
    [
        # Messages of several sizes: the same sums, for the words of the shortest that fits.
        (3, {"sizes": 4}, {"schedule": "all_to_all", "slack": math.inf}),
        (5, {"sizes": 4}, {"schedule": "rotation", "messages_in_flight": 2}),
        (4, {"sizes": 4}, {"regions": "balanced", "balance": "always"}),
        (4, {"balance": "always"}, {"regions": "equal", "slack": math.inf}),
        # A codec is compiled once for each size.
        (4, {"sizes": 2}, {"codec": sc.wire.narrow16()}),
        # It decodes more slots than it encodes, by a number that depends on the size.
        (3, {"sizes": 2}, NARROW8),
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


def expected_words(accs, k, sizes):
    """By hand from the counts of equal regions: exact pairs, nothing to balance."""
    workers, size = accs.shape
    width = -(-size // workers)
    chosen = np.argsort(-np.abs(accs), axis=1)[:, :k]
    blocks = np.stack([np.bincount(row // width, minlength=workers) for row in chosen])
    largest = (blocks - np.diag(np.diag(blocks))).max()
    sums = np.zeros(size)
    for acc, row in zip(accs, chosen, strict=True):
        sums[row] += acc[row]
    quota = np.bincount(np.argsort(-np.abs(sums))[:k] // width, minlength=workers).max()
    plan = _plan.make_plan(size, k, workers, regions="equal", sizes=sizes)
    assert max(largest, quota) <= plan.split_slots
    split = next(slots for slots in plan.split_sizes if slots >= largest)
    gather = next(slots for slots in plan.gather_sizes if slots >= quota)
    threshold = sum(2 * (1 << width) for _, width in _plan.digits(k)) * (workers - 1) / workers
    return (2 * split + 2 * gather + 1 + 3) * (workers - 1) + threshold


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_step_takes_the_shortest_that_has_room(seed):
    workers, size, k, sizes = 4, 8000, 800, 5
    # Each worker's regions are slightly uneven, in a different way for each seed.
    rng = np.random.default_rng(seed)
    accs = rng.standard_normal((workers, size)).astype(np.float32)
    accs += rng.standard_normal(size).astype(np.float32) * np.float32(0.5)
    allreduce = sc.allreduce.ok_topk(density=k / size, regions="equal", sizes=sizes)
    out = helpers.run_once(sc.select.topk(density=k / size), allreduce, accs)
    assert out["info"].overflow.max() == 0
    assert out["info"].words[0] == pytest.approx(expected_words(accs, k, sizes), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 8])
def test_even_steps_take_what_messages_of_exact_size_would(workers):
    """These are 4 k (P-1)/P words, and the histograms of the threshold."""
    size, k = 30_000, 12_000
    # Every worker selects k / P entries of each region, which also has k / P of the largest sums.
    accs = np.full((workers, size), 1e-3, np.float32)
    value = np.linspace(1, 2, k // workers, dtype=np.float32)
    regions = accs.reshape(workers, workers, size // workers)
    regions[:, :, : k // workers] = value
    allreduce = sc.allreduce.ok_topk(density=k / size, regions="equal", sizes=2)
    out = helpers.run_once(sc.select.topk(density=k / size), allreduce, accs)
    assert out["info"].delivered[0] == k
    assert out["info"].words[0] <= 4.2 * k * (workers - 1) / workers


@pytest.mark.slow
def test_on_a_mesh_whose_groups_differ():
    """All devices take part in a rotation, including groups that need less room."""
    mesh = helpers.mesh((2, 4), ("group", "workers"))
    made = allreduce(sizes=2, schedule="rotation", regions="equal", slack=math.inf)
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
