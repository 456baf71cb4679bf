"""Rows whose sum or mean over the workers counts, for another number of workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Columns that are added up at a time, so that their float64 copies stay small.
_COLUMNS = 1 << 20


def deal(old: np.ndarray, workers: int, dtype: Any) -> np.ndarray:
    """Rows for other workers with the same sum, ``dtype[workers, n]``."""
    new = np.zeros((workers, old.shape[1]), dtype)
    if workers >= len(old):
        for row in range(workers):
            source, turn = row % len(old), row // len(old)
            sharing = len(range(source, workers, len(old)))
            new[row, turn::sharing] = old[source, turn::sharing]
        return new
    for start in range(0, old.shape[1], _COLUMNS):
        _add_up(old[:, start : start + _COLUMNS], new[:, start : start + _COLUMNS])
    return new


def share(old: np.ndarray, workers: int, dtype: Any, *, scale: float) -> np.ndarray:
    """Rows for other workers that are all alike, with ``scale`` times the sum of the old ones.

    Each row is the rounded share of what the rows before it have left.
    """
    if workers == len(old) and scale == 1:
        return old.astype(dtype)
    new = np.empty((workers, old.shape[1]), dtype)
    for start in range(0, old.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        finite = np.isfinite(old[:, columns]).all(axis=0)
        left = np.where(finite, old[:, columns], 0).sum(axis=0, dtype=np.float64) * scale
        for row in range(workers):
            new[row, columns] = (left / (workers - row)).astype(dtype)
            left -= new[row, columns].astype(np.float64)
        if not finite.all():
            index = start + np.flatnonzero(~finite)
            new[:, index] = deal(old[:, index], workers, dtype)
    return new


def _add_up(old: np.ndarray, new: np.ndarray) -> None:
    """Writes the sum of each column of ``old`` into ``new``, in as many parts as it has rows."""
    finite = np.isfinite(old).all(axis=0)
    high = np.zeros(old.shape[1])
    low = np.zeros(old.shape[1])
    for row in np.where(finite, old, 0).astype(np.float64):
        high, error = _two_sum(high, row)
        low += error
    index = np.arange(old.shape[1])
    for part in range(len(new)):
        high, low = _two_sum(high, low)
        # A sum that is too large for one worker also goes to the next ones, if there are any.
        most = np.inf if part == len(new) - 1 else float(jnp.finfo(new.dtype).max)
        with np.errstate(over="ignore"):
            rounded = np.clip(high, -most, most).astype(new.dtype)
        # The worker of an index changes with it, so that all have equal shares.
        new[(index + part) % len(new), index] = rounded
        high = high - rounded.astype(np.float64)
    if not finite.all():
        with np.errstate(invalid="ignore"):  # inf - inf, which is NaN as it should be.
            total = old[:, ~finite].sum(axis=0)
        new[(index % len(new))[~finite], index[~finite]] = total


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``a + b`` rounded, and the rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def placed(x: Any, like: Any) -> Any:
    """``x`` with the dtype and placement of ``like``."""
    host = np.asarray(x, like.dtype)
    if isinstance(like, jax.Array) and like.committed:
        return jax.make_array_from_callback(host.shape, like.sharding, lambda where: host[where])
    return jnp.asarray(host)
