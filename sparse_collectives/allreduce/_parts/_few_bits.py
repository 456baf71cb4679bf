"""Full sums in few bits: codes of values to the owner of an index, codes of the sums to all.

One worker owns each index. The others send it their values in one bit or a few; it adds its own
value, which is not rounded, and sends the sum to all workers in a few bits. Each of the two
roundings stays in the residual of the worker that made it: a sender keeps what its code took off
its value, and the owner keeps what its code took off the sum. So nothing is lost, and the bits of a
value do not grow with the workers, as the bits of a sum of integers do. (Tang et al. keep errors
on both sides as well: `DoubleSqueeze <https://arxiv.org/abs/1905.05957>`_, ICML 2019.)

Owners change from step to step. A value far above its neighbors, which their codes cannot hold,
waits for the step in which its worker owns the index: then it is in the sum as it is, and arrives
as the largest code of its block (:mod:`._codes`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation, transport
from sparse_collectives._data import PaddedCOO, only_where
from sparse_collectives._platform import written
from sparse_collectives._sparse_ops import _bits, _bitset
from sparse_collectives._types import AxisName, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.allreduce._parts._codes import BLOCK, decode, encode, words
from sparse_collectives.transport import _dispatch


class FewBits(NamedTuple):
    """The bits of a code.

    Attributes:
      up: of a value, from a worker to the owner of the index; 1 to 8.
      down: of a sum, from the owner to all workers; 3 to 8.
    """

    up: int
    down: int


# The fewest that there are; the row of the cost model has these.
FEW = FewBits(1, 3)


def checked(bits: Any) -> FewBits | None:
    """The bits of a pair (up, down), or None if it is no such pair."""
    pair = isinstance(bits, tuple | list) and len(bits) == 2
    if not pair or any(type(x) is not int for x in bits):
        return None
    up, down = bits
    return FewBits(up, down) if 1 <= up <= 8 and 3 <= down <= 8 else None


def sum_at(
    indices: jax.Array, acc: jax.Array | None, coo: PaddedCOO, axis: AxisName, bits: FewBits
) -> tuple[PaddedCOO, Undelivered]:
    """One all_to_all of the values of all workers at ``indices``, and one all_gather of the sums.

    Args:
      indices: ``i32[P, c]``, the same on every worker, unique but for padding; worker i owns row i.
      acc: ``f[n]``, the values of this worker. None: only its selection, and it clears no other
        entry; the errors of the codes of others are added to what it keeps.
      coo: its selection.
      axis: the workers.
      bits: the bits of a code.

    Returns:
      The total ``[P c]``, the same on every worker, and what this worker keeps.
    """
    slots, dtype = indices.shape[1], coo.values.dtype
    counts = jnp.sum(indices < coo.size, axis=1, dtype=jnp.int32)
    # A CPU would gather and decode again in each loop that reads a value.
    held = _validation.without_derivative(coo.to_dense() if acc is None else acc)
    held = written(_held, held, indices)
    within = _frame.within_range(held, indices.shape[0])
    total, given = _exchanged(within, counts, slots, axis, bits)

    def left(total: jax.Array, kept: jax.Array) -> jax.Array:
        # A sum that is not finite reaches all workers, and no worker keeps it.
        return _slots(jnp.where(jnp.isfinite(total), kept, 0), slots).astype(dtype)

    def existing(total: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.where(indices < coo.size, _slots(total, slots), 0).astype(dtype)

    kept = written(left, total, held - given).reshape(-1)
    total, flat = written(existing, total, indices), indices.reshape(-1)
    rest, others = PaddedCOO(kept, flat, coo.size), []
    if acc is None:
        selected = _bitset.contains(_bitset.of_unique(coo.indices, coo.size), flat)
        rest, others = only_where(selected, rest), [only_where(~selected, rest)]
    undelivered = Undelivered.of(coo, coo.values, others)._replace(rest_at_total=rest)
    return PaddedCOO(total.reshape(-1), flat, coo.size), undelivered


def sum_of_all(
    values: jax.Array, step: jax.Array, *, axis: AxisName, bits: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """The sum of arrays over the workers, with few bits for each entry and without a selection.

    An entry belongs to one worker, and at each step to the next one. A worker sends its entries to
    their owners in codes of ``bits[0]`` bits, with scales for each 256 entries; an owner sends the
    sums to all in codes of ``bits[1]`` bits. What the codes take off is this worker's to keep::

        total, sent = extend.sum_of_all(values, step, axis="data", bits=(2, 4))
        residual = values - sent

    Over the workers the arrays ``sent`` add up to ``total``, to rounding, so that with residuals
    that are added to the next values nothing is lost.

    Args:
      values: ``f32[n]``. Where an entry of the total is not finite, because the values are not or
        are too large, ``sent`` is not finite either, and this is the case for all entries of a
        block at least.
      step: ``i32[]``, the same on every worker: the number of steps before this one.
      axis: the mesh axis of the workers.
      bits: up, 1 to 8, and down, 3 to 8.

    Returns:
      The total ``f32[n]``, the same on every worker, and what this worker has given of it,
      ``f32[n]``.

    Raises:
      ValueError: other ``bits``, or values that are no vector.
      TypeError: values that are no floats of 16 or 32 bits.

    Cost: an all_to_all and an all_gather, with ``(P-1)/P n (up + down) / 32`` words received, and
    ``n / 256`` scales of 16 bits for one bit, or twice as many for more, each way
    (:func:`words_of_sum_of_all`). One worker receives nothing, and its sum is not rounded.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> from sparse_collectives import extend
      >>> def reduce(values):
      ...     return extend.sum_of_all(values, jnp.int32(0), axis="w", bits=(1, 3))
      >>> total, sent = sc.simulate(reduce, axis="w", axis_size=2)(jnp.array([[1.0], [2.0]]))
      >>> total[0].tolist(), sent[:, 0].tolist()
      ([3.0], [1.0, 2.0])
    """
    values, step, bits = (
        _validation.as_vector("values", values),
        jnp.asarray(step),
        check_bits(bits),
    )
    workers, size = transport.axis_size(axis), values.shape[0]
    if workers == 1:
        return transport.psum(values, axis), values
    slots = slots_of(size, workers)

    def of_owners(values: jax.Array) -> jax.Array:
        # Before the padding, because a GPU would write it twice.
        within = _frame.within_range(values, workers)
        return jnp.pad(within, (0, workers * slots - size)).reshape(workers, -1, BLOCK)

    mine = written(of_owners, values)
    counts = jnp.clip(size - slots * lax.iota(jnp.int32, workers), 0, slots)
    turn = (step % workers).astype(jnp.int32)
    both = _exchanged(mine, counts, slots, axis, bits, turn)
    total, given = (x.reshape(-1)[:size] for x in both)
    return total, given


def words_of_sum_of_all(size: int, workers: int, bits: tuple[int, int]) -> float:
    """Words that :func:`sum_of_all` makes each worker receive, for n entries."""
    pair = check_bits(bits)
    return 0.0 if workers == 1 else sum_words(slots_of(size, workers), workers, pair)


def check_bits(bits: Any) -> FewBits:
    """The bits of a pair, of a worker's codes and of the codes of the sums.

    Raises:
      ValueError: it is no pair of up, 1 to 8, and down, 3 to 8.
    """
    found = checked(bits)
    if found is None:
        raise ValueError(
            f"bits must be a pair: of a worker's codes (1 to 8) and of the codes of the sums "
            f"(3 to 8), got {bits!r}. Write for example bits=(2, 4)."
        )
    return found


def sum_words(slots: int, workers: int, bits: FewBits) -> float:
    """Words that each worker receives for c slots of each owner."""
    up = _dispatch.words_of_all_to_all(workers * words(slots, bits.up), workers)
    return up + _dispatch.words_of_all_gather(words(slots, bits.down), workers)


def _exchanged(
    values: jax.Array,
    counts: jax.Array,
    slots: int,
    axis: AxisName,
    bits: FewBits,
    turn: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sums that reach all workers, and what this worker has given of its values for them.

    Args:
      values: ``f32[P, b, BLOCK]``, the entries of each owner in blocks, whose sum is finite.
      counts: ``i32[P]``, of each owner.
      slots: the largest count.
      axis: the workers.
      bits: the bits of a code.
      turn: ``i32[]``: row i belongs to worker i - turn. None: 0.

    Returns:
      Two arrays like ``values``, the first the same on every worker.
    """
    workers, me = transport.axis_size(axis), transport.axis_index(axis)
    row = me if turn is None else (me + turn) % workers

    def moved(rows: jax.Array, by: jax.Array | None) -> jax.Array:
        # Codes are moved to their owners' rows, since values are far more words.
        return rows if by is None else jnp.roll(rows, by, axis=0)

    def is_in(row: jax.Array) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (workers, 1, 1), 0) == row

    message, arrives = encode(values, counts, slots, bits.up)
    back = None if turn is None else -turn
    received = decode(transport.all_to_all(moved(message, back), axis), slots, bits.up)
    # The owner's own value needs no code.
    own, count = (lax.dynamic_slice_in_dim(x, row, 1) for x in (values, counts))
    sums = jnp.sum(jnp.where(is_in(me), own, received), axis=0, keepdims=True)
    sums = written(_up_to, sums, count)
    answer, reaches_all = encode(sums, count, slots, bits.down)
    error = written(jnp.subtract, sums, reaches_all)
    answers = transport.all_gather(answer[0], axis)
    total = decode(moved(answers, turn), slots, bits.down)

    def given(row: jax.Array, own: jax.Array, error: jax.Array, arrives: jax.Array) -> jax.Array:
        return jnp.where(is_in(row), own - error, arrives)

    return total, written(given, row, own, error, arrives)


def slots_of(size: int, workers: int) -> int:
    """The entries of each owner, in whole blocks: block j of the array is a block of codes."""
    return BLOCK * max(1, math.ceil(size / (workers * BLOCK)))


def _held(values: jax.Array, indices: jax.Array) -> jax.Array:
    """The values at ``i32[r, c]`` in blocks, ``f32[r, b, BLOCK]``; 0 at padding."""
    # Unsigned, because jax tests for each signed index whether it counts from the end.
    indices = _bits.pad_to(indices, BLOCK, fill=values.shape[0]).astype(jnp.uint32)
    held = values.at[indices].get(mode="fill", fill_value=0)
    return held.astype(jnp.float32).reshape(indices.shape[0], -1, BLOCK)


def _up_to(values: jax.Array, count: jax.Array) -> jax.Array:
    """The values of the first ``count`` slots, and 0 in the others."""
    block, lane = (lax.broadcasted_iota(jnp.int32, values.shape, axis) for axis in (1, 2))
    return jnp.where(BLOCK * block + lane < count[:, None, None], values, 0)


def _slots(blocks: jax.Array, slots: int) -> jax.Array:
    return blocks.reshape(blocks.shape[0], -1)[:, :slots]
