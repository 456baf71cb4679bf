"""Agreed indices: each worker selects in its own partition, and all add their values there."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, _validation, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._platform import by_platform, once
from sparse_collectives._sparse_ops import _bits, _compaction, _elias_fano
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._parts import _few_bits, _frame, _messages, _partitions, _sums
from sparse_collectives.allreduce._parts._few_bits import FewBits
from sparse_collectives.transport import _dispatch

EXACT = 32
NARROW = (8, 10, 16)
# With this h, the largest integer of a worker, a value of average size is not rounded away.
ENOUGH = 15


def partitioned_topk(
    density: float | None = None, *, bits: int | tuple[int, int] | None = EXACT
) -> SparseAllreduce:
    r"""Full sums at indices of which each worker chooses a share.

    The indices are divided into P partitions. At step t worker i selects only in partition
    ``(i + t) mod P``, and all workers gather the selected indices. Then one psum adds the values
    of *all* workers at these indices, whichever worker selected them:

    .. math::

        I = \bigcup_i I_i, \qquad total_I = \sum_j acc_{j, I}, \qquad residual_{j, I} = 0

    The partitions have no index in common, so nothing is merged. Each worker reads n / P entries
    to select, and no residual keeps a part of the total. An entry that only one worker has is
    found when that worker selects in its partition, within P steps.

    Partitions are made of small blocks, in turn, so that each has some of every layer. (The
    systems below give each worker one run of indices, and move its ends as they adapt to
    differences between the layers.) With K of at most P entries a partition has one slot: its
    other entries then wait for about r steps if one is r times as large in every step.

    With 16, 10 or 8 ``bits`` each worker rounds its values to multiples of a step, a power of two
    that is sent for each 256 entries, and keeps the rounding error. The step suits the largest
    of the 256 entries. If it rounds others to 0, it suits some of these at about every other turn,
    so that an entry far above the rest does not starve them. Sums of the multiples are exact in any
    order: a value of b bits has room for the sum of P integers, each between -h and h with
    ``h = (2**b - 1) // (2 P)``.

    With a pair of ``bits``, (1, 3) for example, workers send their values to the worker that chose
    an index, as codes of one bit; it adds them to its own value, and sends the sum to all workers
    as a code of three bits. Codes have scales for each 256 entries: the mean magnitude for one bit,
    two means for two bits, and for more a step and the largest magnitude. Each worker keeps the
    errors of the codes that it made, so that nothing is lost, and bits do not grow with the
    workers. An entry far above its neighbors waits until its worker chooses it, and starves none.

    With fewer bits than 32 the indices are sent as a set of bits (Elias-Fano), in about half a bit
    more than its entropy.

    Cost, for P selections of c slots, ``K = P c``: ``K (P-1)/P`` words received for the
    indices and ``2 K (P-1)/P`` for the values, ``3 K (P-1)/P`` in all, by one all_gather and one
    psum, in a latency of ``3 log2 P``. With fewer bits an index takes 6.3 bits at a density of 5 %,
    8.6 at 1 % and 12 at 0.1 %; with 16, 10 or 8 of them a value takes 32, 21 or 16, and the steps a
    word for 256 entries. With (1, 3) bits an entry takes 10.5 bits in all at 5 %, 12.7 at 1 %,
    14.5 at 0.3 % and 16.2 at 0.1 %, times (P-1)/P, for any P. These are an all_gather, an
    all_to_all and an all_gather of small messages. No entry can overflow on the way.

    Args:
      density: the largest K / n, with the share of a worker rounded up to a whole entry. A
        selection of more entries sends some of them in turn. None: everything that is selected.
      bits: 32 for exact sums in float32; 16, 10 or 8 for sums of integers, or None for the fewest
        of these for which h is at least 15: 8 for up to 8 workers, 10 for up to 34; or a pair, the
        bits of a code on the way to the worker that chose an index (1 to 8), and from it (3 to 8).

    Returns:
      A :class:`SparseAllreduce` with ``full_sums`` that shows a worker its own partition.
      Its total is a PaddedCOO of K slots. Selected entries of other partitions wait, and count
      as ``overflow``. ``undelivered`` is exact in float32.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound, or too many workers for the bits (127
        for 8, 511 for 10, 32,767 for 16).

    References:
      Exclusive partitions of the indices: Yoon and Oh, `MiCRO
      <https://arxiv.org/abs/2310.00967>`_, HiPC 2023, and `ExDyna
      <https://arxiv.org/abs/2402.13781>`_. Shared indices and full sums: Chen
      et al., `ScaleCom <https://arxiv.org/abs/2104.11125>`_, NeurIPS 2020. Codes in both
      directions with feedback: Tang et al., `DoubleSqueeze <https://arxiv.org/abs/1905.05957>`_,
      ICML 2019.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> allreduce = partitioned_topk()
      >>> def step(acc):
      ...     state = allreduce.init(4, 2)
      ...     mine = allreduce.local_view(acc, state, axis="workers")
      ...     selector = sc.select.topk(density=0.5)
      ...     coo, _, _ = selector.select(mine, selector.init(2))
      ...     coo = allreduce.to_global(coo, 4, state, axis="workers")
      ...     return allreduce.reduce(coo, state, axis="workers", acc=acc)[0].to_dense()
      >>> acc = jnp.array([[5.0, 1.0, 2.0, 1.0], [3.0, 1.0, 1.0, 4.0]])
      >>> sc.simulate(step, axis_size=2)(acc)[0].tolist()
      [8.0, 0.0, 0.0, 5.0]
    """
    density = None if density is None else _validation.check_density(density)
    bits = _checked(bits)

    def my_partition(count: jax.Array, axis: AxisName) -> jax.Array:
        return (transport.axis_index(axis) + count) % transport.axis_size(axis)

    def local_view(acc: jax.Array, state: _frame.StepState, *, axis: AxisName) -> jax.Array:
        partitions = _partitions.make_partitions(acc.shape[0], transport.axis_size(axis))
        return partitions.take(acc, my_partition(state.count, axis))

    def to_global(
        coo: PaddedCOO, size: int, state: _frame.StepState, *, axis: AxisName
    ) -> PaddedCOO:
        partitions = _partitions.make_partitions(size, transport.axis_size(axis))
        indices = partitions.place(coo.indices, my_partition(state.count, axis))
        return PaddedCOO(coo.values, indices, size)

    @_frame.counted(adds=False)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName, acc: jax.Array | None = None):
        workers = transport.axis_size(axis)
        plan = make_plan(coo.size, coo.capacity, workers, density, bits)
        mine = _in_my_partition(coo, plan, my_partition(count, axis), _hash.turn(count, 0))
        with jax.named_scope("partitioned_topk/indices"):
            message = plan.encoded(mine, _hash.turn(count, 1))
            gathered = transport.all_gather(message, axis)
        partition = (jnp.arange(workers, dtype=jnp.int32) + count) % workers
        indices, step = _decoded(gathered, partition, plan)
        with jax.named_scope("partitioned_topk/values"):
            if isinstance(plan.bits, FewBits):
                total, undelivered = _few_bits.sum_at(indices, acc, coo, axis, plan.bits)
            else:
                chosen = indices.reshape(-1)
                total, undelivered = _sums.sum_at(chosen, acc, coo, axis, step, plan.bits)
        sent = mine.count()
        gather = _dispatch.words_of_all_gather(plan.message_words, workers)
        values = plan.value_words
        useful = _messages.useful_words(gather, sent, plan.slots) + jnp.float32(values)
        overflow = coo.count() - sent
        info = ReduceInfo.of(total, gather + values, useful=useful, overflow=overflow)
        return total, undelivered, info

    spec = Spec.of(
        "partitioned_topk",
        density=density,
        bits=tuple(bits) if isinstance(bits, FewBits) else bits,
    )
    return SparseAllreduce(
        _frame.init,
        reduce,
        spec,
        full_sums=True,
        local_view=local_view,
        to_global=to_global,
        may_keep_partial_sums=isinstance(bits, FewBits),
    )


class Plan(NamedTuple):
    """The static sizes of a step.

    Attributes:
      partitions: the partitions of the indices.
      slots: slots of one worker's message.
      bits: bits of a value, or of codes.
    """

    partitions: _partitions.Partitions
    slots: int
    bits: int | FewBits

    @property
    def steps(self) -> int:
        """Steps in one worker's message, a word each."""
        in_steps = isinstance(self.bits, int) and self.bits != EXACT
        return _sums.buckets(self.slots) if in_steps else 0

    @property
    def message_words(self) -> int:
        """Words of one worker's indices and steps."""
        if self.bits == EXACT:
            return self.slots
        return self.steps + _elias_fano.words(self.slots, self.partitions.width)

    @property
    def value_words(self) -> float:
        """Words of values that each worker receives."""
        workers = self.partitions.workers
        if isinstance(self.bits, FewBits):
            return _few_bits.sum_words(self.slots, workers, self.bits)
        return _sums.sum_words(workers * self.slots, workers, self.bits)

    def encoded(self, mine: PaddedCOO, turn: jax.Array) -> jax.Array:
        """The message ``i32[w]`` with the ascending places of one worker's entries, and steps."""
        if self.bits == EXACT:
            return mine.indices
        indices = _elias_fano.encode(mine.indices, self.partitions.width)
        if isinstance(self.bits, FewBits):
            return indices
        workers = self.partitions.workers
        sent = _frame.within_range(mine.values, workers)
        step = _sums.steps(sent, _sums.half(self.bits, workers), turn)
        return jnp.concatenate([lax.bitcast_convert_type(step, jnp.int32), indices])

    def decoded(self, messages: jax.Array) -> jax.Array:
        """The places ``i32[P, c]`` in the messages of all workers, without their steps."""
        if self.bits == EXACT:
            return messages
        width = self.partitions.width

        def decode(message: jax.Array) -> jax.Array:
            return _elias_fano.decode(message, self.slots, width)

        # A CPU takes half as long for one message after the other.
        return by_platform(functools.partial(lax.map, decode), jax.vmap(decode), messages)


def make_plan(
    size: int, capacity: int, workers: int, density: float | None, bits: int | FewBits | None
) -> Plan:
    """The plan for selections of ``capacity`` slots of a vector of length ``size``."""
    partitions = _partitions.make_partitions(size, workers)
    slots = min(capacity, partitions.width)
    if density is not None:
        k = _validation.count_from_density(density, size)
        slots = min(slots, math.ceil(k / workers))
    chosen = _fewest(workers) if bits is None else bits
    if isinstance(chosen, int) and chosen != EXACT and not _sums.half(chosen, workers):
        raise ValueError(
            f"bits={chosen} is too few for the sum of {workers} workers. Give bits=32."
        )
    return Plan(partitions, slots, chosen)


def _fewest(workers: int) -> int:
    enough = (bits for bits in NARROW if _sums.half(bits, workers) >= ENOUGH)
    return next(enough, NARROW[-1] if _sums.half(NARROW[-1], workers) else EXACT)


def _checked(bits: Any) -> int | FewBits | None:
    if isinstance(bits, tuple | list):
        if pair := _few_bits.checked(bits):
            return pair
    elif bits in (EXACT, *NARROW, None) and not isinstance(bits, bool):
        return bits
    raise ValueError(
        "bits must be 32, 16, 10 or 8, or None for the fewest that are enough for the workers, or "
        f"a pair of 1 to 8 bits up and 3 to 8 bits down, such as (1, 3), got {bits!r}."
    )


def _in_my_partition(
    coo: PaddedCOO, plan: Plan, partition: jax.Array, turn: jax.Array
) -> PaddedCOO:
    """The entries of my partition, at their places in it, ascending, with padding at the end."""
    local, width = plan.partitions.local(coo.indices, partition), plan.partitions.width

    def moved(values: jax.Array, local: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = local < width
        slot = jnp.where(inside, _bits.running_sum(inside) - 1, coo.capacity)
        return (
            jnp.zeros_like(values).at[slot].set(values, mode="drop"),
            jnp.full_like(local, width).at[slot].set(local, mode="drop"),
        )

    # Entries that were selected in the partition are in their places.
    others = jnp.any((local >= width) & (coo.indices < coo.size))
    values, local = once(others, moved, lambda *mine: mine, coo.values, local)
    mine = PaddedCOO(values, local, width)
    return _compaction.bounded(mine, plan.slots, turn)[0]


def _decoded(
    gathered: jax.Array, partition: jax.Array, plan: Plan
) -> tuple[jax.Array, jax.Array | None]:
    """The indices ``i32[P, c]`` that each worker selected, and the step of each, ``f32[P c]``."""
    partitions, packed = plan.partitions, gathered[:, plan.steps :]

    def indices_of(packed: jax.Array, partition: jax.Array) -> jax.Array:
        return partitions.place(plan.decoded(packed), partition[:, None])

    def none(packed: jax.Array, partition: jax.Array) -> jax.Array:
        del partition
        # The result has the type of the gathered array.
        return jnp.full_like(packed, partitions.size, shape=(packed.shape[0], plan.slots))

    any_entry = jnp.any(packed != (partitions.width if plan.bits == EXACT else 0))
    indices = once(any_entry, indices_of, none, packed, partition)
    if not plan.steps:
        return indices, None
    step = lax.bitcast_convert_type(gathered[:, : plan.steps], jnp.float32)
    return indices, _sums.of_slots(step, plan.slots).reshape(-1)
