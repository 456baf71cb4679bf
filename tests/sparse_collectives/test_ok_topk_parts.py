"""The phases of Ok-Topk by themselves: regions, exchanges, and the global selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared import _hashed
from sparse_collectives.allreduce.ok_topk import (
    _global_selection,
    _regions,
    _split_reduce,
)

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
        return _regions.consensus(coo, workers, "workers"), _regions.local_boundaries(coo, workers)

    agreed, local = map(np.asarray, sc.simulate(agree, axis_size=workers)(indices))
    # Not all rounded down, or the last region would grow by P / 2 places.
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
