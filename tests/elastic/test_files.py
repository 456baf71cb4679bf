"""Files that are there whole or not at all."""

import os

import pytest

from optax_ext.elastic import _files

CONTENT = b"some", b"", memoryview(b"thing else" * 4)


def test_what_was_written_is_read(tmp_path):
    place = tmp_path / "folder" / "one"
    for content in ((), CONTENT):
        _files.write(place, content)
        assert _files.read(place) == b"".join(content)
    assert [x.name for x in place.parent.iterdir()] == ["one"]


def test_every_bit_and_every_length_counts(tmp_path):
    place = tmp_path / "one"
    _files.write(place, CONTENT)
    data = place.read_bytes()
    damaged = [data[:size] for size in range(len(data))]
    damaged += [data + b"\0", b"\0" + data]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        place.write_bytes(content)
        with pytest.raises(ValueError, match="its checksum is wrong"):
            _files.read(place)


@pytest.mark.parametrize("fails", ["fsync", "replace", "open"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, fails):
    place = tmp_path / "one"
    _files.write(place, CONTENT)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(os if fails == "fsync" else type(place), fails, full)
        with pytest.raises(OSError, match="No space left"):
            _files.write(place, (b"new",))
    assert _files.read(place) == b"".join(CONTENT)
    assert [x.name for x in tmp_path.iterdir()] == ["one"]
