"""Sums at indices that all workers draw from one seed; no index is sent."""

import math

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._parts import _frame, _sums


def shared_random(density: float, *, seed: int = 0) -> SparseAllreduce:
    r"""Full sums at k indices that a seed and the step number determine.

    .. math:: total_I = \sum_j acc_{j, I}, \qquad residual_{j, I} = 0, \qquad |I| = k

    No index is sent, so for the same words it delivers 1.5 times the entries of
    :func:`partitioned_topk` with 32 bits, whatever their size. Which is better depends on the
    gradient. If it is concentrated in few entries, the largest are worth more. If workers hold
    whole models that only have to stay close to one another, as in SPARTA, any entry is as good.

    The steps walk through a random permutation of the n indices, and draw another one at its
    end. Each index is drawn once in every ``ceil(n / k)`` steps, so an entry waits for fewer
    than ``2 ceil(n / k)`` of them. (SPARTA draws all indices again at each step; an entry then
    waits for ``7 n / k`` steps with probability 1e-3.)

    The worker's selector, which has the same density, sees the accumulator at the k indices.
    Whichever of them it selects, all k are delivered. A worker that selects none contributes
    nothing and keeps its values; that is how a step is skipped.

    Cost: ``2 k (P-1)/P`` words received and ``2 log2 P`` latencies, a psum of k values. Compute:
    about six rounds of arithmetic for each index that is drawn, a gather and a scatter of k.

    Args:
      density: k / n, the share of the entries that each step delivers, in (0, 1].
      seed: the seed of the permutations, in [0, 2**31), the same on all workers.

    Returns:
      A :class:`SparseAllreduce` with ``full_sums``. Its total is a PaddedCOO of k slots.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Baioumy, Cheema, `SPARTA <https://openreview.net/forum?id=stFPf3gzq1>`_, 2025.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> selector, allreduce = sc.select.topk(density=0.5), shared_random(density=0.5)
      >>> def step(acc):
      ...     coo, *_ = selector.select(acc, selector.init(4))
      ...     total, *_ = allreduce.reduce(coo, allreduce.init(4, 2), axis="workers", acc=acc)
      ...     return total.to_dense()
      >>> acc = jnp.array([[5.0, 1.0, 2.0, 1.0], [3.0, 1.0, 1.0, 4.0]])
      >>> int((sc.simulate(step, axis_size=2)(acc)[0] != 0).sum())
      2
    """
    density = _validation.check_density(density)
    seed = _validation.check_positive_int("seed", seed, minimum=0)
    if seed >= 2**31:
        raise ValueError(f"seed must be below 2**31, got {seed}.")

    def drawn(state: _frame.StepState, size: int) -> jax.Array:
        k = _validation.count_from_density(density, size)
        turns = math.ceil(size / k)
        key = jax.random.fold_in(_hash.key(seed), state.count // turns)
        start, turn = (state.count % turns) * k, jnp.arange(k, dtype=jnp.int32)
        # The last turn of a permutation has the remaining indices; a place past n may overflow.
        inside = turn < size - start
        indices = _hash.permuted(key, jnp.where(inside, start + turn, 0), size)
        return jnp.where(inside, indices, size)

    def local_view(acc: jax.Array, state: _frame.StepState, *, axis: AxisName) -> jax.Array:
        del axis
        return acc.at[drawn(state, acc.shape[0])].get(mode="fill", fill_value=0)

    def to_global(
        coo: PaddedCOO, size: int, state: _frame.StepState, *, axis: AxisName
    ) -> PaddedCOO:
        del axis
        indices = drawn(state, size).at[coo.indices].get(mode="fill", fill_value=size)
        return PaddedCOO(coo.values, indices, size)

    def reduce(
        coo: PaddedCOO, state: _frame.StepState, *, axis: AxisName, acc: jax.Array | None = None
    ):
        coo = _frame.check_selection(coo, acc)
        workers = transport.axis_size(axis)
        with jax.named_scope("shared_random"):
            # The indices do not depend on the selection, which is empty if a step is skipped.
            indices = drawn(state, coo.size)
            total, undelivered = _sums.sum_at(indices, acc, coo, axis, gives=coo.count() > 0)
        info = ReduceInfo.of(total, _sums.sum_words(total.capacity, workers, 32))
        return total, undelivered, _frame.StepState(state.count + 1), info

    spec = Spec.of("shared_random", density=density, seed=seed)
    return SparseAllreduce(
        _frame.init,
        reduce,
        spec,
        full_sums=True,
        local_view=local_view,
        to_global=to_global,
        may_keep_partial_sums=False,
    )
