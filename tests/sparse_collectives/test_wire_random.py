"""Random rounding: its numbers, and that its mean is the value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _hash
from tests.sparse_collectives.helpers import slow

DRAWS, LENGTH = 10_000, 32
CODECS = {
    "qsgd 2": sc.wire.qsgd(bits=2, bucket=16),
    "qsgd 4": sc.wire.qsgd(bits=4, bucket=16),
    "qsgd 8": sc.wire.qsgd(bits=8, bucket=16),
    "qsgd 4 l2": sc.wire.qsgd(bits=4, bucket=16, norm="l2"),
    "narrow8": sc.wire.narrow8(block=16, stochastic=True),
}


@functools.cache
def numbers():
    """``[seeds, positions]``: numbers under seeds that follow one another."""
    seeds = jnp.arange(DRAWS, dtype=jnp.uint32)[:, None]
    return np.asarray(_hash.uniform(seeds, jnp.arange(LENGTH)[None]), np.float64)


def test_numbers_are_uniform():
    u = numbers()
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.stack([np.histogram(column, 64, (0, 1))[0] for column in u.T])
    chi2 = ((counts - DRAWS / 64) ** 2 / (DRAWS / 64)).sum(axis=1)
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert abs(chi2.mean() - 63) < 5 * 11.2 / np.sqrt(LENGTH)
    assert chi2.max() < 63 + 6 * 11.2


@pytest.mark.parametrize(("seeds", "positions"), [(0, 1), (1, 0), (1, 1), (0, 2), (16, 0), (0, 16)])
def test_numbers_do_not_depend_on_their_neighbours(seeds, positions):
    u = numbers() - 0.5
    left = u[: DRAWS - seeds, : LENGTH - positions]
    right = u[seeds:, positions:]
    correlation = (left * right).mean(axis=0) * 12
    assert np.abs(correlation).max() < 5 / np.sqrt(DRAWS - seeds)
    # Nor do their lowest bits that are used.
    parity = ((numbers() * 2**24).astype(np.int64) & 1) * 2 - 1
    product = parity[: DRAWS - seeds, : LENGTH - positions] * parity[seeds:, positions:]
    assert np.abs(product.mean(axis=0)).max() < 5 / np.sqrt(DRAWS - seeds)


def test_seeds_and_positions_do_not_just_permute():
    """Under two seeds, a run of positions does not have the same set of numbers."""
    u = np.asarray(_hash.uniform(jnp.arange(8, dtype=jnp.uint32)[:, None], jnp.arange(4096)[None]))
    sets = [set(row.tolist()) for row in u]
    assert max(len(a & b) for i, a in enumerate(sets) for b in sets[:i]) < 20


def test_the_order_of_the_parts_of_a_seed_counts():
    seeds = [int(_hash.combine(*parts)) for parts in [(0, 1), (1, 0), (0, 0), (0,), (0, 1, 0)]]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "narrow8"] + slow("narrow8"))
def test_the_mean_over_ten_thousand_draws_is_the_value(name):
    codec = CODECS[name]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(LENGTH).astype(np.float32)
    values[3], values[7] = 0, 1e-4
    index = np.arange(LENGTH, dtype=np.int32) * 5

    @jax.jit
    @jax.vmap
    def draw(seed):
        dense = codec.decode_dense(codec.encode_dense(values, seed)[0], LENGTH, jnp.float32)
        encoded = codec.encode(sc.PaddedCOO(jnp.asarray(values), jnp.asarray(index), 999), seed)
        pairs = codec.decode(encoded.message, 999, jnp.float32)
        place = jnp.where(pairs.indices < 999, pairs.indices // 5, LENGTH)
        sparse = jnp.zeros(LENGTH).at[place].set(pairs.values, mode="drop")
        return dense, sparse, encoded.error

    dense, sparse, error = (
        np.asarray(x, np.float64) for x in draw(np.arange(DRAWS, dtype=np.uint32))
    )
    for drawn in (dense, sparse):
        spread = drawn.std(axis=0)
        # A small value is seldom anything but zero: the spread that it should have.
        expected = np.where(np.abs(values) < 0.01, np.sqrt(np.abs(values) * 3), spread)
        bound = 5 * expected / np.sqrt(DRAWS) + 2e-6 * np.abs(values).max()
        assert (np.abs(drawn.mean(axis=0) - values) <= bound).all()
        assert spread[np.abs(values) > 0.01].max() > 0
        # Two levels at most, one on each side.
        assert max(len(np.unique(column)) for column in drawn.T) == 2
        # The errors of neighbours are not correlated.
        varied = drawn[:, spread > 0.05 * spread.max()]
        centred = (varied - varied.mean(axis=0)) / varied.std(axis=0)
        neighbours = (centred[:, :-1] * centred[:, 1:]).mean(axis=0)
        assert np.abs(neighbours).max() < 5 / np.sqrt(DRAWS)
        steps = (centred[1:] * centred[:-1]).mean(axis=0)
        assert np.abs(steps).max() < 5 / np.sqrt(DRAWS)
    np.testing.assert_allclose(sparse + error, np.broadcast_to(values, sparse.shape), atol=1e-6)
