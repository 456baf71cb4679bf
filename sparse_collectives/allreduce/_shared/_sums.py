"""Complete sums: what all workers have of an index that any of them selected.

Every worker knows the same indices. Each adds all that it has there, and keeps nothing
but what rounding, or a cut to its share of the range, took off.

Values are added as they are, or as numbers of a few bits, whose sums are exact in any order and
with any collective that adds integers. All workers round them to multiples of one step, a power
of two that they have agreed on for each bucket of values. A field of b bits holds the sum of P of
them: each worker adds an integer in [0, 2h] with h = (2**b - 1) // 2P, which stands for one in
[-h, h]. Fields never carry into each other, so that several make one word, and a psum of words
adds them all up. A worker knows by itself what rounding and clipping took off its values, to the
last bit, and nobody rounds anything on the way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, transport
from sparse_collectives._coo import _bits, _bitset
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName, Undelivered
from sparse_collectives.allreduce._shared import _messages, _reduce
from sparse_collectives.transport import _dispatch

# Values that share a step, which is sent as one word.
BUCKET = 256
_MANTISSA_BITS = 23
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1, 254
_SMALLEST_NORMAL = _SMALLEST_EXPONENT << _MANTISSA_BITS


class Complete(NamedTuple):
    """The sums at some indices.

    Attributes:
      total: a PaddedCOO in the order of the indices, the same on every worker.
      undelivered: what this worker keeps.
    """

    total: PaddedCOO
    undelivered: Undelivered


def within_range(values: jax.Array, workers: int) -> jax.Array:
    """Each value, cut to the share of its dtype's range that one of P workers may send."""
    if workers == 1:
        return values
    share = jnp.asarray(_reduce.largest_share(values.dtype, workers), values.dtype)
    # What is not finite is seen as it is.
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -share, share), values)


def sum_at(
    indices: jax.Array,
    acc: jax.Array | None,
    coo: PaddedCOO,
    axis: AxisName,
    step: jax.Array | None = None,
    bits: int = 32,
    gives: jax.Array | None = None,
) -> Complete:
    """One psum of what all workers have at ``indices``.

    Args:
      indices: ``i32[K]``, the same on every worker, unique but for padding.
      acc: ``f[n]``, what this worker has; None: what it has selected, and nothing else is
        its own to give or to clear.
      coo: its selection.
      axis: the workers.
      step: ``f32[K]``, the same on every worker: values are sent as multiples of it. None: as
        they are.
      bits: of a value, with a step.
      gives: ``bool[]``, whether this worker gives anything; None: it does.
    """
    workers, size = transport.axis_size(axis), coo.size
    held = coo.to_dense() if acc is None else acc
    # Unsigned: else jax asks of each index whether it counts from the end.
    mine = held.at[indices.astype(jnp.uint32)].get(mode="fill", fill_value=0)
    if gives is not None:
        mine = jnp.where(gives, mine, 0)
    sent = within_range(mine, workers)
    if step is None:
        total = transport.psum(sent.astype(jnp.float32), axis)
        kept = jnp.where(sent == mine, 0, mine - sent)
    else:
        largest = half(bits, workers)
        whole = rounded(sent, step, largest)
        words = pack(whole, largest, bits)
        words = transport.psum(words, axis)
        sums = unpack(words, indices.shape[0], largest, bits, workers)
        total = sums.astype(jnp.float32) * step
        # Whole multiples of a step, which float32 has all the bits of.
        kept = mine.astype(jnp.float32) - whole.astype(jnp.float32) * step
    # What is not finite reaches everyone, and nobody keeps it.
    kept = jnp.where(jnp.isfinite(total), kept, 0).astype(coo.values.dtype)
    total = jnp.where(indices < size, total, 0).astype(coo.values.dtype)
    cleared = indices
    if acc is None:
        selected = _bitset.insert(_bitset.empty(size), coo.indices, size)
        cleared = jnp.where(_bitset.contains(selected, indices), indices, size)
    if gives is not None:
        cleared = jnp.where(gives, cleared, size)
    undelivered = _messages.of_slots(coo, coo.values)
    return Complete(
        PaddedCOO(total, indices, size),
        undelivered._replace(remainder=PaddedCOO(kept, cleared, size)),
    )


def sum_words(slots: int, workers: int, bits: int) -> float:
    """Words that :func:`sum_at` makes each worker receive."""
    return _dispatch.words_of_all_reduce(-(-slots // (32 // bits)), workers)


def half(bits: int, workers: int) -> int:
    """The largest integer h of one worker in a field of so many bits; 0 where there is none."""
    return ((1 << bits) - 1) // (2 * workers)


def buckets(slots: int) -> int:
    """Steps of so many values."""
    return -(-slots // BUCKET)


def steps(values: jax.Array, largest: int, turn: jax.Array) -> jax.Array:
    """``f32[buckets]``: a power of two for each bucket, of which values are sent as multiples.

    It is the smallest of which ``largest`` are the largest magnitude of the bucket. Where that
    would round other values to 0, it is at every other turn, as a hash of the turn decides, one
    that suits some of these: a magnitude is drawn from their range, uniformly in its logarithm,
    and the step is made for the largest of them up to it. What is larger is cut at these turns, and
    waits. So a value that is far below the others of its bucket does not wait until it has grown
    to their size, and has probability s / 2 at a turn, with s the share of the range between
    it and the next larger one.

    Not finite for a bucket in which a value isn't.

    Args:
      values: ``f[c]``.
      largest: h, the largest integer of one worker.
      turn: ``u32[]``, another one at each step.
    """
    bits = _bits.magnitude_bits(_bits.pad_to(values.astype(jnp.float32), BUCKET))
    bits = bits.reshape(-1, BUCKET)
    most = jnp.max(bits, axis=1)
    step = _step_of(most, largest)
    # Half a step rounds to 0, and what is subnormal is never sent.
    top = _bits.magnitude_bits(step) - (1 << _MANTISSA_BITS)
    lost = (bits <= top[:, None]) & (bits >= _SMALLEST_NORMAL)
    least = jnp.min(jnp.where(lost, bits, _bits.INFINITY_BITS), axis=1)
    draw = _hash.random_bits(turn, jnp.arange(bits.shape[0], dtype=jnp.int32))
    # Patterns of magnitudes are nearly their logarithms.
    width = jnp.maximum(top - least, 0) + 1
    drawn = least + ((draw >> 1) % width.astype(jnp.uint32)).astype(jnp.int32)
    suited = jnp.max(jnp.where(lost & (bits <= drawn[:, None]), bits, 0), axis=1)
    for_small = (suited > 0) & ((draw & 1) == 0)
    step = jnp.where(for_small, _step_of(suited, largest), step)
    return jnp.where(most < _bits.INFINITY_BITS, step, jnp.nan)


def _step_of(most: jax.Array, largest: int) -> jax.Array:
    """The smallest power of two of which ``largest`` are the magnitude of the pattern ``most``."""
    bits = _bits.magnitude_bits(_bits.magnitude_from_bits(most) / largest)
    up = (bits & ((1 << _MANTISSA_BITS) - 1)) > 0
    exponent = (bits >> _MANTISSA_BITS) + up.astype(jnp.int32)
    exponent = jnp.clip(exponent, _SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    return _bits.magnitude_from_bits(exponent << _MANTISSA_BITS)


def of_slots(step: jax.Array, slots: int) -> jax.Array:
    """The step of each of ``slots`` values, ``f32[..., slots]``."""
    return jnp.repeat(step, BUCKET, axis=-1)[..., :slots]


def rounded(values: jax.Array, step: jax.Array, largest: int) -> jax.Array:
    """The integers ``i32[...]`` in [-largest, largest] nearest to ``values / step``.

    0 where that is not a number; the step is then no number either, or the value waits.
    """
    # A power of two: the quotient is exact, unless it is too large or too small to matter.
    multiple = jnp.clip(jnp.round(values.astype(jnp.float32) / step), -largest, largest)
    return jnp.where(jnp.isnan(multiple), 0, multiple).astype(jnp.int32)


def pack(integers: jax.Array, largest: int, bits: int) -> jax.Array:
    """``i32[c]`` in [-largest, largest] as words to be added up."""
    return _bits.pack(integers + largest, bits)


def unpack(words: jax.Array, slots: int, largest: int, bits: int, workers: int) -> jax.Array:
    """The sums ``i32[slots]`` of the integers of all workers."""
    return _bits.unpack(words, bits)[:slots] - workers * largest
