"""A matrix by columns, and loops over the nonzeros of some of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.sparse import csr_matrix

# Nonzeros of one turn of a loop: columns of a power law have one, or as many as there are rows.
_CHUNK = 4096


class Columns(NamedTuple):
    """A matrix ``[N, n]`` in CSC form.

    Attributes:
      starts: ``i32[n + 1]``, where each column begins.
      rows: ``i32[nnz]``.
      values: ``f32[nnz]``.
    """

    starts: jax.Array
    rows: jax.Array
    values: jax.Array


def of_matrix(matrix: csr_matrix) -> Columns:
    """The columns of a matrix with fewer than 2^31 nonzeros, as NumPy arrays."""
    columns = matrix.tocsc()
    return Columns(columns.indptr.astype(np.int32), columns.indices.astype(np.int32), columns.data)


def fold(
    columns: Columns,
    picked: jax.Array,
    body: Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], Any],
    carry: Any,
) -> Any:
    """Carries a value through the nonzeros of some columns.

    Args:
      columns: the matrix.
      picked: ``i32[k]``, columns; n where there is none.
      body: ``body(carry, slot i32[m], row i32[m], value f32[m], at i32[m]) -> carry``, called with
        m nonzeros at a time: the place of the column in ``picked``, the row, the value, and the
        number of the nonzero among all. Slots of padding are k, and rows past the last one.
      carry: to begin with.

    Cost: O(nonzeros of the picked columns), to a multiple of 4096.
    """
    last = columns.starts.shape[0] - 1
    first = columns.starts[jnp.minimum(picked, last)]
    lengths = columns.starts[jnp.minimum(picked + 1, last)] - first
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    # The nonzero number p of all is number p + shift of the matrix.
    shift = first - (ends - lengths)

    def turn(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, carry = state
        place = start + jnp.arange(_CHUNK, dtype=jnp.int32)
        slot = jnp.searchsorted(ends, place, side="right").astype(jnp.int32)
        there = place < ends[-1]
        at = jnp.where(there, place + shift.at[slot].get(mode="clip"), columns.rows.shape[0])
        row = columns.rows.at[at].get(mode="fill", fill_value=jnp.iinfo(jnp.int32).max)
        value = columns.values.at[at].get(mode="fill", fill_value=0)
        return start + _CHUNK, body(carry, slot, row, value, place)

    return lax.while_loop(lambda state: state[0] < ends[-1], turn, (jnp.int32(0), carry))[1]
