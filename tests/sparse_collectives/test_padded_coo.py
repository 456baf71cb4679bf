"""A PaddedCOO is a pytree whose padding counts for nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _data
from tests import jax_internals

SIZE = 10
DTYPES = ("float32", "bfloat16", "float16")
to_dense = sc.PaddedCOO.to_dense


def example(dtype=jnp.float32):
    """Padding between the entries and at the end."""
    values = jnp.array([1.5, 0, -2, 0.25, 0, 0], dtype)
    indices = jnp.array([9, SIZE, 0, 4, SIZE, SIZE], jnp.int32)
    dense = np.array([-2, 0, 0, 0, 0.25, 0, 0, 0, 0, 1.5])
    return sc.PaddedCOO(values, indices, SIZE), dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [to_dense, jax.jit(to_dense)])
def test_to_dense_ignores_padding_and_keeps_the_dtype_and_subnormals(function, dtype):
    coo, dense = example(dtype)
    # Also padding that carries a value.
    carrying = dataclasses.replace(coo, values=jnp.where(coo.indices == SIZE, jnp.nan, coo.values))
    for result in (function(coo), function(carrying)):
        assert (result.dtype, result.shape) == (dtype, (SIZE,))
        np.testing.assert_array_equal(np.asarray(result, np.float64), dense)
    limits = jnp.finfo(dtype)
    exact = np.array([limits.smallest_subnormal, -limits.smallest_subnormal, limits.tiny / 2, 0])
    smallest = exact.astype(dtype)
    assert np.count_nonzero(smallest.view(f"u{smallest.itemsize}")) == 3
    coo = sc.PaddedCOO(jnp.asarray(smallest), jnp.arange(4, dtype=jnp.int32), 4)
    assert np.asarray(function(coo)).tobytes() == smallest.tobytes()


def test_an_entry_of_value_zero_counts_and_padding_does_not():
    coo, _ = example()
    assert (coo.capacity, coo.count(), coo.count().dtype) == (6, 3, jnp.int32)
    assert dataclasses.replace(coo, values=coo.values * 0).count() == 3


def test_size_is_static_and_values_and_indices_are_leaves():
    coo, dense = example()
    leaves, treedef = jax.tree.flatten(coo)
    assert len(leaves) == 2
    assert treedef != jax.tree.structure(dataclasses.replace(coo, size=SIZE + 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        coo.size = 3
    function = jax.jit(lambda c: dataclasses.replace(c, values=-c.values))
    np.testing.assert_array_equal(function(coo).to_dense(), -dense)
    function(dataclasses.replace(coo, values=coo.values + 1))
    assert jax_internals.programs(function) == 1
    assert function(dataclasses.replace(coo, size=SIZE + 1)).size == SIZE + 1


def test_vmap_maps_each_row():
    coo, dense = example()
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1], jnp.roll(leaf, 1)]), coo)
    assert isinstance(rows, sc.PaddedCOO)
    np.testing.assert_array_equal(rows.count(), [3, 3, 3])
    assert rows.capacity == coo.capacity
    np.testing.assert_array_equal(jax.vmap(to_dense)(rows), np.stack([dense] * 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_is_padding_only(dtype):
    coo = _data.empty(SIZE, 4, dtype)
    assert (coo.size, coo.capacity, coo.count()) == (SIZE, 4, 0)
    assert (coo.values.dtype, coo.indices.dtype) == (dtype, jnp.int32)
    assert not coo.to_dense().any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", [1, 40])
def test_pairs_of_one_index_are_added_and_the_indices_ascend(pairs, dtype):
    rng = np.random.default_rng(pairs)
    indices = rng.integers(0, SIZE + 1, pairs).astype(np.int32)
    values = rng.integers(-8, 8, pairs).astype(np.float32)
    expected = np.zeros(SIZE + 1)
    np.add.at(expected, indices, values)
    coo = jax.jit(sc.PaddedCOO.from_pairs, static_argnums=2)(
        jnp.asarray(indices), jnp.asarray(values, dtype), SIZE
    )
    assert (coo.capacity, coo.values.dtype) == (pairs, dtype)
    np.testing.assert_array_equal(np.asarray(coo.to_dense(), np.float64), expected[:SIZE])
    used = sorted(set(indices.tolist()) - {SIZE})
    assert coo.indices.tolist() == used + [SIZE] * (pairs - len(used))
    assert not coo.values[len(used) :].any()


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match=r"must be of one shape \[c\], got \(3,\) and \(2,\)"):
        sc.PaddedCOO.from_pairs(jnp.zeros(3, jnp.int32), jnp.zeros(2), SIZE)
