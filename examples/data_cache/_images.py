"""What is done to an image: decoded once, before the cache; augmented each time, behind it."""

import io

import numpy as np
from PIL import Image

from ._memory import Sample
from ._sources import split_record

_MEAN, _DEVIATION = 0.5, 0.25


class Decode:
    """Decodes the image of a record, scales it to one size, and normalises it.

    The sample has ``image f32[size, size, channels]``, about standardised, and ``label i32[]``.
    """

    def __init__(self, size: int, channels: int = 3):
        """Decodes to squares of `size` pixels, of 3 channels (RGB) or 1 (grey)."""
        if size < 1 or channels not in (1, 3):
            raise ValueError(f"size is {size} and channels {channels}; expected 1 or more, and 1|3")
        self.shape = (size, size, channels)
        self._size, self._mode = size, {1: "L", 3: "RGB"}[channels]
        # Count it up with each change of what is computed.
        self.identity = f"Decode 1: {size}x{size}x{channels}, f32"

    def __call__(self, record: bytes) -> Sample:
        """The sample; raises OSError or ValueError where the record is no image."""
        label, file = split_record(record)
        with Image.open(io.BytesIO(file)) as image:
            # A JPEG is decoded at the smallest of its scales that is large enough.
            image.draft(self._mode, (self._size, self._size))
            image = image.convert(self._mode)
            if image.size != (self._size, self._size):
                image = image.resize((self._size, self._size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.float32).reshape(self._size, self._size, -1)
        pixels = (pixels / np.float32(255) - np.float32(_MEAN)) / np.float32(_DEVIATION)
        return {"image": pixels, "label": np.asarray(label, np.int32)}


class Augment:
    """Shifts each image by up to some pixels, and mirrors half of them."""

    def __init__(self, shift: int = 0, mirror: bool = False):
        """Shifts along both axes; what comes in at an edge repeats that edge."""
        if shift < 0:
            raise ValueError(f"shift is {shift}; it must be 0 or more")
        self._shift, self._mirror = shift, mirror

    def __call__(self, sample: Sample, random: np.random.Generator) -> Sample:
        """Another sample; the one that is given stays as it is."""
        image = sample["image"]
        if self._shift:
            for axis, by in enumerate(random.integers(-self._shift, self._shift + 1, 2)):
                image = _shifted(image, axis, int(by))
        if self._mirror and random.random() < 0.5:
            image = image[:, ::-1]
        return {**sample, "image": image}


def _shifted(image: np.ndarray, axis: int, by: int) -> np.ndarray:
    """What is seen from `by` pixels further along an axis; slices are faster than indices."""
    if by == 0:
        return image
    source, size = image.swapaxes(0, axis), image.shape[axis]
    by = max(-size, min(by, size))
    made = np.empty_like(image)
    target = made.swapaxes(0, axis)
    if by > 0:
        target[: size - by], target[size - by :] = source[by:], source[-1:]
    else:
        target[-by:], target[:-by] = source[:by], source[:1]
    return made
