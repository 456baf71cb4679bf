"""Sparse allgather: the sum of selections that have no index in common."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bitset
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame, _messages
from sparse_collectives.transport import _dispatch


def sparse_allgather(*, codec: Codec | None = None) -> SparseAllreduce:
    r"""An allgather of updates that are disjoint by construction, as in coordinate descent.

    If every worker has its own coordinates, the sum of the selections is their
    concatenation, and nothing is added up:

    .. math:: total = concat(coo_0, \dots, coo_{P-1})

    The allreduce checks that they are disjoint, since values would be lost otherwise. If
    several workers selected an index, the entry of one of them is delivered: the first in the
    order of the axis, beginning with a worker that changes at each step. The others keep their
    entries, so that nothing is lost, and each has its turn with a probability of 1 / P
    or more at a step; ``info.overflow`` counts them. All workers decide this from the same
    received messages, and so agree. The check costs a few random accesses to a set of n
    bits for each of the P c pairs, and zeroing n / 32 words.

    Cost, for selections of c slots: ``2 c (P-1)`` words received (an exact codec),
    ``log2 P`` latencies.

    Args:
      codec: encoding of the messages, exact by default. The rounding errors of a lossy
        one, and the entries that it leaves out, are in ``undelivered``.

    Returns:
      A :class:`SparseAllreduce`; its total is a PaddedCOO of P c slots with unique indices, in the
      order of the workers. ``undelivered`` has no entries other than those in the selection.

    Raises:
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Renggli et al., `SparCML <https://doi.org/10.1145/3295500.3356222>`_, SC 2019:
      disjoint index sets in section 5.1, coordinate descent in section 8.
    """
    codec = wire.raw() if codec is None else codec

    @_frame.counted(float64=True, adds=False)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName):
        workers, me = transport.axis_size(axis), transport.axis_index(axis)
        encoded = codec.encode(coo, _hash.seed(count, 0, me))
        with jax.named_scope("sparse_allgather"):
            gathered = transport.all_gather(encoded.message, axis)
        everyone = codec.decode(gathered, coo.size, coo.values.dtype)

        first = _hash.below(_hash.turn(count, 0), jnp.int32(workers))
        taken = _taken_before(everyone, first)
        total = PaddedCOO(
            jnp.where(taken, 0, everyone.values).reshape(-1),
            jnp.where(taken, coo.size, everyone.indices).reshape(-1),
            coo.size,
        )
        # By index, because a decoded message may have other slots than the selection.
        mine = jnp.where(taken[me], everyone.indices[me], coo.size)
        late = _bitset.contains(
            _bitset.insert(_bitset.empty(coo.size), mine, coo.size), coo.indices
        )
        late = late & encoded.sent
        lost = _messages.kept_by_sender(coo, encoded)
        undelivered = Undelivered.of(coo, jnp.where(late, coo.values, lost.values))
        overflow = _messages.unsent_count(coo, encoded) + jnp.sum(late, dtype=jnp.int32)
        words = _dispatch.words_of_all_gather(encoded.message.size, workers)
        entries = jnp.sum(encoded.sent, dtype=jnp.int32)
        useful = _messages.useful_words(words, entries, coo.capacity)
        info = ReduceInfo.of(total, words, useful=useful, overflow=overflow)
        return total, undelivered, info

    spec = Spec.of("sparse_allgather", codec=codec)
    return SparseAllreduce(_frame.init, reduce, spec=spec, may_keep_partial_sums=False)


def _taken_before(coo: PaddedCOO, first: jax.Array) -> jax.Array:
    """Which entries of ``coo[P, c]`` have an index of an earlier row, counted from ``first`` on."""

    def check(members, indices):
        taken = _bitset.contains(members, indices) & (indices < coo.size)
        return _bitset.insert(members, indices, coo.size), taken

    # The carry has to have the type of its result from the start.
    members = _bitset.empty(coo.size) + jnp.zeros_like(coo.indices[0, 0], jnp.uint32)
    _, taken = lax.scan(check, members, jnp.roll(coo.indices, -first, axis=0))
    return jnp.roll(taken, first, axis=0)
