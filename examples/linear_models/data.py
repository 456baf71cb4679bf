"""Rows of sparse data with two classes: LIBSVM files, read by scikit-learn."""

import bz2
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.datasets import load_svmlight_file

from .._data import InputError

Labels = tuple[float, float]
_LARGEST = 2**31 - 2
_OPEN = {".gz": gzip.open, ".bz2": bz2.open}
# What reading a packed file raises that is cut off or damaged; that of gzip is an OSError, too.
_UNREADABLE = (OSError, EOFError, zlib.error)
# What a message shows of a line.
_SHOWN = 40


class Source(NamedTuple):
    """Rows that each process takes its own part of.

    Attributes:
      name: for titles.
      size: n, the number of features.
      count: N, the number of rows.
      rows: ``rows(start, stop)`` -> (``f32`` CSR matrix ``[stop - start, n]``, labels
        ``f32[stop - start]``, -1 or 1): the same rows in every process and at every call.
    """

    name: str
    size: int
    count: int
    rows: Callable[[int, int], tuple[csr_matrix, np.ndarray]]


def read(
    path: Path, size: int | None = None, classes: Labels | None = None
) -> tuple[csr_matrix, np.ndarray, Labels]:
    """A LIBSVM file: a label and ``index:value`` pairs a line, indices from 1 and ascending.

    Args:
      path: the file; ``.gz`` and ``.bz2`` are unpacked.
      size: the number of features; by default the largest index in the file.
      classes: the labels to expect, such as those of the training file.

    Returns:
      The ``f32`` matrix ``[N, n]`` in CSR form; labels ``f32[N]``, -1 for the smaller and 1 for the
      larger; the two labels of the file.

    Raises:
      InputError: it can't be read, it is packed and cut off or damaged, a line is malformed, an
        index is above ``size``, or there are not two labels. The message names the file, and the
        line where it has one.
    """
    try:
        matrix, labels = load_svmlight_file(
            str(path), dtype=np.float32, zero_based=False, n_features=size
        )
    except _UNREADABLE as error:
        raise InputError(_unreadable(path, error)) from error
    except (ValueError, OverflowError) as error:
        # scikit-learn says what is wrong, but not where; and what it read may be no text at all.
        complaint = _damage(path) or _complaint(path, size)
        raise InputError(complaint or f"{path}: {error}") from error
    if not matrix.shape[0]:
        raise InputError(f"{path} has no rows")
    if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
        raise InputError(_complaint(path, size) or f"{path} has a value that is not finite")
    if not matrix.shape[1]:
        raise InputError(f"{path} has no features")
    found = tuple(np.unique(labels).tolist())
    if len(found) != 2:
        raise InputError(
            f"{path} has {len(found)} labels ({_listed(found)}): a linear classifier takes two"
        )
    if classes is not None and found != classes:
        raise InputError(f"{path} has the labels {_listed(found)}, expected {_listed(classes)}")
    matrix.sum_duplicates()
    return matrix, np.where(labels == found[1], 1, -1).astype(np.float32), found


def from_file(path: Path, size: int | None, seed: int) -> tuple[Source, Labels]:
    """The rows of a LIBSVM file in an order that the seed decides, and its labels.

    Every process reads the whole file: it keeps its own part only.

    Raises:
      InputError: as :func:`read`.
    """
    matrix, labels, classes = read(path, size)
    order = np.random.default_rng(seed).permutation(len(labels))
    return of_matrix(path.name, matrix[order], labels[order]), classes


def of_matrix(name: str, matrix: csr_matrix, labels: np.ndarray) -> Source:
    """A matrix in memory as a source."""

    def rows(start: int, stop: int) -> tuple[csr_matrix, np.ndarray]:
        return matrix[start:stop], labels[start:stop]

    return Source(name, matrix.shape[1], matrix.shape[0], rows)


def spread(source: Source) -> Source:
    """The same rows with features renumbered, so that each range of indices has as many of them.

    The common features of a file often have the first numbers, and workers own ranges. Feature j
    becomes :func:`spread_indices` of j.
    """

    def rows(start: int, stop: int) -> tuple[csr_matrix, np.ndarray]:
        matrix, labels = source.rows(start, stop)
        indices = spread_indices(matrix.indices, source.size)
        return csr_matrix((matrix.data, indices, matrix.indptr), shape=matrix.shape), labels

    return source._replace(rows=rows)


def spread_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """A one-to-one map of ``[0, n)``, ``i32``, under which runs come apart.

    Multiplication modulo n by a number near the golden section of n that has no divisor in common
    with it.
    """
    factor = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, size) != 1:
        factor += 1
    return (indices.astype(np.int64) * factor % size).astype(np.int32)


def _listed(labels: tuple[float, ...]) -> str:
    shown = [f"{label:g}" for label in labels[:4]]
    return ", ".join(shown + ["..."] * (len(labels) > 4))


def _unreadable(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None)
    if reason or path.suffix not in _OPEN:
        return f"cannot read {path}: {reason or error}"
    return f"{path} is cut off or damaged ({error}): fetch or pack it again"


def _damage(path: Path) -> str | None:
    """What is wrong with a packed file as such, whose checksum comes last; None: nothing."""
    try:
        for _ in _lines(path):
            pass
    except _UNREADABLE as error:
        return _unreadable(path, error)
    return None


def _complaint(path: Path, size: int | None) -> str | None:
    """What is wrong in the first line that has something wrong; None where none has."""
    for number, line in _lines(path):
        found = _wrong(line, size)
        if found:
            return f"{path}, line {number}: {found}"
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened: Callable[..., IO[bytes]] = _OPEN.get(path.suffix, open)
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.decode("utf-8", "replace")


def _wrong(line: str, size: int | None) -> str | None:
    label, *pairs = line.partition("#")[0].split() or [None]
    if label is None:
        return None
    if not _is_number(label):
        return f"the label {_short(label)} is not a finite number"
    last = 0
    for pair in pairs:
        index, colon, value = pair.partition(":")
        if index == "qid":
            continue
        if not colon or not re.fullmatch(r"[+-]?\d+", index):
            return f"{_short(pair)} is not INDEX:VALUE"
        if not _is_number(value):
            return f"the value of {_short(pair)} is not a finite number"
        if int(index) < 1:
            return f"the index of {_short(pair)} is below 1, the first one"
        if int(index) > (size or _LARGEST):
            return f"the index of {_short(pair)} is above the size, {size or _LARGEST}"
        if int(index) <= last:
            return f"the index of {_short(pair)} is not above the one before it, {last}"
        last = int(index)
    return None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")


def _is_number(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    # As float32, which the matrix holds.
    return abs(value) <= float(np.finfo(np.float32).max)
