"""What the allreduces share: selections cut by owner and by room, and sums of what arrives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared import _merge
from tests.reference import windows


@pytest.mark.parametrize("turn", range(7))
@pytest.mark.parametrize("count", [0, 3, 5, 8, 11])
def test_bounded_splits_into_what_fits_and_what_is_left(count, turn):
    indices = np.full(11, 99, np.int32)
    indices[:count] = 3 * np.arange(count)
    coo = sc.PaddedCOO(jnp.asarray(indices, jnp.float32), jnp.asarray(indices), 99)
    kept, left = _merge.bounded(coo, 5, jnp.int32(turn))
    assert (kept.capacity, left.capacity) == (5, 6)
    used = np.asarray(kept.indices)[: min(count, 5)]
    assert (np.diff(used) > 0).all()
    both = np.concatenate([used, np.asarray(left.indices)[np.asarray(left.indices) < 99]])
    assert sorted(both) == indices[:count].tolist()


@pytest.mark.parametrize(("slots", "workers"), [(600, 12), (2**16 + 100, 2**16)])
def test_split_by_owner_keeps_the_order(slots, workers):
    """Also with so many that owner and slot do not fit one sort key."""
    count, capacity = slots - 100, 4
    rng = np.random.default_rng(6)
    owner = np.append(rng.integers(0, workers - 2, count), np.full(100, workers))
    indices = np.append(np.arange(count), np.full(100, slots))
    coo = sc.PaddedCOO(jnp.zeros(slots), jnp.asarray(indices, jnp.int32), slots)
    split = jax.jit(_merge.split_by_owner, static_argnums=(2, 3))
    blocks = split(coo, jnp.asarray(owner, jnp.int32), workers, capacity, jnp.int32(0))
    for worker in (0, 3, 7, workers - 1):
        expected = windows.window(np.flatnonzero(owner == worker), capacity, 0)
        padded = np.pad(expected, (0, capacity - len(expected)), constant_values=slots)
        np.testing.assert_array_equal(np.asarray(blocks.coo.indices)[worker], padded)
    counts = np.bincount(owner, minlength=workers)[:workers]
    assert np.asarray(blocks.sent).sum() == np.minimum(counts, capacity).sum()


def test_reduce_blocks_adds_rows_one_after_the_other():
    """No scatter has an index twice, whose order would be open on a GPU."""
    values = jnp.asarray([[1e8, 1.0], [-1e8, 0.0], [1.0, 2.0]], jnp.float32)
    indices = jnp.asarray([[4, 9], [4, 10], [4, 9]], jnp.int32)
    total = _merge.reduce_blocks([sc.PaddedCOO(values, indices, 10)], 10, jnp.float32)
    assert total.values.tolist() == [1.0, 3.0, 0, 0, 0, 0]
    assert total.indices.tolist() == [4, 9, 10, 10, 10, 10]


@pytest.mark.slow
def test_reduce_blocks_adds_common_indices():
    size = 70
    rng = np.random.default_rng(3)
    expected = np.zeros(size)
    blocks = []
    for rows in (1, 3):
        indices = np.full((rows, 12), size, np.int32)
        values = np.zeros((rows, 12), np.float32)
        for row in range(rows):
            count = rng.integers(0, 12)
            chosen = np.sort(rng.choice(size, count, replace=False))
            indices[row, :count] = chosen
            values[row, :count] = rng.standard_normal(count)
            expected[chosen] += values[row, :count]
        blocks.append(sc.PaddedCOO(jnp.asarray(values), jnp.asarray(indices), size))
    out = _merge.reduce_blocks(blocks, size, jnp.float32)
    np.testing.assert_allclose(out.to_dense(), expected, atol=1e-6)
    used = np.asarray(out.indices)[: int(out.count())]
    assert (np.diff(used) > 0).all()
