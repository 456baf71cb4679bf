"""Gradient accumulation before an allreduce, without an exchange at the mini-steps."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _buffers, _roles
from optax_ext._error_feedback._roles import OF_WORKER, SHARED, SUMMED
from optax_ext._state import _host_checks
from optax_ext._state._find import accumulators, reductions
from optax_ext._state._held import held, proceeded
from optax_ext._transforms import _branch
from sparse_collectives import _validation


@_roles.declared
class MultiStepsState(NamedTuple):
    """State of :func:`multi_steps`; the field names are those in ``optax.MultiStepsState``.

    Attributes:
      mini_step: ``i32[]``, gradients in the accumulators.
      gradient_step: ``i32[]``, exchanges made.
      inner_opt_state: the state of the wrapped transformation.
      acc_grads: the sum of the gradients for each worker: in the tree of the parameters,
        float32, with a leading axis, of size 1 inside the mapped function and of size P
        outside.
    """

    mini_step: Annotated[jax.Array, SHARED]
    gradient_step: Annotated[jax.Array, SHARED]
    inner_opt_state: Annotated[Any, SHARED]
    acc_grads: Annotated[Any, SUMMED, OF_WORKER]


def multi_steps(
    tx: optax.GradientTransformation,
    every_k_schedule: int | Callable[[jax.Array], Any],
    *,
    use_grad_mean: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""``optax.MultiSteps`` around a reduction: k mini-steps, then one exchange and step.

    ``optax.MultiSteps`` also works around a sparse allreduce, but it evaluates the wrapped
    transformation at every mini-step and discards all results except the last, so that every
    mini-step pays for an exchange. Here a branch that is the same on every worker skips it. The
    accumulators have an axis of the workers in the state, so that parameters may be scalars.

    A gradient that is not finite reaches the ``nonfinite`` policy of
    :func:`sparse_allreduce` in the sum of its k mini-steps, and does not affect the next sum: the
    k gradients are skipped, by ``tx`` and not by other groups of an ``optax.partition``.
    (``optax.MultiSteps`` keeps it in its accumulators indefinitely.)

    Args:
      tx: the whole chain, with :func:`sparse_allreduce` or :func:`dense` in it.
      every_k_schedule: k, or a function of ``gradient_step`` that returns it.
      use_grad_mean: whether ``tx`` gets the mean of the gradients instead of their sum.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are zero at the mini-steps before
      the exchange. Extra arguments go to ``tx``. Memory: n float32 for each worker.

    Raises:
      ValueError: k is less than 1.
      ValueError: at ``init``, ``tx`` has no reduction.
      TypeError: at ``init``, complex parameters without ``split_real_and_imaginary`` around all.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext, sparse_collectives as sc
      >>> tx = multi_steps(optax.chain(optax_ext.dense(axis="w"), optax.sgd(1.0)), 2)
      >>> def train(first, second):
      ...     updates_1, state = tx.update(first, tx.init(first))
      ...     return updates_1, tx.update(second, state)[0]
      >>> gradients = jnp.array([1.0, 3.0]), jnp.array([5.0, 3.0])  # of two workers
      >>> [u.tolist() for u in sc.simulate(train, axis="w", axis_size=2)(*gradients)]
      [[0.0, 0.0], [-3.0, -3.0]]
    """
    if callable(every_k_schedule):
        every_k, scope = every_k_schedule, "multi_steps"
    else:
        k = _validation.check_positive_int("every_k_schedule", every_k_schedule)
        # The scope gives the traffic meter the number of steps from one exchange to the next.
        every_k, scope = lambda _: k, f"multi_steps.every{k}"
    inner_tx = held(tx)

    def init(params: Any) -> MultiStepsState:
        inner = inner_tx.init(params)
        if not reductions(inner):
            raise ValueError(
                "tx of optax_ext.multi_steps has no sparse allreduce, and no optax_ext.dense, in "
                "it. Wrap the whole chain, or use optax.MultiSteps after the allreduce."
            )
        zeros = [jnp.zeros((), jnp.int32) for _ in range(2)]
        return MultiStepsState(zeros[0], zeros[1], inner, accumulators(inner, params))

    def update(updates: Any, state: MultiStepsState, params: Any = None, **extra_args: Any):
        _host_checks.check_before_accumulation(updates, state.inner_opt_state, params)
        acc = jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), state.acc_grads, updates)
        k = jnp.asarray(every_k(state.gradient_step), jnp.int32)
        divisor = k.astype(jnp.float32) if use_grad_mean else jnp.float32(1.0)

        def given(a: jax.Array, g: jax.Array) -> jax.Array:
            return _buffers.narrowed(a[0] / divisor, g.dtype, saturate=True)

        def exchange():
            total = jax.tree.map(given, acc, updates)
            return inner_tx.update(total, state.inner_opt_state, params, **extra_args)

        # In units of the next sum.
        scale = jnp.asarray(every_k(state.gradient_step + 1) if use_grad_mean else 1, jnp.float32)

        def left(a: jax.Array, g: jax.Array) -> Any:
            """What a gradient of 16 bits cannot hold of the sum, for the next one."""
            if g.dtype == a.dtype:
                return 0.0
            rest = a[0] / divisor - given(a, g).astype(a.dtype)
            return jnp.where(jnp.isfinite(rest), rest, 0.0)[None] * scale

        emit = state.mini_step + 1 >= k
        old = state.inner_opt_state
        new_updates, inner = _branch.only_if(emit, exchange, old, scope=scope)
        # What a skipped sum leaves is skipped with it.
        kept = proceeded(inner, old, "skipped", "missed")
        made = emit & proceeded(inner, old, "skipped")
        return new_updates, MultiStepsState(
            mini_step=jnp.where(emit, 0, state.mini_step + 1),
            gradient_step=state.gradient_step + made.astype(jnp.int32),
            inner_opt_state=inner,
            acc_grads=jax.tree.map(
                # Not a product: 0 times infinity is not 0.
                lambda a, g: jnp.where(emit, jnp.where(kept, left(a, g), 0.0), a),
                acc,
                updates,
            ),
        )

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))
