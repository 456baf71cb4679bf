"""The memory level: prepared samples by index."""

import threading
from typing import Any

import numpy as np

Sample = dict[str, np.ndarray]


class Memory:
    """Keeps samples until a limit in bytes, and then those that it has.

    Nothing is evicted. An epoch reads each sample once, so what was just read is the last to come
    again: with room for half of a share, half of it is found, and evicting the least recently
    used would find 15 %.
    """

    def __init__(self, limit: int | None = None):
        """Makes an empty level.

        Args:
          limit: bytes of arrays; None: no limit, 0: no memory level.
        """
        self.limit = limit
        self.bytes = 0
        self._samples: dict[int, Sample] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._samples)

    def get(self, index: int) -> Sample | None:
        """The sample, whose arrays are read-only; None if it is not here."""
        return self._samples.get(index)

    def put(self, index: int, sample: Sample) -> bool:
        """Keeps a sample if there is room; returns whether it is here."""
        size = sum(array.nbytes for array in sample.values())
        with self._lock:
            if index in self._samples:
                return True
            if self.limit is not None and self.bytes + size > self.limit:
                return False
            self._samples[index] = sample
            self.bytes += size
        return True


def read_only(sample: dict[str, Any]) -> Sample:
    """The sample as NumPy arrays that nobody can change by mistake: they come again."""
    arrays = {name: np.asarray(value) for name, value in sample.items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays
