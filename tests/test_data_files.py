"""The files that the examples read, IDX and LIBSVM: their content, and errors in one line."""

import bz2
import gzip
import io
import tracemalloc

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from examples._data import InputError, read_idx
from examples.linear_models import data

SHAPE = data.Shape(size=300, nonzeros=8, rows=600, exponent=1.1)
PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


def refusal(read, path, *given):
    """The one line that names the file, or None if it is read."""
    message = None
    try:
        read(path, *given)
    except InputError as error:
        message = str(error)
    assert message is None or (str(path) in message and "\n" not in message)
    return message


def idx(shape, content):
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return b"\x00\x00\x08" + bytes([len(shape)]) + sizes + content


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(6,), (1, 2, 3), (3, 0, 2)])
def test_idx_file_is_read_as_it_was_written(shape, suffix, tmp_path):
    expected = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / f"numbers{suffix}"
    path.write_bytes(PACKED[suffix](idx(shape, expected.tobytes())))
    np.testing.assert_array_equal(read_idx(path), expected, strict=True)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00\x0d" + idx((2,), b"ab")[3:], "not an IDX file"),
        (idx((1,) * 5, b"a"), "not an IDX file"),
        (idx((2, 3), b"")[:9], "holds less"),
        (idx((2, 3), b"abcde"), "holds less than the 6 bytes"),
        (idx((2, 3), b"abcdefg"), "holds more than the 6 bytes"),
        (idx((2**32 - 1,) * 4, b"abc"), "holds less than the 3402823"),
    ],
)
def test_idx_file_that_is_malformed_is_one_line(content, message, suffix, tmp_path):
    path = tmp_path / f"numbers{suffix}"
    path.write_bytes(PACKED[suffix](content))
    assert message in refusal(read_idx, path)


def test_idx_archive_that_is_damaged_is_one_line(tmp_path):
    content, path = gzip.compress(idx((100,), bytes(range(100)))), tmp_path / "numbers.gz"
    wrong_sum = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
    for damaged in (content[:5], content[:30], content[:-5], wrong_sum):
        path.write_bytes(damaged)
        assert "cannot read" in refusal(read_idx, path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((10,), "holds more than the 10 bytes"), ((2**16, 2**16, 2**8), "holds less")],
)
def test_reading_takes_no_more_memory_than_asked_for_or_there(shape, message, tmp_path):
    path = tmp_path / "numbers.gz"
    path.write_bytes(gzip.compress(idx(shape, bytes(64 << 20))))
    tracemalloc.start()
    try:
        assert message in refusal(read_idx, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def rows_of(rows):
    """Rows, their labels, and the content of a LIBSVM file of them."""
    matrix, labels = data.power_law("some", SHAPE, seed=1).rows(0, rows)
    text = io.BytesIO()
    dump_svmlight_file(matrix, np.where(labels > 0, 7, 3), text, zero_based=False)
    return matrix, labels, text.getvalue()


@pytest.mark.parametrize("suffix", PACKED)
def test_libsvm_file_is_read_as_it_was_written(suffix, tmp_path):
    matrix, labels, text = rows_of(60)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(PACKED[suffix](text))
    read, found, classes = data.read(path, size=350)
    assert (classes, read.shape, read.dtype) == ((3, 7), (60, 350), np.float32)
    np.testing.assert_array_equal(found, labels)
    np.testing.assert_allclose(read.toarray()[:, :300], matrix.toarray(), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:2\nx 2:3", "line 2: the label 'x' is not a finite number"),
        ("1 1:2\n-1 2:3 4", "line 2: '4' is not INDEX:VALUE"),
        ("1 1:2\n-1 a:3", "line 2: 'a:3' is not INDEX:VALUE"),
        ("1 1:2\n# none\n-1 2:y", "line 3: the value of '2:y' is not a finite number"),
        ("1 1:2\n-1 2:1e39", "line 2: the value of '2:1e39' is not a finite number"),
        ("inf 1:2\n-1 2:1", "line 1: the label 'inf' is not a finite number"),
        ("1 0:2\n-1 2:3", "line 1: the index of '0:2' is below 1"),
        ("1 1:2\n-1 3:1 3:1", "line 2: the index of '3:1' is not above the one before it, 3"),
        ("1 1:2\n-1 99999999999:1", "line 2: the index of '99999999999:1' is above the size, 5"),
        ("1 1:2\n1 2:2", "has 1 labels (1): a linear classifier takes two"),
        ("1 1:2\n2 2:2\n3 1:1", "has 3 labels (1, 2, 3): a linear classifier takes two"),
        ("1 1:2\n0 2:2", "has the labels 0, 1, expected -1, 1"),
        ("", "has no rows"),
    ],
)
def test_libsvm_file_that_is_malformed_is_one_line_that_names_the_place(text, message, tmp_path):
    path = tmp_path / "bad"
    path.write_text(text + "\n")
    assert message in refusal(data.read, path, 5, (-1.0, 1.0))
    assert "No such file" in refusal(data.read, tmp_path / "none")


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_libsvm_archive_that_is_damaged_gives_the_right_rows_or_none(suffix, tmp_path):
    """Bits are flipped in the head, the content and the checksums, and the end is cut off."""
    *_, text = rows_of(30)
    content, path = PACKED[suffix](text), tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    matrix, labels, _ = data.read(path, SHAPE.size)
    bits = 8 * len(content)
    middle = np.random.default_rng(0).integers(bits, size=200).tolist()
    refused = 0
    for bit in (*range(160), *range(bits - 80, bits), *middle):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if refusal(data.read, path, SHAPE.size):
            refused += 1
            continue
        found, found_labels, _ = data.read(path, SHAPE.size)
        np.testing.assert_array_equal(found_labels, labels)
        assert (found != matrix).nnz == 0
    assert 200 < refused < 440
    for length in (*range(20), len(content) // 2, *range(len(content) - 12, len(content))):
        path.write_bytes(content[:length])
        assert refusal(data.read, path)


def test_generated_rows_do_not_depend_on_who_asks():
    source = data.power_law("some", SHAPE, seed=3)
    matrix, labels = source.rows(0, 600)
    part, part_labels = source.rows(240, 510)
    np.testing.assert_array_equal(part.toarray(), matrix.toarray()[240:510])
    np.testing.assert_array_equal(part_labels, labels[240:510])
    assert (data.power_law("some", SHAPE, seed=4).rows(0, 600)[0] != matrix).nnz > 0
    popularity = matrix.getnnz(axis=0)
    assert popularity[0] > 5 * popularity[100:].mean() > 0
    assert matrix.nnz / 600 == pytest.approx(8, rel=0.1)
    assert set(labels) == {-1, 1}
    # Renumbered one to one, frequent features are not next to each other.
    moved = data.spread_indices(np.arange(3600), 3600)
    np.testing.assert_array_equal(np.sort(moved), np.arange(3600))
    shares = np.histogram(moved[:360], bins=4, range=(0, 3600))[0] / 360
    np.testing.assert_allclose(shares, 0.25, atol=0.05)
