"""A PaddedCOO is a pytree whose padding counts for nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import padded_coo
from tests import jax_internals

SIZE = 10


def example(dtype=jnp.float32):
    """Padding between the entries and at the end."""
    values = jnp.array([1.5, 0, -2, 0.25, 0, 0], dtype)
    indices = jnp.array([9, SIZE, 0, 4, SIZE, SIZE], jnp.int32)
    dense = np.array([-2, 0, 0, 0, 0.25, 0, 0, 0, 0, 1.5])
    return padded_coo.PaddedCOO(values, indices, SIZE), dense


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_to_dense_ignores_padding_and_keeps_the_dtype(dtype):
    coo, dense = example(dtype)
    for function in (padded_coo.PaddedCOO.to_dense, jax.jit(padded_coo.PaddedCOO.to_dense)):
        result = function(coo)
        assert result.dtype == dtype
        assert result.shape == (SIZE,)
        np.testing.assert_array_equal(np.asarray(result, np.float64), dense)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_to_dense_keeps_subnormals(dtype):
    limits = jnp.finfo(dtype)
    exact = np.array([limits.smallest_subnormal, -limits.smallest_subnormal, limits.tiny / 2, 0])
    smallest = exact.astype(dtype)
    assert np.count_nonzero(smallest.view(f"u{smallest.itemsize}")) == 3
    coo = padded_coo.PaddedCOO(jnp.asarray(smallest), jnp.arange(4, dtype=jnp.int32), 4)
    for function in (padded_coo.PaddedCOO.to_dense, jax.jit(padded_coo.PaddedCOO.to_dense)):
        assert np.asarray(function(coo)).tobytes() == smallest.tobytes()


def test_count_and_capacity():
    coo, _ = example()
    assert coo.capacity == 6
    assert coo.count() == 3
    assert coo.count().dtype == jnp.int32


def test_an_entry_of_value_zero_is_an_entry():
    coo, _ = example()
    assert dataclasses.replace(coo, values=coo.values * 0).count() == 3


def test_padding_that_carries_a_value_is_dropped_all_the_same():
    coo, dense = example()
    carrying = dataclasses.replace(coo, values=jnp.where(coo.indices == SIZE, jnp.nan, coo.values))
    np.testing.assert_array_equal(carrying.to_dense(), dense)


def test_size_is_static_and_values_and_indices_are_leaves():
    coo, _ = example()
    leaves, treedef = jax.tree.flatten(coo)
    assert len(leaves) == 2
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert rebuilt.size is coo.size
    doubled = jax.tree.map(lambda leaf: leaf * 2, coo)
    assert (doubled.size, type(doubled)) == (SIZE, sc.PaddedCOO)
    assert treedef != jax.tree.structure(dataclasses.replace(coo, size=SIZE + 1))


def test_jit_takes_and_returns_it_and_traces_once_per_size():
    coo, dense = example()
    function = jax.jit(lambda c: dataclasses.replace(c, values=-c.values))
    np.testing.assert_array_equal(function(coo).to_dense(), -dense)
    function(dataclasses.replace(coo, values=coo.values + 1))
    assert jax_internals.programs(function) == 1
    assert function(dataclasses.replace(coo, size=SIZE + 1)).size == SIZE + 1
    assert jax_internals.programs(function) == 2


def test_vmap_maps_each_row():
    coo, dense = example()
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1], jnp.roll(leaf, 1)]), coo)
    np.testing.assert_array_equal(rows.count(), [3, 3, 3])
    assert rows.capacity == coo.capacity
    np.testing.assert_array_equal(jax.vmap(lambda c: c.to_dense())(rows), np.stack([dense] * 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_empty_is_padding_only(dtype):
    coo = padded_coo.empty(SIZE, 4, dtype)
    assert (coo.size, coo.capacity, coo.count()) == (SIZE, 4, 0)
    assert (coo.values.dtype, coo.indices.dtype) == (dtype, jnp.int32)
    assert (coo.indices == SIZE).all()
    assert not coo.values.any()
    assert not coo.to_dense().any()


def test_it_cannot_be_changed_in_place():
    coo, _ = example()
    with pytest.raises(dataclasses.FrozenInstanceError):
        coo.size = 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", [1, 7, 40])
def test_pairs_of_one_index_are_added_and_the_indices_ascend(pairs, dtype):
    rng = np.random.default_rng(pairs)
    indices = rng.integers(0, SIZE + 1, pairs).astype(np.int32)
    values = rng.integers(-8, 8, pairs).astype(np.float32)
    expected = np.zeros(SIZE + 1)
    np.add.at(expected, indices, values)
    coo = jax.jit(sc.PaddedCOO.from_pairs, static_argnums=2)(
        jnp.asarray(indices), jnp.asarray(values, dtype), SIZE
    )
    assert coo.capacity == pairs
    assert coo.values.dtype == dtype
    np.testing.assert_array_equal(np.asarray(coo.to_dense(), np.float64), expected[:SIZE])
    count = int(coo.count())
    assert coo.indices[:count].tolist() == sorted(set(indices.tolist()) - {SIZE})
    assert (coo.indices[count:] == SIZE).all()
    assert (coo.values[count:] == 0).all()


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match=r"must be of one shape \[c\], got \(3,\) and \(2,\)"):
        sc.PaddedCOO.from_pairs(jnp.zeros(3, jnp.int32), jnp.zeros(2), SIZE)
