"""Sources of images, a slow link to them, and the processing of an image.

A record is a sample as the central storage holds it: here the label, 4 bytes, and the file of the
image. Decoding comes before the cache; augmentation is random and comes after it.
"""

import bisect
import hashlib
import io
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from .disk import CacheError


class ImageFolder:
    """Images as ``folder/<class>/<name>``; their names, sizes and times are the identity."""

    def __init__(self, folder: Path):
        found = (x for x in folder.glob("*/*") if x.suffix.lower() in (".jpg", ".jpeg", ".png"))
        self.names = sorted(path for path in found if path.is_file())
        if not self.names:
            raise CacheError(f"{folder} holds no images as <class>/<name>.jpg|.jpeg|.png")
        self.classes = sorted({path.parent.name for path in self.names})
        stats = [(x.parts[-2:], x.stat().st_size, x.stat().st_mtime_ns) for x in self.names]
        self.identity = f"images, {hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        path = self.names[index]
        label = bisect.bisect_left(self.classes, path.parent.name)
        return label.to_bytes(4, "little") + path.read_bytes()


class Digits(list):
    """Records of scikit-learn's 1,797 digits, 8x8 pixels as PNG files; a quarter are for tests."""

    def __init__(self, test: bool = False):
        images, labels = load_digits().images.astype("uint8") * 15, load_digits().target
        self.names = train_test_split(range(len(labels)), random_state=0, stratify=labels)[test]
        for index in self.names:
            file = io.BytesIO()
            Image.fromarray(images[index]).save(file, "PNG")
            self.append(int(labels[index]).to_bytes(4, "little") + file.getvalue())
        self.classes = list(range(10))
        self.identity = f"digits, {hashlib.sha256(b''.join(self)).hexdigest()[:16]}"


class Throttled:
    """A source with a slow link: reads wait for latency concurrently, and for bytes in turn."""

    def __init__(self, source, bytes_per_second: float, latency: float):
        self.source, self.identity, self.names = source, source.identity, source.names
        self._rate, self._latency = bytes_per_second, latency
        self._lock, self._free_at = threading.Lock(), 0.0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> bytes:
        record = self.source[index]
        with self._lock:
            asked = time.monotonic()
            self._free_at = max(asked, self._free_at) + len(record) / self._rate
            wait = self._free_at + self._latency - asked
        time.sleep(max(0.0, wait))
        return record


class Decode:
    """Decodes the image of a record, scales it to squares of `size` pixels, and normalizes it.

    The sample has ``image f32[size, size, channels]``, roughly standardized, and ``label i32[]``;
    3 channels are RGB and 1 is gray.
    """

    def __init__(self, size: int, channels: int = 3):
        self.shape, self._mode = (size, size, channels), {1: "L", 3: "RGB"}[channels]
        # Increase the number whenever the result changes.
        self.identity = f"Decode 1: {size}x{size}x{channels}, f32"

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        """The sample; an OSError or ValueError if the record is no image."""
        with Image.open(io.BytesIO(memoryview(record)[4:])) as image:
            # A JPEG is decoded at the smallest of its scales that is large enough.
            image.draft(self._mode, self.shape[:2])
            image = image.convert(self._mode).resize(self.shape[:2], Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.float32).reshape(self.shape)
        pixels = (pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.25)
        return {"image": pixels, "label": np.asarray(int.from_bytes(record[:4], "little"), "i4")}


class Augment:
    """Shifts each image by up to `shift` pixels, its edges repeated, and mirrors half of them."""

    def __init__(self, shift: int, mirror: bool = False):
        self._shift, self._mirror = shift, mirror

    def __call__(self, sample, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns another sample, and does not change the given one."""
        image = sample["image"]
        for axis, by in enumerate(random.integers(-self._shift, self._shift + 1, 2)):
            rows = image.swapaxes(0, axis)  # slices of it are faster than indices
            edge = np.repeat(rows[-1:] if by > 0 else rows[:1], abs(by), axis=0)
            moved = (rows[by:], edge) if by > 0 else (edge, rows[: len(rows) + by])
            image = np.concatenate(moved).swapaxes(0, axis)
        if self._mirror and random.random() < 0.5:
            image = image[:, ::-1]
        return {**sample, "image": image}
