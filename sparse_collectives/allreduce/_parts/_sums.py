"""Full sums: the values of all workers at an index that any of them selected.

Every worker has the same indices. Each adds all its values there, and keeps only what rounding or
clipping removed.

Values are added unchanged, or as numbers of a few bits, whose sums are exact in any order and
with any collective that adds integers. All workers round them to multiples of one step, a power
of two on which they have agreed for each bucket of values. A field of b bits holds the sum of P of
them: each worker adds an integer in [0, 2h] with h = (2**b - 1) // (2 P), which stands for one in
[-h, h]. Fields never carry into each other, so that several make one word, and a psum of words
adds them all up. A worker can compute exactly what rounding and clipping took off its values, and
no other worker rounds anything on the way.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits, _bitset
from sparse_collectives._types import AxisName, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.transport import _dispatch

# Values that share a step, which is sent as one word.
BUCKET = 256
_MANTISSA_BITS = 23
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1, 254
_SMALLEST_NORMAL = _SMALLEST_EXPONENT << _MANTISSA_BITS


def sum_at(
    indices: jax.Array,
    acc: jax.Array | None,
    coo: PaddedCOO,
    axis: AxisName,
    step: jax.Array | None = None,
    bits: int = 32,
    gives: jax.Array | None = None,
) -> tuple[PaddedCOO, Undelivered]:
    """One psum of the values of all workers at ``indices``.

    Args:
      indices: ``i32[K]``, the same on every worker, unique but for padding.
      acc: ``f[n]``, the values of this worker. None: only its selection, and it neither
        contributes nor clears any other entry.
      coo: its selection.
      axis: the workers.
      step: ``f32[K]``, the same on every worker: values are sent as multiples of it. None:
        unchanged.
      bits: bits of a value, with a step.
      gives: ``bool[]``, whether this worker contributes anything; None: it does.

    Returns:
      The total, in the order of the indices and the same on every worker, and what this worker
      keeps.
    """
    workers, size = transport.axis_size(axis), coo.size
    held = _validation.without_derivative(coo.to_dense() if acc is None else acc)
    # Unsigned, because jax tests for each signed index whether it counts from the end.
    mine = held.at[indices.astype(jnp.uint32)].get(mode="fill", fill_value=0)
    if gives is not None:
        mine = jnp.where(gives, mine, 0)
    sent = _frame.within_range(mine, workers)
    if step is None:
        total = transport.psum(sent.astype(jnp.float32), axis)
        kept = jnp.where(sent == mine, 0, mine - sent)
    else:
        largest = half(bits, workers)
        whole = rounded(sent, step, largest)
        words = transport.psum(pack(whole, largest, bits), axis)
        sums = unpack(words, indices.shape[0], largest, bits, workers)
        total = sums.astype(jnp.float32) * step
        # These are whole multiples of a step, of which float32 has all bits.
        kept = mine.astype(jnp.float32) - whole.astype(jnp.float32) * step
    # A sum that is not finite reaches all workers, and no worker keeps it.
    kept = jnp.where(jnp.isfinite(total), kept, 0).astype(coo.values.dtype)
    total = jnp.where(indices < size, total, 0).astype(coo.values.dtype)
    cleared = indices
    if acc is None:
        selected = _bitset.insert(_bitset.empty(size), coo.indices, size)
        cleared = jnp.where(_bitset.contains(selected, indices), indices, size)
    if gives is not None:
        cleared = jnp.where(gives, cleared, size)
    undelivered = Undelivered.of(coo, coo.values)
    undelivered = undelivered._replace(rest_at_total=PaddedCOO(kept, cleared, size))
    return PaddedCOO(total, indices, size), undelivered


def sum_words(slots: int, workers: int, bits: int) -> float:
    """Words that :func:`sum_at` makes each worker receive."""
    return _dispatch.words_of_all_reduce(-(-slots // (32 // bits)), workers)


def half(bits: int, workers: int) -> int:
    """The largest integer h of one worker in a field of so many bits; 0 if there is none."""
    return ((1 << bits) - 1) // (2 * workers)


def buckets(slots: int) -> int:
    """The number of steps for so many values."""
    return -(-slots // BUCKET)


def steps(values: jax.Array, largest: int, turn: jax.Array) -> jax.Array:
    """``f32[buckets]``: a power of two for each bucket, of which values are sent as multiples.

    It is the smallest one of which ``largest`` multiples reach the largest magnitude of the bucket.
    Every other step, as a hash of the turn decides, the scale is chosen for a random smaller
    magnitude instead, so that small values are not always rounded to 0: a magnitude is drawn from
    the range of the values that would be, uniformly in its logarithm, and larger values are cut. A
    value is suited with probability s / 2 at a turn, with s the share of the range between it and
    the next larger one.

    The step is not finite for a bucket with a value that is not finite.

    Args:
      values: ``f[c]``.
      largest: h, the largest integer of one worker.
      turn: ``u32[]``, another one at each step.
    """
    bits = _bits.magnitude_bits(_bits.pad_to(values.astype(jnp.float32), BUCKET))
    bits = bits.reshape(-1, BUCKET)
    most = jnp.max(bits, axis=1)
    step = _step_of(most, largest)
    # Half a step rounds to 0, and subnormal values are never sent.
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
    """The smallest power of two of which ``largest`` multiples reach the pattern ``most``."""
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

    0 for a quotient that is not a number: then the step is not one either, or the value waits.
    """
    # The step is a power of two, so the quotient is exact unless it is extreme and clipped or 0.
    multiple = jnp.clip(jnp.round(values.astype(jnp.float32) / step), -largest, largest)
    return jnp.where(jnp.isnan(multiple), 0, multiple).astype(jnp.int32)


def pack(integers: jax.Array, largest: int, bits: int) -> jax.Array:
    """Packs ``i32[c]`` in [-largest, largest] into words that can be added up."""
    return _bits.pack(integers + largest, bits)


def unpack(words: jax.Array, slots: int, largest: int, bits: int, workers: int) -> jax.Array:
    """The sums ``i32[slots]`` of the integers of all workers."""
    return _bits.unpack(words, bits)[:slots] - workers * largest
