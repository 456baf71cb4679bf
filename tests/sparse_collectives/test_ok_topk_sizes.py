"""Messages of several sizes: the same sums, for the words of the shortest that has room."""

import math

import jax
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import _plan
from tests.sparse_collectives import helpers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "sizes", "options"),
    [
        (3, 4, {"schedule": "all_to_all", "slack": math.inf}),
        (5, 4, {"schedule": "rotation", "messages_in_flight": 2}),
        (4, 4, {"regions": "balanced", "balance": "always"}),
        # A codec is compiled once for each size.
        (4, 2, {"codec": sc.wire.narrow16()}),
        # It decodes more slots than it encodes, and not the same more in each size.
        (3, 2, {"codec": sc.wire.narrow8(block=8, escapes=0.0), "slack": math.inf}),
    ],
)
def test_the_result_has_the_same_bits(workers, sizes, options):
    size, density = 600, 0.1
    selector = sc.select.topk(density=density)
    one, several = (
        sc.allreduce.ok_topk(density=density, sizes=count, **options) for count in (1, sizes)
    )
    for case, acc in helpers.hard_accumulators(workers, size).items():
        outs = [helpers.run_once(selector, each, acc) for each in (one, several)]
        for field in ("total", "kept"):
            np.testing.assert_array_equal(outs[0][field], outs[1][field], case)
        assert outs[0]["info"].delivered[0] == outs[1]["info"].delivered[0], case


def expected_words(accs, k, sizes):
    """From the counts of equal regions, by hand: exact pairs, nothing to balance."""
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


@pytest.mark.parametrize("seed", [0, *helpers.slow(1, 2)])
def test_a_step_takes_the_shortest_that_has_room(seed):
    workers, size, k, sizes = 4, 8000, 800, 5
    # Each worker's regions are a little uneven, each seed's in another way.
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
    """4 k (P-1)/P words, and the histograms of the threshold."""
    size, k = 30_000, 12_000
    # Of each region every worker selects k / P, and of the sums k / P are the largest.
    accs = np.full((workers, size), 1e-3, np.float32)
    value = np.linspace(1, 2, k // workers, dtype=np.float32)
    regions = accs.reshape(workers, workers, size // workers)
    regions[:, :, : k // workers] = value
    allreduce = sc.allreduce.ok_topk(density=k / size, regions="equal", sizes=2)
    out = helpers.run_once(sc.select.topk(density=k / size), allreduce, accs)
    assert out["info"].delivered[0] == k
    assert out["info"].words[0] <= 4.2 * k * (workers - 1) / workers


@pytest.mark.parametrize("case", [(10, 10, 4), (10, 18, 1), (10, 18, 2), (10, 18, 4), (10, 11, 9)])
def test_sizes_ascend_from_even_to_most(case):
    even, most, count = case
    sizes = _plan._sizes(even, most, count)
    assert sizes == tuple(sorted(set(sizes)))
    assert len(sizes) <= count
    assert sizes[-1] == most
    assert count == 1 or sizes[0] == even


@pytest.mark.slow
def test_on_a_mesh_whose_groups_differ():
    """All devices meet in a rotation, also those of groups that need less room."""
    size, density = 400, 0.1
    mesh = jax.make_mesh((2, 4), ("group", "workers"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(
        density=density, sizes=2, schedule="rotation", regions="equal", slack=math.inf
    )
    even, crowded = np.random.default_rng(0).standard_normal((2, 4, size)).astype(np.float32)
    crowded[:, 100:] *= 1e-3

    def step(acc):
        coo, _, _ = selector.select(acc[0, 0], selector.init(size))
        total, *_ = allreduce.reduce(coo, allreduce.init(size, 4), axis="workers")
        return total.to_dense()[None]

    spec = jax.sharding.PartitionSpec("group", "workers")
    step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    totals = np.asarray(jax.jit(step)(np.stack([even, crowded]))).reshape(2, 4, size)
    for total, acc in zip(totals, (even, crowded), strict=True):
        alone = helpers.run_once(selector, allreduce, acc)["total"]
        np.testing.assert_array_equal(total, alone)
