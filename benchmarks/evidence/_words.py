"""Words of traced programs, kept: claims and figures ask for the same ones."""

import functools
from typing import Any

from ..network import _volumes, traffic


@functools.cache
def words_of(name: str, size: int, density: float, workers: int) -> dict[str, Any] | None:
    """As `benchmarks.network._volumes.of_algorithm`; not to be changed."""
    return _volumes.of_algorithm(name, size, density, workers)


@functools.cache
def words_of_ok_topk(size: int, density: float, workers: int) -> dict[str, Any]:
    """As `benchmarks.network.traffic.of_ok_topk` with exact pairs; not to be changed."""
    return traffic.of_ok_topk(size, density, workers, "raw")
