"""The examples to copy: a deadline that ends a process, and checksums of a checkpoint's arrays."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._common.processes import environment
from checksums import check_checksums, checksums
from deadline import deadline
from tests.optax_ext.helpers import mesh, refused, slow

MISSED = """
from examples.deadline import deadline
import threading

def waits_for_ever():
    threading.Event().wait()

with deadline("step 0", 60):
    pass
with deadline("step 1", 0.1):
    waits_for_ever()
"""
# Two processes, of which this is the second: the numbers of jax if they are connected.
FAILED = """
import jax
from examples.deadline import deadline

jax.process_count, jax.process_index = lambda: 2, lambda: 1
try:
    with deadline("step 7", 60):
        raise {error}
finally:
    print("the process went on")
"""


def ended(program):
    command, given = [sys.executable, "-c", program], {"env": environment()}
    return subprocess.run(command, capture_output=True, text=True, check=False, **given)


@pytest.mark.slow
def test_a_missed_deadline_ends_the_process_and_says_where_it_was():
    done = ended(MISSED)
    assert done.returncode == 75, done.stderr
    assert "step 1 did not end within 0.1 s on process 0 of 1" in done.stderr
    assert "from the last whole checkpoint" in done.stderr
    assert "in waits_for_ever" in done.stderr  # the stack of the thread that hangs


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("jax.errors.JaxRuntimeError('UNKNOWN: closed')", 75),
        slow("KeyError('UNKNOWN: closed')", 1),
    ],
    ids=["runtime", "other"],
)
def test_an_error_of_one_among_several_processes_ends_it_at_once(error, status):
    done = ended(FAILED.format(error=error))
    assert done.returncode == status, done.stderr
    assert "step 7 failed on process 1 of 2" in done.stderr
    assert "UNKNOWN: closed" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "went on" not in done.stdout


def test_a_single_process_gets_its_exception():
    with pytest.raises(KeyError, match="mine"), deadline("step 0", 60):
        raise KeyError("mine")


def sum_of_words(x):
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_a_checksum_is_the_weighted_sum_of_the_words_so_that_every_bit_and_the_order_count(dtype):
    x = some(dtype)
    assert of(x) == sum_of_words(x)
    if dtype in ("float32", "bfloat16", "int8"):
        for index in range(x.nbytes):
            changed = bytearray(x.tobytes())
            changed[index] ^= 1 << index % 8
            assert of(np.frombuffer(changed, x.dtype).reshape(x.shape)) != of(x)
        assert of(x[::-1].copy()) != of(x)


@pytest.mark.parametrize("spec", [("a",), (None, "b")])
def test_a_checksum_does_not_depend_on_the_sharding(spec):
    x, on = some("float32", (8, 8)), mesh((4, 2), ("a", "b"))
    assert of(jax.device_put(x, NamedSharding(on, P(*spec)))) == sum_of_words(x)


def test_keys_and_empty_arrays_have_checksums():
    key = jax.random.key(3)
    sums = checksums({"key": key, "none": jnp.zeros((0, 2))})
    assert sums == {"['key']": sum_of_words(jax.random.key_data(key)), "['none']": 0}
    assert json.loads(json.dumps(sums)) == sums


def test_the_error_names_the_arrays_that_differ():
    saved = checksums(TREE)
    # As some formats give integers back.
    check_checksums({path: np.uint32(x) for path, x in saved.items()}, TREE)
    refused(r"1 of 2 .*: \['b'\]\.", check_checksums, saved, {**TREE, "b": TREE["b"] + 1})
    refused(r"\['c'\]", check_checksums, saved, {**TREE, "c": TREE["b"]})


# Orbax leaves unfinished work behind, on which Python reports at any later time.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
    refused(r"1 of 1 arrays .*\['w'\]", check_checksums, saved, restored)
