"""A PaddedCOO is a pytree with inert padding; sets, windows and blocks are made from its parts.

test_select_topk.py checks that selections of any length are exact.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import sparse_collectives as sc
from sparse_collectives import _data
from sparse_collectives._sparse_ops import _bitset, _compaction
from sparse_collectives.allreduce._parts import _merge
from tests import jax_internals
from tests.reference import windows

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
    # This includes padding with a value.
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


def test_count_is_of_entries_with_value_zero_too_and_not_of_padding():
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
    # Also two that embeddings use as padding.
    given = rng.integers(-1, SIZE + 2, pairs).astype(np.int32)
    indices = np.where((given < 0) | (given > SIZE), SIZE, given)
    values = rng.integers(-8, 8, pairs).astype(np.float32)
    expected = np.zeros(SIZE + 1)
    np.add.at(expected, indices, values)
    coo = jax.jit(sc.PaddedCOO.from_pairs, static_argnums=2)(
        jnp.asarray(given), jnp.asarray(values, dtype), SIZE
    )
    assert (coo.capacity, coo.values.dtype) == (pairs, dtype)
    np.testing.assert_array_equal(np.asarray(coo.to_dense(), np.float64), expected[:SIZE])
    used = sorted(set(indices.tolist()) - {SIZE})
    assert coo.indices.tolist() == used + [SIZE] * (pairs - len(used))
    assert not coo.values[len(used) :].any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("size", [100, 128, 256, 300, 70_000])
@pytest.mark.parametrize("jitted", [False, True])
def test_pairs_of_narrow_indices_are_of_any_size(dtype, size, jitted):
    info = np.iinfo(dtype)
    given = np.unique(np.clip([-1, 0, 5, 99, 127, 200, 65_000], info.min, info.max)).astype(dtype)
    make = jax.jit(sc.PaddedCOO.from_pairs, static_argnums=2) if jitted else sc.PaddedCOO.from_pairs
    coo = make(jnp.asarray(given), jnp.arange(1.0, len(given) + 1), size)
    wide = given.astype(np.int64)
    kept = (wide >= 0) & (wide < size)
    padding = len(given) - kept.sum()
    assert coo.indices.tolist() == wide[kept].tolist() + [size] * padding
    assert coo.values.tolist() == (np.flatnonzero(kept) + 1.0).tolist() + [0] * padding


def test_several_vectors_become_rows():
    values, indices = jnp.arange(1.0, 13).reshape(2, 3, 2), jnp.array([0, 2] * 6).reshape(2, 3, 2)
    coo = sc.PaddedCOO(values, indices.at[1, 1, 0].set(4), 4)
    each = [[coo_of(coo, i, j).to_dense().tolist() for j in range(3)] for i in range(2)]
    assert coo.to_dense().tolist() == each
    assert each[0][0] == [1, 0, 2, 0]


def coo_of(coo, *at):
    return sc.PaddedCOO(coo.values[at], coo.indices[at], coo.size)


def test_the_length_may_be_a_dimension_that_a_program_is_exported_with():
    (size,) = export.symbolic_shape("n", constraints=["n >= 8", "n <= 1000"])

    def summed(x):
        return sc.PaddedCOO.from_pairs(jnp.array([7, 7]), x[:2], x.shape[0]).to_dense()

    exported = export.export(jax.jit(summed))(jax.ShapeDtypeStruct((size,), jnp.float32))
    assert exported.call(jnp.arange(1.0, 10)).tolist() == [0] * 7 + [3, 0]


@pytest.mark.parametrize("size", [5.0, True, "5"])
def test_the_length_of_a_vector_is_an_integer(size):
    with pytest.raises(TypeError, match="size must be an integer, the length of a vector, got"):
        sc.PaddedCOO.from_pairs(jnp.arange(2), jnp.zeros(2), size)


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match=r"must be of one shape \[c\], got \(3,\) and \(2,\)"):
        sc.PaddedCOO.from_pairs(jnp.zeros(3, jnp.int32), jnp.zeros(2), SIZE)


@pytest.mark.parametrize(
    ("indices", "values", "text"),
    [
        ([0, 1], jnp.zeros(2), r"indices must be an array, got \[0, 1\]. Pass it through"),
        (jnp.arange(2), 1.0, "values must be an array, got 1.0"),
        (jnp.zeros(2), jnp.zeros(2), "indices must be integers, got float32"),
        (jnp.arange(2), jnp.arange(2), "values must be of a real floating type, got int32"),
        (jnp.arange(2), jnp.zeros(2, complex), "values must be of a real floating type, got c"),
    ],
)
def test_pairs_are_arrays_of_integers_and_of_floats(indices, values, text):
    with pytest.raises(TypeError, match=text):
        sc.PaddedCOO.from_pairs(indices, values, SIZE)


# Sets.

# Less than one word, a full word, one entry more, and many words with a rest.
SIZES = (1, 5, 31, 32, 33, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_set_holds_what_was_inserted_and_ranks_it(size):
    @jax.jit
    def ask(words, indices):
        words = _bitset.insert(words, indices, size)
        ranked, everything = _bitset.rank_index(words), jnp.arange(size, dtype=jnp.int32)
        return words, _bitset.contains(words, everything), _bitset.rank(ranked, everything)

    # No entries, some of them twice, in any order and with padding between, and then all.
    order = np.random.default_rng(size).permutation(size).astype(np.int32)
    words, members = _bitset.empty(size), set()
    for chosen in (order[:0], order[: size // 3], order[: size // 2], order):
        indices = np.full(size + 3, size, np.int32)
        indices[1 : 1 + len(chosen)] = chosen
        words, member, rank = ask(words, indices)
        members |= set(chosen.tolist())
        expected = np.array(sorted(members), np.int32)
        np.testing.assert_array_equal(np.flatnonzero(member), expected)
        np.testing.assert_array_equal(rank, np.searchsorted(expected, np.arange(size)))
    # Nothing past the end is a member.
    past = np.array([size, size + 1, size + 31, size + 32, 64 * size, 2**31 - 1], np.int32)
    assert not _bitset.contains(words, past).any()


@pytest.mark.parametrize("size", [0, *SIZES])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_dense_vector_of_a_set_has_the_bits_of_a_scatter(size, data):
    capacity = data.draw(st.sampled_from([0, 1, 7, 40]))
    chosen = data.draw(st.permutations(range(size)))[:capacity]
    indices = np.full(capacity, size, np.int32)
    # Padding anywhere, and any order: workers send their parts one after the other.
    slots = data.draw(st.permutations(range(capacity)))[: len(chosen)]
    indices[slots] = chosen
    numbers = [0.0, -0.0, 1.0, -2.5, np.inf, np.nan, 1e-45, 3e38]
    values = data.draw(st.lists(st.sampled_from(numbers), min_size=capacity, max_size=capacity))
    coo = sc.PaddedCOO(jnp.asarray(values, jnp.float32), jnp.asarray(indices), size)
    portable, gpu = (np.asarray(f(coo)) for f in (coo.__class__.to_dense, _bitset._by_rank))
    np.testing.assert_array_equal(portable.view(np.uint32), gpu.view(np.uint32))


# Windows.


windowed_rank = jax.jit(_compaction.windowed_rank, static_argnums=2)


@pytest.mark.parametrize("capacity", [1, 7, 32])
@settings(max_examples=50, deadline=None)
@given(
    count=st.one_of(st.integers(0, 70), st.integers(0, 2**31 - 1)),
    turn=st.integers(-(2**31), 2**31 - 1),
)
def test_window_has_an_entry_for_each_slot_in_ascending_order(capacity, count, turn):
    slot = np.arange(capacity, dtype=np.int32)
    ranks = np.asarray(windowed_rank(slot, count, capacity, turn)).astype(np.int64)
    if count <= capacity:
        np.testing.assert_array_equal(ranks, np.arange(capacity))
    else:
        assert ranks[0] >= 0
        assert ranks[-1] < count
        assert (np.diff(ranks) > 0).all()
        entries = windows.start(turn, count) + np.arange(capacity)
        np.testing.assert_array_equal(ranks, np.sort(entries % count))


def test_window_gives_each_entry_its_share_of_the_turns_as_if_by_chance():
    capacity, count, turns = 30, 100, 20_000
    slot = np.arange(capacity, dtype=np.int32)
    of_turns = jax.vmap(lambda turn: windowed_rank(slot, count, capacity, turn))
    served = np.zeros((turns, count), bool)
    served[np.arange(turns)[:, None], of_turns(np.arange(turns, dtype=np.int32))] = True
    # Five standard deviations.
    assert np.abs(served.mean(0) - 0.3).max() < 5 * np.sqrt(0.21 / turns)
    # Successive steps, and steps at some distance, are independent of each other.
    for distance in range(1, 9):
        both = (served[distance:] & served[:-distance]).mean()
        assert both == pytest.approx(0.09, rel=0.02)


# Functions that the allreduces share.


@pytest.mark.parametrize(("slots", "workers"), [(600, 12), (2**16 + 100, 2**16)])
def test_split_by_owner_keeps_the_order(slots, workers):
    """This includes sizes at which owner and slot do not fit into one sort key."""
    count, capacity = slots - 100, 4
    rng = np.random.default_rng(6)
    owner = np.append(rng.integers(0, workers - 2, count), np.full(100, workers))
    indices = np.append(np.arange(count), np.full(100, slots))
    coo = sc.PaddedCOO(jnp.zeros(slots), jnp.asarray(indices, jnp.int32), slots)
    split = jax.jit(_merge.split_by_owner, static_argnums=(2, 3))
    blocks = split(coo, jnp.asarray(owner, jnp.int32), workers, capacity, jnp.int32(0))
    for worker in (0, 3, 7, workers - 1):
        expected = windows.window(np.flatnonzero(owner == worker), capacity, 0)
        found = np.asarray(blocks.coo.indices)[worker]
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected) :] == slots).all()
    counts = np.bincount(owner, minlength=workers)[:workers]
    assert np.asarray(blocks.sent).sum() == np.minimum(counts, capacity).sum()


def test_reduce_blocks_adds_rows_one_after_the_other():
    """No scatter has an index twice, since the order of its additions is undefined on a GPU."""
    values = jnp.asarray([[1e8, 1.0], [-1e8, 0.0], [1.0, 2.0]], jnp.float32)
    indices = jnp.asarray([[4, 9], [4, 10], [4, 9]], jnp.int32)
    total = _merge.reduce_blocks([sc.PaddedCOO(values, indices, 10)], 10, jnp.float32)
    assert total.values.tolist() == [1.0, 3.0, 0, 0, 0, 0]
    assert total.indices.tolist() == [4, 9, 10, 10, 10, 10]
