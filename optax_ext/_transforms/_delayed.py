"""The exchange of one step during the computation of the next one."""

from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._roles import OF_WORKER, SHARED, SUMMED
from optax_ext._state import _host_checks
from optax_ext._state._find import accumulators, reductions
from optax_ext._state._held import held, proceeded


@_roles.declared
class DelayedState(NamedTuple):
    """State of :func:`delayed`.

    Attributes:
      gradient_step: ``i32[]``, exchanges made.
      inner_opt_state: the state of the wrapped transformation.
      acc_grads: the gradient of each worker to exchange next, as in :class:`MultiStepsState`.
    """

    gradient_step: Annotated[jax.Array, SHARED]
    inner_opt_state: Annotated[Any, SHARED]
    acc_grads: Annotated[Any, SUMMED, OF_WORKER]


def delayed(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Exchanges at each step the gradient of the previous step.

    The exchange then does not depend on the computation of the step. A compiler with asynchronous
    collectives (XLA for GPUs, with its latency-hiding scheduler) overlaps it with the forward and
    backward pass, so a step takes the longer of the two times instead of their sum. Updates are
    late by one step, as in a pipeline of depth one; docs/training.md gives the cost in loss.

    The first step exchanges a gradient of zeros. At the end the last gradient is still in the
    state, and one more ``update`` with zeros delivers it.

    Args:
      tx: the whole chain, with :func:`sparse_allreduce` or :func:`dense` in it.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Parameters and extra arguments go to ``tx``
      as they are at the current step. Memory: n float32 for each worker.

    Raises:
      ValueError: at ``init``, ``tx`` has no reduction.
      TypeError: at ``init``, complex parameters without ``split_real_and_imaginary`` around all.
      TypeError: at ``update``, the state was made without the delay.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext, sparse_collectives as sc
      >>> tx = delayed(optax.chain(optax_ext.dense(axis="w"), optax.sgd(1.0)))
      >>> def train(first, second):
      ...     updates_1, state = tx.update(first, tx.init(first))
      ...     return updates_1, tx.update(second, state)[0]
      >>> gradients = jnp.array([1.0, 3.0]), jnp.array([5.0, 3.0])  # of two workers
      >>> [u.tolist() for u in sc.simulate(train, axis="w", axis_size=2)(*gradients)]
      [[-0.0, -0.0], [-2.0, -2.0]]
    """
    inner_tx = held(tx)

    def init(params: Any) -> DelayedState:
        inner = inner_tx.init(params)
        if not reductions(inner):
            raise ValueError(
                "tx of optax_ext.delayed has no sparse allreduce, and no optax_ext.dense, in it. "
                "Wrap the whole chain."
            )
        return DelayedState(jnp.zeros((), jnp.int32), inner, accumulators(inner, params))

    def update(updates: Any, state: DelayedState, params: Any = None, **extra_args: Any):
        if not isinstance(state, DelayedState):
            raise TypeError(
                f"state is a {type(state).__name__}, made without the delay of one step: make it "
                "with optax_ext.init_state(optax_ext.delayed(tx), params, mesh), or leave "
                "optax_ext.delayed out."
            )
        _host_checks.check_before_accumulation(updates, state.inner_opt_state, params)
        before = jax.tree.map(lambda a, g: a[0].astype(g.dtype), state.acc_grads, updates)
        old = state.inner_opt_state
        new_updates, inner = inner_tx.update(before, old, params, **extra_args)
        made = proceeded(inner, old, "skipped").astype(jnp.int32)
        waiting = jax.tree.map(lambda a, g: g[None].astype(a.dtype), state.acc_grads, updates)
        return new_updates, state._replace(
            gradient_step=state.gradient_step + made, inner_opt_state=inner, acc_grads=waiting
        )

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))
