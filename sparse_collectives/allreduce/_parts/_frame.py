"""The frame of an allreduce: its state counts steps, and its sums stay in a range.

Each worker sends at most its share of the range of the dtype of an entry, and keeps the
rest for the next step. Then no sum of entries of P workers can overflow, in whatever
order and in however many parts it is made. Nothing has to be checked on the way, no
infinite partial sum can end in a residual, and the same holds for a ``psum``.

The share is a power of two. So the sent and the kept part are exact, and add up to
the entry. Only magnitudes above 1.7e38 / P are cut (float32 and bfloat16; float16:
32,768 / P; float64: 9e307 / P). They are on their way to an overflow in any case, and
are delivered over several steps. Infinities and NaN are sent unchanged, to be seen.

This is about one exchange. If a worker may have to keep a part of such a sum in addition to its own
entries (``SparseAllreduce.may_keep_partial_sums``), both together may be too large, and the caller
has to prevent that: ``optax_ext`` accepts no gradient that is within 2^25 of an overflow.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import _validation, transport
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._types import AxisName, State
from sparse_collectives.allreduce._parts import _replicas

# Rounding to a level of a coarse code can make a value larger: with ``qsgd(bits=2,
# norm="l2")`` by the square root of its bucket's length, each time that it is encoded.
_LOSSY_MARGIN = 16


class StepState(NamedTuple):
    """State of an allreduce whose waiting entries and rounding vary from step to step.

    Attributes:
      count: ``i32[]``, steps taken; the same on every worker.
    """

    count: jax.Array


def init(layout: int | Layout, axis_size: int) -> StepState:
    """The state before the first step, for n components and P workers."""
    without_state(layout, axis_size)
    return StepState(count=jnp.zeros((), jnp.int32))


def without_state(layout: int | Layout, axis_size: int) -> tuple[()]:
    """The ``init`` of an allreduce without state, for n components and P workers."""
    as_layout(layout)
    _validation.check_positive_int("axis_size", axis_size)
    return ()


def check_selection(
    coo: PaddedCOO, acc: jax.Array | None, *, float64: bool = False, derivative: bool = False
) -> PaddedCOO:
    """What ``reduce`` takes: a selection, and the accumulator that it is from, if any.

    Without ``derivative`` it cannot be differentiated.
    """
    _validation.check_float("coo.values", coo.values.dtype, float64=float64)
    if coo.size and not coo.capacity:
        raise ValueError(
            f"coo has no slots, of a vector of {coo.size} entries. Give it at least one: padding "
            "has the index coo.size and the value 0."
        )
    if acc is not None and acc.shape != (coo.size,):
        raise ValueError(
            f"acc has shape {acc.shape}, and coo is a selection from {coo.size} entries. Give the "
            "accumulator that it was selected from."
        )
    return coo if derivative else _validation.without_derivative(coo)


def counted(
    *, exact: bool = True, float64: bool = False, adds: bool = True, dense: bool = False
) -> Callable[[Callable], Callable]:
    """A decorator that makes ``reduce`` of an exchange of two or more workers.

    The exchange is ``exchange(coo, count, *, axis, ...) -> (total, undelivered, info)``, with the
    steps taken, ``i32[]``, instead of the state. The total of a single worker is its selection.

    Args:
      exact: as for :func:`sums_in_range`.
      float64: likewise.
      adds: whether sums are made of the entries of ``coo``, which are then cut to their share.
      dense: whether the total is ``f[n]``.
    """

    def decorate(exchange: Callable) -> Callable:
        @functools.wraps(exchange)
        def reduce(coo: PaddedCOO, state: StepState, *, axis: AxisName, **options: Any):
            if not adds:
                coo = check_selection(coo, options.get("acc"), float64=float64)
            following = StepState(state.count + 1)
            if transport.axis_size(axis) > 1:
                total, undelivered, info = exchange(coo, state.count, axis=axis, **options)
            else:
                total, undelivered, info = _replicas.of_one_worker(coo, axis)
                total = total.to_dense() if dense else total
            return total, undelivered, following, info

        return sums_in_range(exact=exact, float64=float64)(reduce) if adds else reduce

    return decorate


def sums_in_range(
    *, exact: bool = True, float64: bool = False, derivative: bool = False
) -> Callable[[Callable], Callable]:
    """A decorator for ``reduce`` of an allreduce that adds: it cuts entries to their share.

    The parts that are cut off are in ``undelivered``. Cost: a few operations for each slot.
    A single worker adds nothing, and its entries are not cut.

    Args:
      exact: as in :func:`largest_share`.
      float64: whether ``reduce`` keeps values of 64 bits exact.
      derivative: whether it can be differentiated.

    Raises:
      TypeError: at ``reduce``, values of another dtype.
    """

    def decorate(reduce: Callable) -> Callable:
        @functools.wraps(reduce)
        def cut_and_reduce(coo: PaddedCOO, state: State, *, axis: AxisName, **options: Any):
            coo = check_selection(coo, options.get("acc"), float64=float64, derivative=derivative)
            dtype, workers = coo.values.dtype, transport.axis_size(axis)
            if workers == 1:
                return reduce(coo, state, axis=axis, **options)
            share = np.asarray(largest_share(dtype, workers, exact=exact), dtype)
            too_large = _exceeds(coo.values, share)
            cut = jnp.copysign(share, coo.values)
            sent = jnp.where(too_large, cut, coo.values)
            rest = jnp.where(too_large, coo.values - sent, 0)
            total, undelivered, state, info = reduce(
                PaddedCOO(sent, coo.indices, coo.size), state, axis=axis, **options
            )
            # Added only to slots that were cut: an addition flushes subnormals on some platforms.
            slots = jnp.where(too_large, undelivered.slots + rest, undelivered.slots)
            return total, undelivered._replace(slots=slots), state, info

        return cut_and_reduce

    return decorate


def largest_share(dtype, workers: int, *, exact: bool = True) -> float:
    """The largest magnitude that each of P workers may add to a sum, a power of two.

    P of them add up to at most half of the largest finite number.

    Args:
      dtype: of the values.
      workers: P.
      exact: whether the values arrive as they were sent. If not, the share is 2^16 times smaller,
        except in float16, which does not have that much range.
    """
    highest = int(jnp.finfo(dtype).maxexp) - 1
    if not exact and jnp.finfo(dtype).maxexp > 2 * _LOSSY_MARGIN:
        highest -= _LOSSY_MARGIN
    return 2.0 ** (highest - (workers - 1).bit_length())


def within_range(values: jax.Array, workers: int) -> jax.Array:
    """Each value, cut to the share of its dtype's range that one of P workers may send."""
    if workers == 1:
        return values
    share = jnp.asarray(largest_share(values.dtype, workers), values.dtype)
    # Values that are not finite stay as they are, to be seen.
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -share, share), values)


def _exceeds(values: jax.Array, share: np.ndarray) -> jax.Array:
    if values.dtype == jnp.float64:
        return (jnp.abs(values) > share) & jnp.isfinite(values)
    bits = _bits.magnitude_bits(values)
    most = int(share.astype(np.float32).view(np.int32))
    return (bits > most) & (bits < _bits.INFINITY_BITS)
