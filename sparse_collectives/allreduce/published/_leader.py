"""CLT-k: the workers choose the indices in turn, and all add their values there."""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, SparseAllreduce
from sparse_collectives.allreduce._shared import _messages, _reduce, _replicas, _sums
from sparse_collectives.allreduce._shared._reduce import StepState
from sparse_collectives.transport import _dispatch


def leader() -> SparseAllreduce:
    r"""The cyclic local top-k of ScaleCom: worker ``t mod P`` chooses the indices at step t.

    .. math:: total_I = \sum_j acc_{j, I}, \qquad residual_{j, I} = 0, \qquad I = I_{t \bmod P}

    It assumes that the accumulators of the workers are similar. It is here for comparison with
    :func:`agreed`, which takes a share of the indices from each worker, with fewer words, and in
    which every worker selects from n / P entries.

    Cost, for a selection of c slots: ``2 c (P-1)/P`` words received for the indices (a psum
    to which all others add zeros, as the sender changes from step to step), and as many for the
    values; two psums, ``4 log2 P`` latencies. Each worker selects from all n entries, and P - 1
    of the P selections are not used.

    Returns:
      A :class:`SparseAllreduce` that is ``complete``. Its total is a PaddedCOO of c slots.

    Raises:
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Chen et al., `ScaleCom <https://arxiv.org/abs/2104.11125>`_, NeurIPS 2020, section 3.
    """

    def reduce(coo: PaddedCOO, state: StepState, *, axis: AxisName, acc: jax.Array | None = None):
        _validation.check_float("coo.values", coo.values.dtype)
        workers = transport.axis_size(axis)
        new_state = StepState(state.count + 1)
        if workers == 1:
            total, undelivered, info = _replicas.of_one_worker(coo, axis)
            return total, undelivered, new_state, info
        chooses = transport.axis_index(axis) == state.count % workers
        with jax.named_scope("leader/indices"):
            indices = transport.psum(jnp.where(chooses, coo.indices, 0), axis)
        with jax.named_scope("leader/values"):
            result = _sums.sum_at(indices, acc, coo, axis)
        sent = jnp.where(chooses, coo.count(), 0)
        gather = _dispatch.words_of_all_reduce(coo.capacity, workers)
        values = _sums.sum_words(coo.capacity, workers, 32)
        useful = _messages.useful_words(gather, sent, coo.capacity) + jnp.float32(values)
        info = _messages.info(result.total, gather + values, useful=useful)
        return result.total, result.undelivered, new_state, info

    return SparseAllreduce(
        _reduce.init, reduce, spec=Spec.of("leader"), complete=True, keeps_others=False
    )
