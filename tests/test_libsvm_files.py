"""LIBSVM files and generated rows of the linear models: what is read, and what is refused."""

import bz2
import gzip
import io

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from examples._data import InputError
from examples.linear_models import data

SHAPE = data.Shape(size=300, nonzeros=8, rows=600, exponent=1.1)


def test_what_is_written_is_read(tmp_path):
    matrix, labels = data.power_law("some", SHAPE, seed=0).rows(0, 60)
    for path in (tmp_path / "data", tmp_path / "data.gz"):
        opened = gzip.open if path.suffix else open
        with opened(path, "wb") as file:
            dump_svmlight_file(matrix, np.where(labels > 0, 7, 3), file, zero_based=False)
        read, found, classes = data.read(path, size=350)
        assert classes == (3, 7)
        assert read.shape == (60, 350)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(found, labels)
        np.testing.assert_allclose(read.toarray()[:, :300], matrix.toarray(), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:2\nx 2:3", "line 2: the label 'x' is not a finite number"),
        ("1 1:2\n-1 2:3 4", "line 2: '4' is not INDEX:VALUE"),
        ("1 1:2\n-1 a:3", "line 2: 'a:3' is not INDEX:VALUE"),
        ("1 1:2\n# none\n-1 2:y", "line 3: the value of '2:y' is not a finite number"),
        ("1 1:2\n-1 2:nan", "line 2: the value of '2:nan' is not a finite number"),
        ("1 1:2\n-1 2:1e39", "line 2: the value of '2:1e39' is not a finite number"),
        ("inf 1:2\n-1 2:1", "line 1: the label 'inf' is not a finite number"),
        ("1 0:2\n-1 2:3", "line 1: the index of '0:2' is below 1"),
        ("1 -4:2\n-1 2:3", "line 1: the index of '-4:2' is below 1"),
        ("1 1:2\n-1 3:1 2:1", "line 2: the index of '2:1' is not above the one before it, 3"),
        ("1 1:2\n-1 3:1 3:1", "line 2: the index of '3:1' is not above the one before it, 3"),
        ("1 1:2\n-1 6:1", "line 2: the index of '6:1' is above the size, 5"),
        ("1 1:2\n-1 99999999999:1", "line 2: the index of '99999999999:1' is above the size, 5"),
        ("1 1:2\n1 2:2", "has 1 labels (1): a linear classifier takes two"),
        ("1 1:2\n2 2:2\n3 1:1", "has 3 labels (1, 2, 3): a linear classifier takes two"),
        ("1 1:2\n0 2:2", "has the labels 0, 1, expected -1, 1"),
        ("", "has no rows"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_place(text, message, tmp_path):
    path = tmp_path / "bad"
    path.write_text(text + "\n")
    with pytest.raises(InputError) as raised:
        data.read(path, 5, (-1.0, 1.0))
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot read .*none: No such file"):
        data.read(tmp_path / "none")


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress}


def packed_rows(suffix, rows=300):
    """A packed file of so many rows, and what is in it."""
    matrix, labels = data.power_law("some", SHAPE, seed=1).rows(0, rows)
    text = io.BytesIO()
    dump_svmlight_file(matrix, labels, text, zero_based=False)
    return PACKED[suffix](text.getvalue()), text.getvalue()


@pytest.mark.parametrize("suffix", list(PACKED))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_packed_file_that_is_cut_off_is_one_line(suffix, share, tmp_path):
    content, _ = packed_rows(suffix)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match="is cut off or damaged") as raised:
        data.read(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def is_read(path, expected):
    """Whether a file has the rows that were written, or is refused in one line that names it."""
    message = None
    try:
        matrix, labels, _ = data.read(path, SHAPE.size)
    except InputError as error:
        message = str(error)
    if message is not None:
        assert str(path) in message
        assert "\n" not in message
        return False
    np.testing.assert_array_equal(labels, expected[1])
    assert (matrix != expected[0]).nnz == 0
    return True


@pytest.mark.parametrize("suffix", list(PACKED))
def test_of_a_damaged_packed_file_come_the_right_rows_or_none(suffix, tmp_path):
    """Any flipped bit, and any length: the checksums at the end leave no wrong rows."""
    content, text = packed_rows(suffix, rows=30)
    (tmp_path / "rows").write_bytes(text)
    expected = data.read(tmp_path / "rows", SHAPE.size)
    path = tmp_path / f"rows{suffix}"

    def of(damaged):
        path.write_bytes(damaged)
        return is_read(path, expected)

    def flipped(bit):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    assert of(content)
    # The heads, with names, sizes and flags, and the ends, with checksums and padding: all of them.
    bits = 8 * len(content)
    refused = [not of(flipped(bit)) for bit in (*range(160), *range(bits - 80, bits))]
    assert 0 < sum(refused) < len(refused)
    for length in (*range(20), *range(len(content) - 12, len(content))):
        assert not of(content[:length])

    @hypothesis.given(st.integers(0, bits - 1), st.integers(0, len(content) - 1))
    @hypothesis.settings(max_examples=200, database=None, deadline=None, derandomize=True)
    def holds(bit, length):
        of(flipped(bit))
        assert not of(content[:length])

    holds()


@pytest.mark.parametrize("size", [1, 2, 5, 123, 3600, 3_231_961])
def test_features_are_renumbered_one_to_one_and_runs_come_apart(size):
    moved = data.spread_indices(np.arange(size), size)
    assert moved.dtype == np.int32
    np.testing.assert_array_equal(np.sort(moved), np.arange(size))
    if size > 1000:
        shares = np.histogram(moved[: size // 10], bins=4, range=(0, size))[0] / (size // 10)
        np.testing.assert_allclose(shares, 0.25, atol=0.05)


def test_generated_rows_do_not_depend_on_who_asks():
    source = data.power_law("some", SHAPE, seed=3)
    matrix, labels = source.rows(0, 600)
    part, part_labels = source.rows(240, 510)
    np.testing.assert_array_equal(part.toarray(), matrix.toarray()[240:510])
    np.testing.assert_array_equal(part_labels, labels[240:510])
    np.testing.assert_allclose(np.sqrt(matrix.multiply(matrix).sum(1)), 1, rtol=1e-5)
    other = data.power_law("some", SHAPE, seed=4).rows(0, 600)[0]
    assert (other != matrix).nnz > 0
    popularity = matrix.getnnz(axis=0)
    assert popularity[0] > 5 * popularity[100:].mean() > 0
    assert matrix.nnz / 600 == pytest.approx(8, rel=0.1)
    assert set(labels) == {-1, 1}
