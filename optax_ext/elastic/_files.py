"""Files that are there whole or not at all, that end with a checksum."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CHECKSUM = hashlib.sha256
_SIZE = _CHECKSUM().digest_size


def write(place: Path, content: Iterable[Any]) -> None:
    """Writes pieces of bytes, whenever this process dies; an OSError leaves no part of them."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f"{place.name}.{os.getpid()}")
    checksum = _CHECKSUM()
    try:
        with new.open("wb") as file:
            for piece in content:
                checksum.update(piece)
                file.write(piece)
            file.write(checksum.digest())
            file.flush()
            os.fsync(file.fileno())
        new.replace(place)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def read(place: Path) -> memoryview:
    """The content of a file; a ValueError if a bit of it has changed."""
    content = memoryview(place.read_bytes())
    content, checksum = content[:-_SIZE], content[-_SIZE:]
    if _CHECKSUM(content).digest() != bytes(checksum):
        raise ValueError("its checksum is wrong")
    return content
