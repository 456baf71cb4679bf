"""Learning rate, gain and limit of an optimizer, and the decay of its first moment."""

import math
from typing import Any, cast

import jax
import optax

from optax_ext._error_feedback import _options
from sparse_collectives import AxisName, _validation, transport

# The default stands here, and the argument is None: optax.inject_hyperparams would make an array
# of a number.
DENSITY = 0.05
# The default b1 of local steps.
FIRST_MOMENT = 0.9


def in_front(
    learning_rate: optax.ScalarOrSchedule, gain: float | None, axis: AxisName, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Updates of the parameters: incoming values times minus the learning rate and the gain.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      gain: None: :func:`default_gain`, or 1 for local steps.
      axis: the mesh axis of the workers.
      every: steps from one exchange to the next.
    """
    learning_rate = _options.check_learning_rate(learning_rate)
    if gain is None and every > 1:
        gain = 1.0
    if gain is not None:
        gain = cast(Any, _options.check_hyperparameter("gain", gain, 0.0, math.inf))
    if isinstance(gain, float) and not gain:
        raise ValueError(
            f"gain must be greater than 0, got {gain}: no parameter would move. Leave it out for "
            "sqrt(P / 2) up to 2, or write gain=1.0."
        )

    def update(updates: Any, state: Any, params: Any = None):
        del params
        factor = default_gain(transport.axis_size(axis)) if gain is None else gain
        return jax.tree.map(lambda u: factor * u, updates), state

    scale = optax.GradientTransformation(lambda params: optax.EmptyState(), cast(Any, update))
    # optax before 0.2.6 declares a float, but an array (of inject_hyperparams) works as well.
    return optax.chain(scale, optax.scale_by_learning_rate(cast(Any, learning_rate)))


def default_gain(workers: int) -> float:
    """The learning-rate multiplier for the noise of one worker: sqrt(P / 2), from 1 to 2."""
    return min(2.0, max(1.0, (workers / 2) ** 0.5))


def first_moment(b1: Any, every: int, moments: str) -> float | jax.Array | None:
    """The decay of the first moment; None if there is no first moment."""
    if b1 is None:
        return FIRST_MOMENT if every > 1 and moments == "entries" else None
    if every == 1:
        raise ValueError(
            f"b1={b1!r} is for rounds (every=), and with an exchange at every step there is no "
            "first moment, because the residuals average gradients already. Leave b1 out."
        )
    if moments != "entries":
        raise ValueError(
            f'b1={b1!r} goes with moments="entries", and moments is {moments!r}. Leave one of them '
            "out."
        )
    return _options.check_decay_rate("b1", b1, "the first moment")


def limit_of(
    limit: float | None, learning_rate: optax.ScalarOrSchedule, density: float, every: int
) -> optax.ScalarOrSchedule | None:
    """The limit of an entry of an update, from its multiple of the learning rate."""
    if limit is None:
        return None
    if callable(limit):
        raise ValueError(
            "limit must be a number greater than 0 or None, got a function: it is a multiple of "
            "the learning rate, which may be a schedule."
        )
    _options.check_positive_limit(limit)
    # An entry waits 1 / density exchanges for its turn, and has accumulated as many updates then.
    factor = limit * max(1.0, DENSITY / _validation.check_density(density)) * every
    # A negative learning rate maximizes.
    if callable(learning_rate):
        return lambda count: factor * abs(learning_rate(count))
    return lambda count: factor * abs(learning_rate)
