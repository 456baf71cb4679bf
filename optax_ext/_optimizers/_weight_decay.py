"""Weight decay after an exchange, which every worker computes alike."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _options, _rounded
from optax_ext._error_feedback._sparse_state import SparseAllreduceState


def decayed(
    sparse: optax.GradientTransformationExtraArgs,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """``sparse`` followed by weight decay, which every worker computes locally.

    The state is the state of ``sparse``; a step that ``sparse`` skips decays nothing. A decay, or
    an update, is often smaller than half a unit in the last place of a 16-bit parameter. What such
    a parameter cannot take of its step goes back into the residuals, so that it is taken later.

    Args:
      sparse: a :func:`sparse_allreduce` whose output are updates of the parameters.
      learning_rate: the factor on the decay.
      weight_decay: the decay of the parameters for a learning rate of 1.
      mask: True for leaves that decay, in any form that ``optax.masked`` takes. None: all leaves.
    """
    weight_decay = _options.check_hyperparameter("weight_decay", weight_decay, 0.0, float("inf"))
    decays_some = not isinstance(weight_decay, float) or weight_decay > 0

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        if params is None and decays_some:
            raise ValueError(
                "weight_decay needs the parameters: call tx.update(gradients, state, params)."
            )
        updates, updated = sparse.update(updates, state, params, **extra)
        new = cast(SparseAllreduceState, updated)
        if params is None:
            return updates, new
        if not decays_some:
            wanted = jax.tree.map(lambda update: update.astype(jnp.float32), updates)
            return _rounded.updates(wanted, updates, params, new)
        stepped = (new.count - state.count).astype(jnp.float32)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        # Zero times infinity is not zero, and in rounds a step counts that no worker has taken.
        taken = (stepped > 0) & jnp.isfinite(rate)
        factor = jnp.where(taken, stepped * rate * weight_decay, 0.0)

        def decay(update, parameter, decays):
            update = update.astype(jnp.float32)
            return update - factor * parameter.astype(jnp.float32) if decays else update

        wanted = jax.tree.map(decay, updates, params, _decaying(mask, params))
        return _rounded.updates(wanted, updates, params, new)

    return optax.GradientTransformationExtraArgs(sparse.init, cast(Any, update))


def _decaying(mask: Any, params: Any) -> Any:
    """Whether each leaf decays, as a tree of booleans. ``optax.masked`` itself reads the mask."""
    chosen = optax.stateless(lambda updates, _: jax.tree.map(lambda _: True, updates))
    state: Any = optax.EmptyState()
    if mask is not None:
        chosen, state = optax.masked(chosen, mask), optax.MaskedState(state)
    marked, _ = chosen.update(params, state, params)
    return jax.tree.map(lambda leaf: leaf is True, marked)
