"""Dense steps after others: a residual arrives whole, or stays whole."""

import jax
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import run

STEPS, SIZE = 7, 64
NODES = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
EXCHANGES = {
    "pairs": optax_ext.topk_a,
    "a dense total": lambda density, **options: optax_ext.sparse_allreduce(
        sc.select.topk(density=density), sc.allreduce.partitioned_topk(), **options
    ),
    "shards": lambda density, **options: optax_ext.sparse_allreduce(
        sc.select.topk(density=density), NODES, **options
    ),
    "quantized": lambda _, **options: optax_ext.quantized((1, 3), **options),
    "powersgd": lambda _, **options: optax_ext.powersgd(1, **options),
}


@pytest.mark.parametrize("policy", ["skip", "drop"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_nothing_is_lost_in_leaves_that_are_too_narrow_or_in_a_skipped_step(name, policy):
    nested = name == "shards"
    axis, shape = (("node", "device"), (2, 2)) if nested else ("w", (4,))
    tx = EXCHANGES[name](
        0.1, axis=axis, nonfinite=policy, dense_steps=lambda step: (step >= 3) & (step != 5)
    )
    rng = np.random.default_rng(0)
    # Whole numbers, whose sums are exact, and which are too large for float16 after some steps.
    narrow = rng.choice([10, 50], (4, 8)) + rng.integers(0, 9, (STEPS, *shape, 4, 8))
    given = {
        "narrow": (1024 * narrow).astype(np.float16),
        "whole": rng.integers(-9, 9, (STEPS, *shape, 8, 4)).astype(np.float32),
    }
    if policy == "skip":
        # In a dense step, when residuals wait.
        given["whole"][3, 0, ..., 0, 0] = np.nan
    found = run(tx, given, axis)
    jax.effects_barrier()
    first = (slice(None), *(0,) * len(shape))
    sums, updates = (
        np.concatenate(
            [np.asarray(x[name], np.float64).reshape(STEPS, -1, SIZE // 2) for name in given], 2
        )
        for x in (given, {name: x[first] for name, x in found.updates.items()})
    )
    sums = sums.sum(1)
    skipped = found.last.skipped.ravel()
    assert (skipped == (policy == "skip")).all()
    if policy == "skip":
        sums[3] = 0
    waits = found.residuals.astype(np.float64).reshape(STEPS, -1, SIZE).sum(1)
    lost = sums.cumsum(0) - 4 * updates[:, 0].cumsum(0) - waits
    np.testing.assert_allclose(lost, 0, atol=2e-5 * np.abs(waits).max())
    largest = np.float64(np.finfo(np.float16).max)
    dense = 4 if policy == "skip" else 3
    assert updates[dense].max() == largest
    assert (found.last.withheld > 0).all()
    # A leaf of float32 takes everything.
    assert not waits[dense, SIZE // 2 :].any()
    assert waits[dense, : SIZE // 2].any()
