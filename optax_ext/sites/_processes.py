"""The processes of a site: the first one has the store, and the others get its results."""

import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_T = TypeVar("_T")
# Seconds between two signs of life of the first process, since a collective does not wait for long.
_PATIENCE = 1.0


def of_first(function: Callable[[], _T]) -> _T:
    """The result of a function that the first process calls, on all processes.

    Raises:
      RuntimeError: it failed, on all other processes. The first one raises its own error.
    """
    if jax.process_count() == 1:
        return function()
    if jax.process_index() == 0:
        return _called(function)
    while not (size := int(_shared(np.zeros((), np.int64)))):
        pass
    result, error = pickle.loads(_shared(np.zeros(size, np.uint8)).tobytes())
    if error is not None:
        raise RuntimeError(f"process 0 of this site failed: {error}")
    return result


def _called(function: Callable[[], _T]) -> _T:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        while not concurrent.futures.wait([future], _PATIENCE).done:
            _shared(np.zeros((), np.int64))
    error = future.exception()
    said = (None, f"{type(error).__name__}: {error}") if error else (future.result(), None)
    data = np.frombuffer(pickle.dumps(said), np.uint8)
    _shared(np.asarray(data.size, np.int64))
    _shared(data)
    return future.result()


def _shared(x: np.ndarray) -> np.ndarray:
    """The array of the first process."""
    # As words of 32 bits, since jax has no others by default.
    words = np.frombuffer(x.tobytes() + bytes(-x.nbytes % 4), np.uint32)
    words = np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint32)
    return np.frombuffer(words.tobytes()[: x.nbytes], x.dtype).reshape(x.shape)


def whole(params: Any) -> Any:
    """Parameters of which each process has all; every process calls it."""

    def gathered(x: Any) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return multihost_utils.process_allgather(x, tiled=True)
        return x

    return jax.tree.map(gathered, params)


def placed(tree: Any, like: Any) -> Any:
    """Arrays of the host, placed as the arrays of ``like``."""

    def place(x: np.ndarray, other: Any) -> Any:
        if not isinstance(other, jax.Array):
            return x
        if other.is_fully_addressable:
            return jax.device_put(x, other.sharding)
        return jax.make_array_from_callback(x.shape, other.sharding, lambda index: x[index])

    return jax.tree.map(place, tree, like)
