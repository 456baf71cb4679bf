"""Adam's preconditioning of each worker's own gradients, in front of the accumulation."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._step import _checks
from sparse_collectives import AxisName, _compat, _validation, transport


class ScaleByLocalAdamState(NamedTuple):
    """State of :func:`scale_by_local_adam`, for each worker.

    Attributes:
      count: ``i32[]``, gradients seen.
      nu: second moments of the worker's own gradients, in the tree of the parameters.
    """

    count: jax.Array
    nu: Any


def scale_by_local_adam(
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    *,
    axis: AxisName | None = None,
    average_every: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each worker's gradient by the root of its own second moment.

    .. math::

        v_i = b_2 v_i + (1 - b_2) g_i^2, \quad u_i = g_i / (\sqrt{v_i / (1 - b_2^t)} + eps)

    For ``sparse_allreduce(..., local=)``, in a chain with the learning rate. Adam behind a
    sparse allreduce sees an entry once in T steps, T gradients at a time, and divides it by
    a moment that is sqrt(T) times too large. Here every gradient is divided when it is
    made, and what waits in a residual is a step of the parameters.

    A worker's gradient is noisier than their mean, and its moment larger: by sqrt(P) where
    there is nothing but noise. The learning rate has to make up for that
    (:func:`sparse_adamw` does).

    Cost: n float32 for each worker, read and written at each step. No words, unless
    ``average_every`` is given.

    Args:
      b2: decay of the second moments, in [0, 1); or ``f32[]``, of ``optax.inject_hyperparams``.
      eps: added to the root, as in Adam.
      axis: the mesh axis of the workers, for ``average_every``.
      average_every: every so many steps the second moments are averaged over the workers,
        by a dense allreduce of n float32. None: never. It is for workers whose data differ.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Raises:
      ValueError: an argument out of its range; ``average_every`` without ``axis``.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_local_adam()
      >>> scaled, _ = tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))
      >>> [round(float(x), 3) for x in scaled]
      [1.0, -1.0]
    """
    b2 = _checks.check_hyperparameter("b2", b2, 0.0, 1.0)
    if isinstance(b2, float) and b2 == 1.0:
        raise ValueError("b2 must be less than 1, got 1.0: nothing would be learned of gradients.")
    eps = _checks.check_hyperparameter("eps", eps, 0.0, 1.0)
    if average_every is not None:
        average_every = _validation.check_positive_int("average_every", average_every)
        if axis is None:
            raise ValueError(
                f"average_every={average_every} averages over the workers, and nothing says which. "
                "Give the mesh axis of the workers as axis=."
            )

    def init(params: Any) -> ScaleByLocalAdamState:
        nu = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), params)
        return ScaleByLocalAdamState(jnp.zeros((), jnp.int32), nu)

    def update(updates: Any, state: ScaleByLocalAdamState, params: Any = None):
        del params
        count = state.count + 1
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        if average_every is not None:
            nu = _averaged(nu, count % average_every == 0, cast(AxisName, axis))
        correction = 1 - jnp.asarray(b2, jnp.float32) ** count.astype(jnp.float32)
        scaled = jax.tree.map(lambda g, v: g / (jnp.sqrt(v / correction) + eps), updates, nu)
        return scaled, ScaleByLocalAdamState(count, nu)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def _averaged(nu: Any, now: jax.Array, axis: AxisName) -> Any:
    """The mean over the workers where ``now``, which is the same on all of them."""

    def mean(tree):
        return jax.tree.map(
            lambda v: _compat.to_varying(transport.pmean(v, axis), axis).astype(v.dtype), tree
        )

    # A count of each worker's own is typed as such, and all have the same.
    now = transport.psum(now.astype(jnp.int32), axis) > 0
    return lax.cond(now, mean, lambda tree: tree, nu)
