"""Which leaves are exchanged as products of two thin matrices, and as which matrices."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext._error_feedback._layout import TreeLayout


class Matrix(NamedTuple):
    """A leaf of the buffer as a matrix.

    Attributes:
      start: its offset in the buffer.
      rows: the product of the first dimensions of the leaf.
      cols: the product of the other dimensions.
    """

    start: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        """Its entries."""
        return self.rows * self.cols

    def of(self, buffer: jax.Array) -> jax.Array:
        """Its entries ``f32[rows, cols]`` in a buffer ``f32[n]``."""
        return buffer[self.start : self.start + self.size].reshape(self.rows, self.cols)


def matrices_of(layout: TreeLayout) -> list[Matrix]:
    """The leaves that do not go dense, in the order of the buffer."""
    found, start = [], 0
    for shape, dense in zip(layout.shapes, layout.dense, strict=True):
        if dense:
            continue
        rows, cols = sides(shape)
        found.append(Matrix(start, rows, cols))
        start += rows * cols
    return found


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf of this shape, whose dimensions are cut in two.

    The cut makes the sum of the two sides smallest, and with it the words of their factors. A
    convolution ``(h, w, in, out)`` is ``(h w in, out)``, and a projection ``(d, heads, head)`` is
    ``(d, heads head)``. A matrix is itself; a vector is a single row.
    """
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(len(shape))]
    return min(cuts, key=sum, default=(1, 1))


def largest_rank(shape: tuple[int, ...]) -> int:
    """The largest rank r with fewer words than the leaf, ``r (rows + cols) < rows cols``."""
    rows, cols = sides(shape)
    return (rows * cols - 1) // (rows + cols) if rows * cols else 0


def dense_leaves(params: Any, labels: tuple[bool, ...] | None, rank: int) -> tuple[bool, ...]:
    """Which leaves go dense: those labeled dense, and those that the rank makes no smaller.

    Raises:
      ValueError: the rank makes no leaf smaller, although a lower rank would.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    labelled = labels or (False,) * len(leaves)
    most = {
        jax.tree_util.keystr(path): largest_rank(jnp.shape(leaf))
        for (path, leaf), dense in zip(leaves, labelled, strict=True)
        if not dense
    }
    best = max(most, key=lambda name: most[name], default="")
    if best and rank > most[best] > 0:
        rows, cols = {jax.tree_util.keystr(path): sides(jnp.shape(leaf)) for path, leaf in leaves}[
            best
        ]
        raise ValueError(
            f"rank={rank} makes no leaf of params smaller: two factors of params{best}, a matrix "
            f"of {rows} x {cols}, have rank * ({rows} + {cols}) entries. Give a rank of at most "
            f"{most[best]} (1 to 8 is usual), or use optax_ext.dense(axis=...)."
        )
    return tuple(
        dense or rank > largest_rank(jnp.shape(leaf))
        for (_, leaf), dense in zip(leaves, labelled, strict=True)
    )
