"""What is around the sums of a step: a state that counts it, and a range that they stay in.

Each worker sends of an entry at most its share of the range of the dtype, and keeps the
rest for the next step. No sum of what P workers send can then overflow, in whatever
order and in however many parts it is made: nothing has to be checked on the way, no
partial sum that is infinite can end in a residual, and it holds for a ``psum`` too.

The share is a power of two. So what is sent and what is kept are exact, and add up to
what there was. Only magnitudes above 1.7e38 / P are cut (float32 and bfloat16; float16:
32768 / P; float64: 9e307 / P), which are on their way to an overflow in any case; they
are delivered over several steps. Infinities and NaN are sent as they are, to be seen.

It is about one exchange. Where a worker may be left with a part of such a sum, beside what it
keeps of its own (``SparseAllreduce.keeps_others``), both together may be too large, and whoever
keeps them has to see to that: ``optax_ext`` takes no gradient that is within 2^25 of an overflow.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import _hash, _validation, transport
from sparse_collectives._coo import _bits
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName, State

# Rounding to a level of a coarse code can make a value larger: with ``qsgd(bits=2,
# norm="l2")`` by the square root of its bucket, each time that it is encoded.
_LOSSY_MARGIN = 16


class StepState(NamedTuple):
    """State of an allreduce that varies from step to step what waits and how it rounds.

    Attributes:
      count: ``i32[]``, steps taken; the same on every worker.
    """

    count: jax.Array


def init(size: int, axis_size: int) -> StepState:
    """The state before the first step, for n components and P workers."""
    without_state(size, axis_size)
    return StepState(count=jnp.zeros((), jnp.int32))


def without_state(size: int, axis_size: int) -> tuple[()]:
    """The ``init`` of an allreduce for n components and P workers that has nothing to keep."""
    _validation.check_size(size)
    _validation.check_positive_int("axis_size", axis_size)
    return ()


def turn(count: jax.Array, stage: int) -> jax.Array:
    """Which entries wait, in a stage of step ``count i32[]``: ``u32[]``, for windows.

    Unlike any seed, and another one for each stage: a window that depended on the one
    before it, or on what a codec leaves out, could leave out the same entry for ever.
    The same on every worker, so that of an index that all have all parts go together.
    """
    return _hash.combine(count, stage, -1)


def seed(count: jax.Array, stage: int, sender: jax.Array | int) -> jax.Array:
    """The seed of a message, ``u32[]``: another one for each step, stage and sender.

    Errors of different workers and steps don't add up if they are independent. Replicas that
    encode the same sum pass the same ``sender``, so that they send the same bits.
    """
    return _hash.combine(count, stage, sender)


def largest_share(dtype, workers: int, *, exact: bool = True) -> float:
    """The largest magnitude that each of P workers may add to a sum, a power of two.

    P of them make at most half of the largest finite number.

    Args:
      dtype: of the values.
      workers: P.
      exact: whether the values arrive as they were sent. If not, a 2^16th of it, except
        in float16, which does not have that much room to give away.
    """
    highest = int(jnp.finfo(dtype).maxexp) - 1
    if not exact and jnp.finfo(dtype).maxexp > 2 * _LOSSY_MARGIN:
        highest -= _LOSSY_MARGIN
    return 2.0 ** (highest - (workers - 1).bit_length())


def sums_in_range(*, exact: bool = True, float64: bool = False) -> Callable[[Callable], Callable]:
    """A decorator for ``reduce`` of an allreduce that adds: entries are cut to their share.

    What is cut off is in ``undelivered``. Cost: a few operations for each slot. One
    worker adds nothing, and its entries are left alone.

    Args:
      exact: as of :func:`largest_share`.
      float64: whether all that ``reduce`` does keeps values of 64 bits whole.

    Raises:
      TypeError: at ``reduce``, values of another dtype.
    """

    def decorate(reduce: Callable) -> Callable:
        @functools.wraps(reduce)
        def cut_and_reduce(coo: PaddedCOO, state: State, *, axis: AxisName, **options: Any):
            dtype = coo.values.dtype
            _validation.check_float("coo.values", dtype, float64=float64)
            workers = transport.axis_size(axis)
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
            # Not a sum for all slots: it would flush subnormals on some platforms.
            slots = jnp.where(too_large, undelivered.slots + rest, undelivered.slots)
            return total, undelivered._replace(slots=slots), state, info

        return cut_and_reduce

    return decorate


def _exceeds(values: jax.Array, share: np.ndarray) -> jax.Array:
    """Where finite magnitudes are above ``share``."""
    if values.dtype == jnp.float64:
        return (jnp.abs(values) > share) & jnp.isfinite(values)
    bits = _bits.magnitude_bits(values)
    most = int(share.astype(np.float32).view(np.int32))
    return (bits > most) & (bits < _bits.INFINITY_BITS)
