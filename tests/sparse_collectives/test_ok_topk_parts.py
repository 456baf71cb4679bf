"""The phases of Ok-Topk by themselves: regions, exchanges, and the global selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared import _hashed
from sparse_collectives.allreduce.ok_topk import (
    _global_selection,
    _plan,
    _regions,
    _split_reduce,
)

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


# Global selection: at once, or by rounds.


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
