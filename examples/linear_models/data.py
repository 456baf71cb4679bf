"""Rows of sparse data with two classes: LIBSVM files, read by scikit-learn, or generated ones."""

import bz2
import gzip
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csr_matrix
from sklearn.datasets import load_svmlight_file

from .._data import InputError

_OPEN = {".gz": gzip.open, ".bz2": bz2.open}
# Errors of reading a packed file that is cut off or damaged; gzip's own is also an OSError.
_UNREADABLE = (OSError, EOFError, zlib.error)
# Generated rows that share a generator: a process makes only the blocks that it needs.
_BLOCK = 250
# Ranks below it are about equally common, as the first words of a text are.
_FLAT = 10.0


class Source(NamedTuple):
    """Rows, of which each process takes its own part, with labels of -1 or 1."""

    name: str
    size: int
    count: int
    rows: Callable[[int, int], tuple[csr_matrix, np.ndarray]]  # from the first to before the last


def of_matrix(name: str, matrix: csr_matrix, labels: np.ndarray) -> Source:
    """A source from a matrix in memory."""
    count, size = matrix.shape
    return Source(name, size, count, lambda start, stop: (matrix[start:stop], labels[start:stop]))


def spread(source: Source) -> Source:
    """The same rows with other numbers of features: often the first ones are the common ones."""

    def rows(start: int, stop: int) -> tuple[csr_matrix, np.ndarray]:
        matrix, labels = source.rows(start, stop)
        indices = spread_indices(matrix.indices, source.size)
        return csr_matrix((matrix.data, indices, matrix.indptr), shape=matrix.shape), labels

    return source._replace(rows=rows)


def spread_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """A one-to-one map of ``[0, n)``, ``i32``, that scatters runs: a product modulo n."""
    factor = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, size) != 1:
        factor += 1
    return (indices.astype(np.int64) * factor % size).astype(np.int32)


def read(
    path: Path, size: int | None = None, classes: tuple[float, ...] | None = None
) -> tuple[csr_matrix, np.ndarray, tuple[float, ...]]:
    """Reads a LIBSVM file: a label and ``index:value`` pairs a line, indices from 1 and ascending.

    ``.gz`` and ``.bz2`` are unpacked. By default ``size`` is the largest index in the file;
    ``classes`` are the expected labels, such as the labels of the training file.

    Returns:
      The ``f32`` matrix ``[N, n]`` in CSR form; labels ``f32[N]``, -1 for the smaller and 1 for the
      larger; the two labels of the file.

    Raises:
      InputError: it can't be used. The message names the file, and the line if there is one.
    """
    try:
        given = {"dtype": np.float32, "zero_based": False, "n_features": size}
        matrix, labels = load_svmlight_file(str(path), **given)
    except _UNREADABLE as error:
        raise InputError(_unreadable(path, error)) from error
    except (ValueError, OverflowError) as error:
        # scikit-learn reports the error without its place, and the file may be no text at all.
        raise InputError(_complaint(path, size) or f"{path}: {error}") from error
    if not matrix.shape[0]:
        raise InputError(f"{path} has no rows")
    if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
        raise InputError(_complaint(path, size) or f"{path} has a value that is not finite")
    if not matrix.shape[1]:
        raise InputError(f"{path} has no features")
    found = tuple(np.unique(labels).tolist())
    if len(found) != 2:
        labels = f"{len(found)} labels ({_listed(found)})"
        raise InputError(f"{path} has {labels}: a linear classifier takes two")
    if classes is not None and found != classes:
        raise InputError(f"{path} has the labels {_listed(found)}, expected {_listed(classes)}")
    matrix.sum_duplicates()
    return matrix, np.where(labels == found[1], 1, -1).astype(np.float32), found


def _listed(labels: tuple[float, ...]) -> str:
    return ", ".join([f"{label:g}" for label in labels[:4]] + ["..."] * (len(labels) > 4))


def _unreadable(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None)
    if reason or path.suffix not in _OPEN:
        return f"cannot read {path}: {reason or error}"
    return f"{path} is cut off or damaged ({error}): fetch or pack it again"


def _complaint(path: Path, size: int | None) -> str | None:
    """The error of a packed file, whose checksum comes last, or of the first wrong line."""
    first = None
    try:
        with _OPEN.get(path.suffix, open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                wrong = None if first else _wrong(line.decode("utf-8", "replace"), size)
                first = f"{path}, line {number}: {wrong}" if wrong else first
    except _UNREADABLE as error:
        return _unreadable(path, error)
    return first


def _wrong(line: str, size: int | None) -> str | None:
    label, *pairs = line.partition("#")[0].split() or ["0"]
    if not _is_number(label):
        return f"the label {label[:40]!r} is not a finite number"
    last, largest = 0, size or 2**31 - 2
    for pair in pairs:
        index, colon, value = pair.partition(":")
        shown = repr(pair[:40])
        if index == "qid":
            continue
        if not colon or not re.fullmatch(r"[+-]?\d+", index):
            return f"{shown} is not INDEX:VALUE"
        if not _is_number(value):
            return f"the value of {shown} is not a finite number"
        number = int(index[:20])  # Python refuses to convert thousands of digits
        if number < 1:
            return f"the index of {shown} is below 1, the first one"
        if number > largest:
            return f"the index of {shown} is above the size, {largest}"
        if number <= last:
            return f"the index of {shown} is not above the one before it, {last}"
        last = number
    return None


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= float(np.finfo(np.float32).max)  # the matrix holds float32
    except ValueError:
        return False


class Shape(NamedTuple):
    """A row has ``nonzeros`` of n features on average; rank r has a share ``r ** -exponent``."""

    size: int
    nonzeros: int
    rows: int
    exponent: float = 1.1


# Table 1 of SparCML: URL has 2,396,130 rows, Webspam 350,000; fewer fit into memory.
SHAPES = {
    "small": Shape(size=20_000, nonzeros=30, rows=8_000),
    "url": Shape(size=3_231_961, nonzeros=115, rows=200_000),
    "webspam": Shape(size=16_609_143, nonzeros=3_700, rows=20_000),
}


def power_law(name: str, shape: Shape, seed: int, count: int | None = None) -> Source:
    """Rows of unit length whose features follow a power law; 10 % of the labels are random."""
    draws, power = _draws(shape), 1 - shape.exponent
    first, last = _FLAT**power, (shape.size + _FLAT) ** power
    weights = np.random.default_rng([seed, 0]).standard_normal(shape.size, np.float32)

    def block(number: int) -> tuple[csr_matrix, np.ndarray]:
        random = np.random.default_rng([seed, 1, number])
        lengths = (random.uniform(2 / 3, 4 / 3, _BLOCK) * draws).astype(np.int64)
        row = np.repeat(np.arange(_BLOCK), np.maximum(1, lengths))
        # Draws from the power law, by the inverse of its distribution function.
        drawn = (first + random.random(len(row)) * (last - first)) ** (1 / power) - _FLAT
        ranks = np.clip(drawn.astype(np.int64), 0, shape.size - 1)
        keys = np.unique(row * shape.size + ranks)
        row, feature = np.divmod(keys, shape.size)
        values = random.uniform(0.5, 1.5, len(keys)).astype(np.float32)
        starts = np.searchsorted(row, np.arange(_BLOCK + 1))
        matrix = csr_matrix((values, feature.astype(np.int32), starts), (_BLOCK, shape.size))
        norms = np.sqrt(np.add.reduceat(values**2, starts[:-1], dtype=np.float64))
        matrix.data /= np.repeat(norms, np.diff(starts)).astype(np.float32)
        labels = np.where(matrix @ weights > 0, 1, -1).astype(np.float32)
        noisy = random.random(_BLOCK) < 0.1
        labels[noisy] = random.choice(np.array([-1, 1], np.float32), noisy.sum())
        return matrix, labels

    def rows(start: int, stop: int) -> tuple[csr_matrix, np.ndarray]:
        low = start // _BLOCK
        matrices, labels = zip(*map(block, range(low, max(low + 1, -(-stop // _BLOCK)))))
        part = slice(start - low * _BLOCK, stop - low * _BLOCK)
        return sparse.vstack(matrices, format="csr")[part], np.concatenate(labels)[part]

    return Source(name, shape.size, count or shape.rows, rows)


def _draws(shape: Shape) -> float:
    """The number of draws with replacement that give ``nonzeros`` distinct features on average."""
    # Ranks between two edges are taken as equally common.
    edges = np.unique(np.geomspace(1, shape.size + 1, 4000).astype(np.int64)) - 1
    shares = (edges + _FLAT) ** (1 - shape.exponent)
    widths = np.diff(edges)
    one = np.diff(shares) / (shares[-1] - shares[0]) / widths
    low, high = 0.0, 1e3 * shape.nonzeros
    for _ in range(60):
        middle = (low + high) / 2
        different = -(widths * np.expm1(middle * np.log1p(-one))).sum()
        low, high = (middle, high) if different < shape.nonzeros else (low, middle)
    return high
