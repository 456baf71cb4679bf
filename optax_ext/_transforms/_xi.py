r"""The empirical :math:`\xi` of the convergence proof of Ok-Topk."""

from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._error_feedback import _buffers, _roles
from optax_ext._error_feedback._roles import SHARED
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from sparse_collectives import AxisName, _axes, _validation, extend, transport


@_roles.declared
class XiState(NamedTuple):
    """State of :func:`measure_xi`.

    Attributes:
      inner: the state of the sparse allreduce.
      xi: ``f32[]``, from the last step that measured it.
    """

    inner: Annotated[SparseAllreduceState, SHARED]
    xi: Annotated[jax.Array, SHARED]


def measure_xi(
    tx: optax.GradientTransformation, *, axis: AxisName, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    r"""Measures the distance of updates from the true global top-k, relative to the gradient.

    .. math::

        \xi = \frac{\| Topk(\frac1P \sum_i acc_i) - update \|}{\| \frac1P \sum_i g_i \|}

    where k is the number of entries of the update (Li and Hoefler, Equation 5). Their proof
    assumes that :math:`\xi` stays bounded, and they find values below P harmless. Here
    :math:`g_i` is the accumulated increment: the output of the local transformation or of the
    momentum correction, if there is one. The mean accumulator is computed as the
    update plus the mean of the residuals after the step.

    Args:
      tx: :func:`sparse_allreduce` or one of its aliases, without a wrapper.
      axis: the axis of ``tx``.
      every: the number of steps from one measurement to the next.

    Returns:
      A transformation with an :class:`XiState`; ``metrics`` reports the value as ``xi``. Cost: a
      dense allreduce of 4 n words, an exact k-th magnitude and some passes over n at the steps
      that measure; a copy of the residual at all steps.

    Raises:
      TypeError: at ``init``, ``tx`` is not a sparse allreduce.

    Example:
      >>> import optax, optax_ext
      >>> sparse = optax_ext.ok_topk(density=0.01, axis="data")
      >>> tx = optax.chain(measure_xi(sparse, axis="data", every=100), optax.adam(1e-3))
    """
    every = _validation.check_positive_int("every", every)
    inner_tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> XiState:
        inner: Any = tx.init(params)
        if not isinstance(inner, SparseAllreduceState):
            raise TypeError(
                f"tx must be a sparse allreduce alone, and has a state of type "
                f"{type(inner).__name__}. Write "
                "optax.chain(measure_xi(ok_topk(...), axis=...), optimizer)."
            )
        return XiState(inner, jnp.zeros((), jnp.float32))

    def update(updates: Any, state: XiState, params: Any = None, **extra_args: Any):
        before: Any = state.inner
        updates, after = cast(Any, inner_tx.update(updates, before, params, **extra_args))

        def measured():
            return _xi(before, after, _buffers.ravel(updates, after.layout)[0], axis)

        with jax.named_scope(f"xi.every{every}"):
            # Every worker has the same count.
            xi = lax.cond(before.count % every == 0, measured, lambda: state.xi)
        return updates, XiState(after, xi)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def last(opt_state: Any) -> jax.Array | float:
    """The latest xi anywhere in an optimizer state; 0 if no transformation measures it."""

    def is_xi(node: Any) -> bool:
        return isinstance(node, XiState)

    found = [node.xi for node in jax.tree.leaves(opt_state, is_leaf=is_xi) if is_xi(node)]
    return found[0] if found else 0.0


def _xi(
    before: SparseAllreduceState, after: SparseAllreduceState, mean: jax.Array, axis: AxisName
) -> jax.Array:
    size, shard_axis = mean.shape[0], after.settings.shard_axis
    if not size:
        return jnp.zeros((), jnp.float32)

    def mean_of(residual):
        rows = residual[0].astype(jnp.float32)
        total = transport.psum(rows, _axes.outer_axis(axis, shard_axis))
        if shard_axis:
            total = transport.all_gather(total, shard_axis).reshape(-1)[:size]
        return total / transport.axis_size(axis)

    accumulated = mean + mean_of(after.residual)
    gradient = accumulated - after.settings.decay * mean_of(before.residual)
    k = jnp.clip(after.info.delivered, 1, size)
    chosen, _ = extend.largest_mask(extend.magnitude_bits(accumulated), k)
    wanted = jnp.where(chosen & (after.info.delivered > 0), accumulated, 0.0)
    off, norm = jnp.sum(jnp.square(wanted - mean)), jnp.sum(jnp.square(gradient))
    return jnp.where(norm > 0, jnp.sqrt(off / jnp.where(norm > 0, norm, 1.0)), 0.0)
