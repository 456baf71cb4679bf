"""Steps of parameters in 16 bits, whose rounding errors go back into the residuals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _buffers, _layout, _residual
from optax_ext._error_feedback._residual import Residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from sparse_collectives import _varying, transport


def updates(wanted: Any, like: Any, params: Any, state: SparseAllreduceState) -> Any:
    """``wanted``, which all workers have alike, as updates of ``params``.

    What a 16-bit parameter cannot take of its step is added to the residual of each worker, so that
    the mean over the workers is that error. A leaf without a residual loses it.

    Args:
      wanted: the steps, in float32.
      like: updates in the dtypes to return.
      params: the parameters.
      state: the state after the step.

    Returns:
      ``(updates, state)``.
    """
    leaves, treedef = jax.tree.flatten(wanted)
    each = zip(leaves, treedef.flatten_up_to(like), treedef.flatten_up_to(params), strict=True)
    made = [of_leaf(*x) for x in each]
    result = treedef.unflatten([update for update, _ in made])
    errors = [error for _, error in made]
    narrow = [
        error is not None and not dense
        for error, dense in zip(errors, state.layout.dense, strict=True)
    ]
    if not any(narrow):
        return result, state
    whole = [
        jnp.zeros(jnp.shape(update), jnp.float32) if error is None else error
        for (update, error) in made
    ]
    return result, _returned(state, whole)


def of_leaf(wanted: jax.Array, like: jax.Array, parameter: Any) -> tuple[jax.Array, Any]:
    """The update of a leaf, and what the parameter does not take of it; None if it takes all."""
    if like.dtype == jnp.float32:
        return wanted, None
    kind = jnp.finfo(like.dtype)
    before = parameter.astype(jnp.float32)

    def as_stored(x: jax.Array) -> jax.Array:
        # XLA may leave out a conversion to 16 bits and back.
        return lax.reduce_precision(x, kind.nexp, kind.nmant)

    update = as_stored(wanted)
    error = (before + wanted) - as_stored(before + update)
    # A step that overflows has no error to keep.
    return update.astype(like.dtype), jnp.where(jnp.isfinite(error), error, 0.0)


def _returned(state: SparseAllreduceState, errors: list[jax.Array]) -> SparseAllreduceState:
    """The state with the errors of each leaf, ``f32``, added to the residual of every worker."""
    settings = state.settings
    # Parameters may be boxed, but the leaves of all trees have the same order.
    layout = dataclasses.replace(state.layout, treedef=jax.tree.structure(errors))

    def on_device(errors: list[jax.Array], residual: jax.Array, count: jax.Array) -> jax.Array:
        part = _layout.device_layout(layout)
        flat, _ = _buffers.ravel(_layout.take(errors, layout), part)
        shard = residual.shape[1]
        if settings.shard_axis:
            # Each shard of a node stands for all of its workers.
            inside = transport.axis_size(settings.shard_axis)
            flat = inside * jnp.pad(flat, (0, shard * inside - flat.size))
            start = transport.axis_index(settings.shard_axis) * shard
            flat = lax.dynamic_slice_in_dim(flat, start, shard)
        how = Residual(dtype=residual.dtype)
        value = _residual.load(residual, flat.size) + flat[None]
        # Other random numbers than in the step itself.
        return _residual.store(value, how, axis=settings.axis, count=~count)

    spec = jax.sharding.PartitionSpec(layout.sharding.axes or None)
    residual = _layout.on_each_device(
        on_device,
        layout.sharding,
        settings.axis,
        in_specs=(_layout.specs_of(layout), spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
    )(errors, state.residual, state.count)
    return state._replace(residual=_varying.varying_like(residual, state.residual))
