"""Checksums: the same however arrays are sharded, another one for any changed bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext.contrib import check_checksums, checksums
from tests.optax_ext.helpers import mesh

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint32", "bool", "complex64"]


def expected(x):
    """The checksum of an array, in NumPy and without its tricks."""
    words = np.ascontiguousarray(x).reshape(-1)
    if words.dtype.itemsize > 4:
        words = words.view(np.uint32)
    words = words.view(f"u{words.dtype.itemsize}").astype(object)
    total = 0
    for index, word in enumerate(words):
        weight = (index + 0x9E3779B9) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            weight = (weight ^ weight >> shift) * factor % 2**32
        total += int(word) * ((weight ^ weight >> 16) | 1)
    return total % 2**32


def of(x):
    return checksums([x])["[0]"]


def some(dtype, shape=(3, 5)):
    return (np.random.default_rng(0).standard_normal(shape) * 50).astype(jnp.dtype(dtype))


TREE = {"a": some("float32"), "b": some("int32")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_weighted_sum_of_the_words(dtype):
    assert of(some(dtype)) == expected(some(dtype))


@pytest.mark.parametrize("spec", [(), ("a",), ("b", "a"), (None, "b")])
def test_it_does_not_depend_on_the_sharding(spec):
    x, on = some("float32", (8, 8)), mesh((4, 2), ("a", "b"))
    assert of(jax.device_put(x, NamedSharding(on, PartitionSpec(*spec)))) == expected(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_every_bit_and_the_order_count(dtype):
    x = some(dtype)
    for index in range(x.nbytes):
        changed = bytearray(x.tobytes())
        changed[index] ^= 1 << index % 8
        assert of(np.frombuffer(changed, x.dtype).reshape(x.shape)) != of(x)
    assert of(x[::-1].copy()) != of(x)


def test_keys_and_empty_arrays_have_checksums():
    sums = checksums({"key": jax.random.key(3), "none": jnp.zeros((0, 2))})
    assert sums == {"['key']": expected(jax.random.key_data(jax.random.key(3))), "['none']": 0}
    assert json.loads(json.dumps(sums)) == sums


def test_the_error_names_the_arrays_that_differ():
    saved = checksums(TREE)
    # As some formats give integers back.
    check_checksums({path: np.uint32(x) for path, x in saved.items()}, TREE)
    with pytest.raises(ValueError, match=r"1 of 2 arrays.*: \['b'\]\."):
        check_checksums(saved, {**TREE, "b": TREE["b"] + 1})
    with pytest.raises(ValueError, match=r"\['c'\]"):
        check_checksums(saved, {**TREE, "c": TREE["b"]})


LONG = "x" * 10**6


@pytest.mark.parametrize(
    ("saved", "error", "message"),
    [(x, TypeError, "saved must be what .*checksums returned") for x in (None, [1, 2], LONG)]
    + [
        (checksums(TREE) | wrong, ValueError, "are not those that were saved")
        for wrong in ({7: 1}, {"['a']": np.arange(3)}, {"['a']": LONG}, {LONG: 1})
    ],
)
def test_checksums_of_anything_give_an_error_that_can_be_read(saved, error, message):
    with pytest.raises(error, match=message) as found:
        check_checksums(saved, TREE)
    assert len(str(found.value)) < 1000


def test_a_flipped_bit_that_orbax_restores_is_found(tmp_path):
    tree = {"w": jnp.asarray(some("float32", (3000,)))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
        saved = checksums(tree)
        check_checksums(saved, checkpointer.restore(tmp_path / "state", tree))
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(content)
        restored = checkpointer.restore(tmp_path / "state", tree)
    with pytest.raises(ValueError, match=r"1 of 1 arrays .*\['w'\]"):
        check_checksums(saved, restored)
