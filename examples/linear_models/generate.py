"""Generated rows with the shape of large text data: many features, of which few are common."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from .data import Source

# Rows that have a generator of their own: a process makes only the blocks that it needs.
_BLOCK = 250
# Ranks below it are about equally common, as the first words of a text are.
_FLAT = 10.0


class Shape(NamedTuple):
    """What a data set looks like.

    Attributes:
      size: n, features.
      nonzeros: of a row in the mean.
      rows: how many there are by default.
      exponent: of the power law: the feature of rank r has a share of about ``r ** -exponent``.
    """

    size: int
    nonzeros: int
    rows: int
    exponent: float


# Table 1 of SparCML: URL has 2,396,130 rows, Webspam 350,000; fewer fit into memory.
SHAPES = {
    "small": Shape(size=20_000, nonzeros=30, rows=8_000, exponent=1.1),
    "url": Shape(size=3_231_961, nonzeros=115, rows=200_000, exponent=1.1),
    "webspam": Shape(size=16_609_143, nonzeros=3_700, rows=20_000, exponent=1.1),
}


def power_law(name: str, shape: Shape, seed: int) -> Source:
    """Rows of unit length whose features follow a power law, and labels of a noisy linear rule.

    Args:
      name: for titles.
      shape: of the data.
      seed: of everything.

    Returns:
      A :class:`Source`. Feature 0 is the most common one. A row has ``nonzeros`` features in the
      mean, give or take a third; its values are positive and differ by small factors. A tenth of
      the labels are random.
    """
    draws = _draws(shape)
    weights = np.random.default_rng([seed, 0]).standard_normal(shape.size, np.float32)

    def block(number: int) -> tuple[csr_matrix, np.ndarray]:
        random = np.random.default_rng([seed, 1, number])
        lengths = random.uniform(2 / 3, 4 / 3, _BLOCK) * draws
        lengths = np.maximum(1, lengths.astype(np.int64))
        row = np.repeat(np.arange(_BLOCK), lengths)
        keys = np.unique(row * shape.size + _ranks(random, len(row), shape))
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
        parts = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            matrix, labels = block(number)
            low, high = (min(max(x - number * _BLOCK, 0), _BLOCK) for x in (start, stop))
            parts.append((matrix[low:high], labels[low:high]))
        matrices, labels = zip(*parts, strict=True)
        return _stacked(matrices), np.concatenate(labels)

    return Source(name, shape.size, shape.rows, rows)


def _draws(shape: Shape) -> float:
    """How many draws with replacement have ``nonzeros`` different features in the mean."""
    # Ranks between two edges are taken as equally common.
    edges = np.unique(np.geomspace(1, shape.size + 1, 4000).astype(np.int64)) - 1
    power = 1 - shape.exponent
    shares = (edges + _FLAT) ** power
    widths = np.diff(edges)
    one = np.diff(shares) / (shares[-1] - shares[0]) / widths

    low, high = 0.0, 1e3 * shape.nonzeros
    for _ in range(60):
        middle = (low + high) / 2
        different = -(widths * np.expm1(middle * np.log1p(-one))).sum()
        low, high = (middle, high) if different < shape.nonzeros else (low, middle)
    return high


def _ranks(random: np.random.Generator, count: int, shape: Shape) -> np.ndarray:
    """Draws from a power law over ``[0, n)``, by the inverse of its distribution function."""
    power = 1 - shape.exponent
    first, last = _FLAT**power, (shape.size + _FLAT) ** power
    drawn = (first + random.random(count) * (last - first)) ** (1 / power) - _FLAT
    return np.clip(drawn.astype(np.int64), 0, shape.size - 1)


def _stacked(matrices: tuple[csr_matrix, ...]) -> csr_matrix:
    # scipy's vstack converts; here all parts are alike.
    lengths = np.concatenate([np.diff(matrix.indptr) for matrix in matrices])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    data = np.concatenate([matrix.data for matrix in matrices])
    indices = np.concatenate([matrix.indices for matrix in matrices])
    return csr_matrix((data, indices, starts), (len(lengths), matrices[0].shape[1]))
