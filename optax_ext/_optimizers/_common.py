"""What the optimizers have in common: the rate in front of the exchange, the decay behind it."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._selection import selection
from optax_ext._state import _whole
from optax_ext._step import _checks
from optax_ext._step._local import Elementwise
from optax_ext._step._residual import Residual
from optax_ext._step._residual import residual as how_kept
from optax_ext._step._sparse_state import SparseAllreduceState
from optax_ext._transforms._sparse_allreduce import sparse_allreduce
from sparse_collectives import AxisName, Selector, SparseAllreduce, _validation, transport
from sparse_collectives.allreduce import agreed

# What is None by default is no number that optax.inject_hyperparams makes an array of.
DENSITY = 0.05


def in_front(
    learning_rate: optax.ScalarOrSchedule, gain: float | None, axis: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Updates of the parameters: minus the rate, times the gain, times what comes in.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      gain: None: that of :func:`default_gain`.
      axis: of the workers.
    """

    def update(updates: Any, state: Any, params: Any = None):
        del params
        factor = default_gain(transport.axis_size(axis)) if gain is None else gain
        return jax.tree.map(lambda u: factor * u, updates), state

    scale = optax.GradientTransformation(lambda params: optax.EmptyState(), cast(Any, update))
    # optax before 0.2.6 declares a float, but an array (of inject_hyperparams) works as well.
    return optax.chain(scale, optax.scale_by_learning_rate(cast(Any, learning_rate)))


def default_gain(workers: int) -> float:
    """What makes up for the noise of one worker's gradient: sqrt(P / 2), from 1 to 2."""
    return min(2.0, max(1.0, (workers / 2) ** 0.5))


def limit_of(
    limit: float | None, learning_rate: optax.ScalarOrSchedule, density: float
) -> optax.ScalarOrSchedule | None:
    """The limit of an entry of an update, from what it is as a multiple of the rate."""
    if limit is None:
        return None
    if callable(limit):
        raise ValueError(
            "limit must be a number greater than 0 or None, got a function: it is a multiple of "
            "the learning rate, which may be a schedule."
        )
    _checks.check_positive_limit(limit)
    # An entry waits 1 / density steps for its turn, and what it has then are as many updates.
    factor = limit * max(1.0, DENSITY / _validation.check_density(density))
    if callable(learning_rate):
        return lambda count: factor * learning_rate(count)
    return lambda count: factor * learning_rate


def whole(
    local: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    density: float,
    *,
    weight_decay: float | jax.Array,
    mask: Any,
    selector: Selector | None,
    allreduce: SparseAllreduce | None,
    residual: Residual | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with ``local``, which has the rate, before the accumulation.

    The defaults of what is None are those that :func:`optax_ext.sparse_adamw` documents, and
    ``options`` are those of :func:`optax_ext.sparse_allreduce`.
    """
    sparse = sparse_allreduce(
        selection(density, selector),
        agreed(bits=None) if allreduce is None else allreduce,
        # What the optimizers here do to an entry does not depend on its leaf.
        local=Elementwise(local.init, local.update),
        residual=how_kept(step_ahead=1.0) if residual is None else residual,
        **options,
    )
    return decayed(_whole.whole(sparse), learning_rate, weight_decay, mask)


def decayed(
    sparse: optax.GradientTransformationExtraArgs,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """``sparse`` with weight decay behind it, which every worker computes by itself.

    The state is that of ``sparse``; a step that it skips decays nothing.

    Args:
      sparse: a :func:`sparse_allreduce` whose updates are those of the parameters.
      learning_rate: what the decay is multiplied with.
      weight_decay: of the parameters, for a rate of 1.
      mask: a tree of booleans like the parameters, or a function from them to it: where
        there is decay. None: everywhere.
    """
    weight_decay = _checks.check_hyperparameter("weight_decay", weight_decay, 0.0, float("inf"))
    if isinstance(weight_decay, float) and not weight_decay:
        return sparse

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        if params is None:
            raise ValueError(
                "weight_decay needs the parameters: call tx.update(gradients, state, params)."
            )
        updates, updated = sparse.update(updates, state, params, **extra)
        new = cast(SparseAllreduceState, updated)
        stepped = (new.count - state.count).astype(jnp.float32)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        factor = stepped * rate * weight_decay

        def decay(update, parameter, decays):
            if not decays:
                return update
            return update - (factor * parameter.astype(jnp.float32)).astype(update.dtype)

        where = mask(params) if callable(mask) else mask
        if where is None:
            where = jax.tree.map(lambda _: True, params)
        return jax.tree.map(decay, updates, params, where), new

    return optax.GradientTransformationExtraArgs(sparse.init, cast(Any, update))
