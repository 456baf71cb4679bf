"""Where records come from: images in a folder, scikit-learn's digits, and either over a slow link.

A record is what the central storage holds of a sample, as bytes: here the label, 4 bytes, and the
file of the image behind it.
"""

import hashlib
import io
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ._errors import CacheError

_SUFFIXES = (".jpg", ".jpeg", ".png")
_LABEL = struct.Struct("<I")


class Source(Protocol):
    """A sequence of records that several threads may read at once.

    Attributes:
      identity: one line that says which records these are. A cache of other ones is refused, so
        it changes whenever a record does.
    """

    identity: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes:
        """The record of a sample; raises CacheError where it cannot be read."""

    def where(self, index: int) -> str:
        """What a message calls the record."""


def make_record(label: int, image: bytes) -> bytes:
    """The label and the file of an image as a record."""
    return _LABEL.pack(label) + image


def split_record(record: bytes) -> tuple[int, memoryview]:
    """The label and the file of an image, from a record.

    Raises:
      ValueError: the record is too short.
    """
    if len(record) < _LABEL.size:
        raise ValueError(f"a record of {len(record)} bytes, which holds no label")
    return _LABEL.unpack_from(record)[0], memoryview(record)[_LABEL.size :]


class ImageFolder:
    """Images in a folder for each class: ``folder/<class>/<name>.jpg``, or .jpeg, or .png.

    The classes are numbered by name, and so are the images, class after class.
    """

    def __init__(self, folder: Path):
        """Lists the files; their sizes and times, with the names, are the identity.

        Raises:
          CacheError: it is no folder, or holds no images in folders.
        """
        if not folder.is_dir():
            raise CacheError(f"{folder} is not a folder")
        self.folder = folder
        self.files = sorted(
            path.relative_to(folder)
            for path in folder.glob("*/*")
            if path.suffix.lower() in _SUFFIXES and path.is_file()
        )
        if not self.files:
            raise CacheError(f"{folder} holds no images as <class>/<name>{'|'.join(_SUFFIXES)}")
        self.classes = sorted({path.parent.name for path in self.files})
        self._labels = {name: label for label, name in enumerate(self.classes)}
        listing = hashlib.sha256()
        for path in self.files:
            found = (folder / path).stat()
            listing.update(f"{path.as_posix()}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
        self.identity = f"{len(self.files)} images in folders, {listing.hexdigest()[:16]}"

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        """Reads a file."""
        path = self.files[index]
        try:
            image = (self.folder / path).read_bytes()
        except OSError as error:
            raise CacheError(f"cannot read {self.folder / path}: {error.strerror}") from error
        return make_record(self._labels[path.parent.name], image)

    def where(self, index: int) -> str:
        """The file."""
        return str(self.folder / self.files[index])


class Digits:
    """Scikit-learn's 1797 digits of 8x8 pixels as PNG files, without a file or a download."""

    def __init__(self, part: str = "train"):
        """Encodes the images of a part; the split is the same at every call.

        Args:
          part: "train", three quarters of them, or "test", the others.
        """
        images, labels = load_digits().images.astype("uint8") * 15, load_digits().target
        train_images, test_images, train_labels, test_labels = train_test_split(
            images, labels, test_size=0.25, random_state=0, stratify=labels
        )
        parts = {"train": (train_images, train_labels), "test": (test_images, test_labels)}
        if part not in parts:
            raise CacheError(f"part is {part!r}; expected one of {', '.join(map(repr, parts))}")
        self.records = [make_record(int(label), _png(image)) for image, label in zip(*parts[part])]
        self.classes = [str(digit) for digit in range(10)]
        content = hashlib.sha256(b"".join(self.records)).hexdigest()[:16]
        self.identity = f"{part}ing digits of scikit-learn, {content}"

    def __len__(self) -> int:
        """The number of digits."""
        return len(self.records)

    def __getitem__(self, index: int) -> bytes:
        """A label and a PNG."""
        return self.records[index]

    def where(self, index: int) -> str:
        """The number of the digit."""
        return f"digit {index}"


def _png(image) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


class Throttled:
    """A source behind a link, which stands for a network file system.

    A read takes the latency, and the bytes of all reads pass the link one after another. Reads of
    several threads wait for their latencies side by side.
    """

    def __init__(
        self,
        source: Source,
        *,
        bytes_per_second: float = float("inf"),
        latency: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Puts the link in front of `source`.

        Args:
          source: what is read.
          bytes_per_second: of the link, for all threads together.
          latency: seconds that each read waits besides.
          now: the clock, in seconds.
          sleep: waits for that many seconds.

        Raises:
          CacheError: a rate that is not positive, or a latency that is negative.
        """
        if not bytes_per_second > 0:
            raise CacheError(f"bytes_per_second is {bytes_per_second}; it must be above 0")
        if not 0 <= latency < float("inf"):
            raise CacheError(f"latency is {latency}; it must be 0 or more seconds")
        self.source, self.identity = source, source.identity
        self._rate, self._latency = bytes_per_second, latency
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._free_at = -float("inf")

    def __len__(self) -> int:
        """The number of records."""
        return len(self.source)

    def __getitem__(self, index: int) -> bytes:
        """Reads, and returns when the link would have delivered."""
        record = self.source[index]
        with self._lock:
            asked = self._now()
            self._free_at = max(asked, self._free_at) + len(record) / self._rate
            wait = self._free_at + self._latency - asked
        if wait > 0:
            self._sleep(wait)
        return record

    def where(self, index: int) -> str:
        """As the source calls it."""
        return self.source.where(index)
