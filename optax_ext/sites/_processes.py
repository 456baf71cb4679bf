"""The processes of a site: the first one has the store, and the others get its results."""

import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_ext.sites._store import StoreError

_T = TypeVar("_T")
# Seconds between two signs of life of the first process, since a collective does not wait for long.
_PATIENCE = 1.0
# What a site raises.
_ERRORS = TimeoutError, StoreError, ValueError, TypeError, ImportError


def of_first(function: Callable[[], _T]) -> _T:
    """The result of a function that the first process calls, on all processes.

    If it fails, the others raise an error of the same type, so that all can call again.

    Raises:
      RuntimeError: on the others, if the error of the first one is none of those that sites raise.
    """
    if jax.process_count() == 1:
        return function()
    if jax.process_index() == 0:
        return _called(function)
    while not (size := int(_shared(np.zeros((), np.int64)))):
        pass
    result, kind, text = pickle.loads(_shared(np.zeros(size, np.uint8)).tobytes())
    if kind is not None:
        raise kind(f"process 0 of this site failed: {text}")
    return result


def _called(function: Callable[[], _T]) -> _T:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        while not concurrent.futures.wait([future], _PATIENCE).done:
            _shared(np.zeros((), np.int64))
    if error := future.exception():
        kind = next((kind for kind in _ERRORS if isinstance(error, kind)), RuntimeError)
        said = None, kind, f"{type(error).__name__}: {error}"
    else:
        said = future.result(), None, ""
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
