"""TopkA: every worker gathers all selections and adds them up."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, transport, wire
from sparse_collectives._data import PaddedCOO, sum_dtype
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame, _messages
from sparse_collectives.transport import _dispatch


def topk_a(*, codec: Codec | None = None) -> SparseAllreduce:
    r"""The allgather-based sparse allreduce (TopkA; with a threshold, Gaussiank).

    .. math:: total = \sum_i coo_i

    Each worker receives the pairs of all others and adds them up. Everything that was
    selected is delivered. It suits two workers, and up to four if messages cost more than
    bytes; its volume grows with P.

    Values and indices are packed in one integer array, so that a step is one collective.

    Cost, for selections of c slots: ``2 c (P-1)`` words received (an exact codec),
    ``log2 P`` latencies. Compute: P c random additions into n zeros.

    The total is dense. A PaddedCOO of the union would need two more random accesses for each of the
    P c pairs, to number the union and to write it into n zeros in the end. The additions here write
    the n values at once, which any caller needs to apply the update.

    Args:
      codec: encoding of the messages, exact by default. With a lossy one the total
        is the sum of the decoded values, including a worker's own. Rounding errors
        and entries that were left out are in ``undelivered``.

    Returns:
      A :class:`SparseAllreduce`; its total is ``f[n]``. ``undelivered`` has only
      ``slots``. ``info.overflow`` counts the entries that the codec left out.

    Raises:
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Table 1 of Li and Hoefler, `Near-Optimal Sparse Allreduce for Distributed Deep
      Learning <https://doi.org/10.1145/3503221.3508399>`_, PPoPP 2022.
    """
    codec = wire.raw() if codec is None else codec

    @_frame.counted(exact=codec.exact, float64=True, dense=True)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName):
        encoded = codec.encode(coo, _hash.seed(count, 0, transport.axis_index(axis)))
        with jax.named_scope("topk_a/allgather"):
            gathered = transport.all_gather(encoded.message, axis)
        everyone = codec.decode(gathered, coo.size, coo.values.dtype)
        total = _sum_rows(everyone)
        undelivered = Undelivered.of(coo, _messages.kept_by_sender(coo, encoded).values)
        words = _dispatch.words_of_all_gather(encoded.message.size, transport.axis_size(axis))
        entries = jnp.sum(encoded.sent, dtype=jnp.int32)
        useful = _messages.useful_words(words, entries, coo.capacity)
        overflow = _messages.unsent_count(coo, encoded)
        info = ReduceInfo.of(total, words, useful=useful, overflow=overflow)
        return total, undelivered, info

    return SparseAllreduce(
        _frame.init, reduce, spec=Spec.of("topk_a", codec=codec), may_keep_partial_sums=False
    )


def _sum_rows(coo: PaddedCOO) -> jax.Array:
    """The sum of the rows of ``coo[P, c]``, ``f[n]``, the same bits on every worker.

    Row by row, since indices are unique within one: a GPU adds to one place in no fixed
    order, and each worker makes this sum for itself. In float32, or float64 for float64.
    """
    # The carry must have the type of its result from the start. Its zero depends on the indices;
    # a constant would make n zeros that outlive the sum.
    zero = jnp.minimum(coo.indices[0, 0], 0).astype(sum_dtype(coo.values.dtype))

    def add(total, row):
        indices, values = row
        return total.at[indices].add(values.astype(total.dtype), mode="drop"), None

    total, _ = lax.scan(add, jnp.full((coo.size,), zero), (coo.indices, coo.values))
    return total.astype(coo.values.dtype)
