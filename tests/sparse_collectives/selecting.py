"""Helpers of the selectors' tests: hard vectors, and checks for every selection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import selection, windows
from tests.sparse_collectives import helpers

# Sizes below and above _kth_magnitude.DIRECT_SIZE; above it, candidates are compacted first.
SMALL, LARGE = 1003, 140_001
DTYPES = ("float32", "bfloat16", "float16")


@functools.cache
def jitted(name, **options):
    """The selector with these options, and its jitted ``select``."""
    selector = helpers.selector_factory(name)(**options)
    return selector, jax.jit(selector.select)


hard_vectors = functools.cache(selection.hard_vectors)


def k_of(density, size):
    return min(size, max(1, round(density * size)))


def as_dtype(x, dtype):
    """A float32 vector rounded to ``dtype``, as a NumPy array."""
    return np.asarray(jnp.asarray(x).astype(dtype))


def laplace(size, seed=0):
    return np.random.default_rng(seed).laplace(size=size).astype(np.float32)


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def assert_same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def check(out, acc, capacity=None):
    """Checks that hold for every selection; returns the selected indices.

    The indices ascend, with the nonzero values of ``acc``, and padding comes last. Selected and
    unselected entries together are therefore the accumulator.
    """
    coo, _, info = out
    assert coo.size == acc.size
    assert coo.indices.shape == coo.values.shape
    assert capacity is None or coo.capacity == capacity
    assert (coo.indices.dtype, coo.values.dtype) == (jnp.int32, acc.dtype)
    assert (info.selected.dtype, info.overflow.dtype) == (jnp.int32, jnp.int32)
    assert info.threshold.dtype == jnp.float32
    indices, values = np.asarray(coo.indices), np.asarray(coo.values)
    used = int(info.selected)
    assert (indices[used:] == acc.size).all()
    assert not bits_of(values[used:]).any()
    indices = indices[:used]
    assert (np.diff(indices) > 0).all()
    assert ((indices >= 0) & (indices < acc.size)).all()
    np.testing.assert_array_equal(bits_of(values[:used]), bits_of(acc[indices]))
    assert (acc[indices] != 0).all()
    return indices


def check_passing(out, acc, capacity, turn):
    """As `check`, for selectors whose entries at the threshold get all available slots.

    If there are too many entries, those in the window of the turn get a slot: windows let no entry
    wait without end, and so does the selector. Without a turn it may choose others among them.
    """
    indices, info = check(out, acc, capacity), out[2]
    passed = selection.passing(acc, float(info.threshold))
    assert len(indices) == min(len(passed), capacity)
    assert info.overflow == len(passed) - len(indices)
    if turn is None:
        assert np.isin(indices, passed).all()
    else:
        np.testing.assert_array_equal(indices, windows.window(passed, capacity, turn))
    return indices
