"""Indices as gaps of few bits, with escapes for longer gaps.

A row of entries becomes a row of slots. A slot holds an entry, with the gap from
the previous entry, or an escape, which only moves on. The slots of an entry with a
long gap are its escapes, one digit of the gap each, followed by the entry itself.
The first index of a row is stored outside the slots, so that it needs no escape.

With codes 0 to ``base - 1`` for gaps and ``base`` upward for escapes, an entry at
gap ``g = r + base * q`` has the code r, and escape number j, with the code
``base + j``, holds digit j of q (in ``digit_bits`` bits). Gaps are taken modulo
2**31, so an index may also be smaller than the previous one. One more escape, with the
code ``base + digits`` and nothing to move on by, may mark the entry in the next slot.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import Encoded

_MODULUS_MASK = 0x7FFFFFFF


class GapFormat(NamedTuple):
    """How gaps are written.

    Attributes:
      base: the codes below it are gaps.
      digit_bits: the bits of a gap that an escape holds.
      digits: the number of escapes of the longest gap.
    """

    base: int
    digit_bits: int
    digits: int

    def escape_slots(self, entries: int, size: int, share: float) -> int:
        """Slots to reserve for escapes.

        Args:
          entries: slots of the rows to encode.
          size: n; the gaps of an ascending row add up to less.
          share: the slots as a share of ``entries``; a few more are added, which
            matter for short rows.
        """
        most = self.digits * max(0, entries - 1)
        ascending = self.digits * (1 + size // self.base)
        return min(most, ascending, round(share * entries) + 2 * self.digits)

    def escapes(self, gap: jax.Array) -> jax.Array:
        """How many escapes a gap (``i32``) needs."""
        rest = gap // self.base
        count = jnp.zeros_like(gap)
        for digit in range(self.digits):
            count = count + ((rest >> (self.digit_bits * digit)) > 0).astype(count.dtype)
        return count


class Slots(NamedTuple):
    """Rows of entries, laid out in slots.

    Attributes:
      first: ``i32[r]``, the index that the first gap starts from.
      code: ``i32[r, w]``, a gap or the number of an escape; unused slots have
        escapes that move on by nothing.
      digit: ``i32[r, w]``, the digit that an escape holds, 0 in the other slots.
      entry: ``i32[r, w]``, the number of the entry in a slot, c if there is none.
      place: ``i32[r, c]``, the slot of each entry, w if it has none.
    """

    first: jax.Array
    code: jax.Array
    digit: jax.Array
    entry: jax.Array
    place: jax.Array


def lay_out(
    coo: PaddedCOO,
    slots: int,
    form: GapFormat,
    seed: jax.Array,
    marked: jax.Array | None = None,
) -> Slots:
    """Gives each entry its slots.

    If there are too few slots, the seed decides which entries are left out, so that
    no entry is left out at every step.

    Args:
      coo: ``[r, c]`` slots; indices in any order, but each step back takes escapes.
      slots: static number of slots of a row.
      form: how gaps are written.
      seed: ``u32[]``.
      marked: ``bool[r, c]``, entries that take one more slot, a mark. None: no entry.

    Cost: a running maximum, a running sum, ``1 + digits`` scatters and a few gathers of c entries.
    """
    indices = coo.indices
    marks = jnp.zeros_like(indices) if marked is None else marked.astype(jnp.int32)
    rows, entries = indices.shape
    number = jnp.arange(entries, dtype=jnp.int32)
    valid = indices < coo.size
    before = lax.cummax(jnp.where(valid, number, -1), axis=1)
    before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.take_along_axis(indices, jnp.maximum(before, 0), axis=1)
    gap = jnp.where(valid & (before >= 0), (indices - previous) & _MODULUS_MASK, 0)
    width = jnp.where(valid, 1 + form.escapes(gap) + marks, 0)
    end = jnp.cumsum(width, axis=1, dtype=jnp.int32)

    # If not all fit: a window of slots, which may wrap around, and the entries that end
    # in it. They may take `digits` more slots at the joint of the window.
    needed = end[:, -1:]
    exceeded = needed > slots
    length = jnp.where(exceeded, slots - form.digits, needed)
    start = jnp.where(exceeded, _hash.below(seed, needed), 0)
    ahead = valid & (end <= start + length - needed)
    skipped = valid & ~ahead & (end <= start)
    behind = valid & ~ahead & (end > start) & (end <= start + length)
    # The first entry after the skipped ones follows the last entry ahead of them.
    last_ahead = jnp.max(jnp.where(ahead, number, -1), axis=1, keepdims=True)
    next_behind = jnp.min(jnp.where(behind, number, entries), axis=1, keepdims=True)
    joint = behind & (number[None] == next_behind)
    last_index = jnp.take_along_axis(indices, jnp.maximum(last_ahead, 0), axis=1)
    joint_gap = jnp.where(last_ahead >= 0, (indices - last_index) & _MODULUS_MASK, 0)
    gap = jnp.where(joint, joint_gap, gap)
    escapes = form.escapes(gap) + marks
    saved = jnp.where(joint, width - 1 - escapes, jnp.where(skipped, width, 0))
    saved = jnp.sum(saved, axis=1, keepdims=True, dtype=jnp.int32)
    end = end - jnp.where(behind, saved, 0)

    place = jnp.where((ahead | behind) & (end <= slots), end - 1, slots)
    owner = jnp.full((rows, slots), entries, jnp.int32)
    for step in range(form.digits + 1 + (marked is not None)):
        target = jnp.where((place < slots) & (escapes >= step), place - step, slots)
        owner = jax.vmap(lambda o, t: o.at[t].set(number, mode="drop"))(owner, target)
    first_entry = jnp.min(jnp.where(place < slots, number, entries), axis=1, keepdims=True)
    return _written(indices, gap, marks, place, owner, first_entry, form)


def _written(indices, gap, marks, place, owner, first_entry, form: GapFormat) -> Slots:
    """The codes of slots that belong to the entries ``owner``."""
    slots, entries = owner.shape[1], gap.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    step = row_gather(place, owner, 0) - slot
    used = owner < entries
    gap = row_gather(gap, owner, 0)
    is_entry = used & (step == 0)
    # The nearest escape before an entry is number 0, except for the mark.
    number = jnp.where(used & ~is_entry, step - 1 - row_gather(marks, owner, 0), 0)
    digit = (gap // form.base) >> (form.digit_bits * jnp.maximum(number, 0))
    digit = jnp.where(number < 0, 0, digit & ((1 << form.digit_bits) - 1))
    number = jnp.where(number < 0, form.digits, number)
    return Slots(
        first=row_gather(indices, first_entry, 0)[:, 0],
        code=jnp.where(is_entry, gap % form.base, form.base + number),
        digit=jnp.where(used & ~is_entry, digit, 0),
        entry=jnp.where(is_entry, owner, entries),
        place=place,
    )


def read(first: jax.Array, code: jax.Array, digit: jax.Array, size: int, form: GapFormat):
    """The index of each slot; the inverse of :func:`lay_out`.

    Args:
      first: ``i32[...]``.
      code: ``i32[..., w]``.
      digit: ``i32[..., w]``, of escapes; ignored in the other slots.
      size: n.
      form: how gaps are written.

    Returns:
      ``i32[..., w]``, with ``size`` in slots without an entry. Cost: a running sum.
    """
    is_entry = code < form.base
    # Unsigned arithmetic wraps modulo 2**32, and the gaps are modulo 2**31.
    shift = jnp.where(is_entry, 0, code - form.base) * form.digit_bits
    jump = (digit.astype(jnp.uint32) << shift.astype(jnp.uint32)) * jnp.uint32(form.base)
    step = jnp.where(is_entry, code.astype(jnp.uint32), jump)
    position = first[..., None].astype(jnp.uint32) + jnp.cumsum(step, axis=-1, dtype=jnp.uint32)
    index = (position & jnp.uint32(_MODULUS_MASK)).astype(jnp.int32)
    return jnp.where(is_entry, index, size)


def as_rows(coo: PaddedCOO) -> PaddedCOO:
    """Flattens the leading dimensions to one, and adds a slot if there is none."""
    shape = (math.prod(coo.indices.shape[:-1]), coo.capacity)
    values, indices = coo.values.reshape(shape), coo.indices.reshape(shape)
    if not coo.capacity:
        values = jnp.zeros((shape[0], 1), values.dtype)
        indices = jnp.full((shape[0], 1), coo.size, jnp.int32)
    return PaddedCOO(values, indices, coo.size)


def encoded(message: jax.Array, slots: Slots, error: jax.Array, coo: PaddedCOO) -> Encoded:
    """The rows of :func:`as_rows`, back in the shape of ``coo``."""
    shape, sent = coo.indices.shape, slots.place < slots.code.shape[1]
    return Encoded(
        message.reshape(*shape[:-1], message.shape[-1]),
        sent[:, : coo.capacity].reshape(shape),
        jnp.where(sent, error, 0)[:, : coo.capacity].reshape(shape),
    )


def row_gather(x: jax.Array, columns: jax.Array, fill) -> jax.Array:
    """``x[i, columns[i]]``; columns past the end give ``fill``."""
    return jnp.take_along_axis(x, columns, axis=1, mode="fill", fill_value=fill)
