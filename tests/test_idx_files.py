"""The reader of IDX files in the examples: good, bad, and those that would fill the memory."""

import gzip
import tracemalloc

import numpy as np
import pytest

from _data import InputError, read_idx


def idx(shape, content):
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return b"\x00\x00\x08" + bytes([len(shape)]) + sizes + content


def write(folder, content, packed):
    path = folder / ("numbers.gz" if packed else "numbers")
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (0,), (3, 0, 2)])
def test_what_was_written_is_read(shape, packed, tmp_path):
    expected = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = read_idx(write(tmp_path, idx(shape, expected.tobytes()), packed))
    assert found.dtype == np.uint8
    assert found.shape == shape
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00", "not an IDX file"),
        (b"\x00\x00\x0d" + idx((2,), b"ab")[3:], "not an IDX file"),
        (idx((1,) * 5, b"a"), "not an IDX file"),
        (idx((2, 3), b"")[:9], "holds less"),
        (idx((2, 3), b"abcde"), "holds less than the 6 bytes"),
        (idx((2, 3), b"abcdefg"), "holds more than the 6 bytes"),
        (idx((2**32 - 1,) * 4, b"abc"), "holds less than the 3402823"),
    ],
)
def test_a_malformed_file_is_one_line(content, message, packed, tmp_path):
    path = write(tmp_path, content, packed)
    with pytest.raises(InputError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [5, 30, -5])
def test_a_cut_archive_is_one_line(keep, tmp_path):
    path = write(tmp_path, idx((100,), bytes(range(100))), packed=True)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="cannot read"):
        read_idx(path)


def test_an_archive_with_another_checksum_is_one_line(tmp_path):
    path = write(tmp_path, idx((100,), bytes(range(100))), packed=True)
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="CRC"):
        read_idx(path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((10,), "holds more than the 10 bytes"), ((2**16, 2**16, 2**8), "holds less")],
)
def test_no_more_memory_is_taken_than_the_header_asks_for_or_the_file_can_hold(
    shape, message, tmp_path
):
    megabytes = 64
    path = write(tmp_path, idx(shape, bytes(megabytes << 20)), packed=True)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            read_idx(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
