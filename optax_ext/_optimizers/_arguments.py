"""Errors for arguments that the optimizers of optax have and ours have not."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")

_T = TypeVar("_T")

_MOMENTUM = {
    "b1": "there is no first moment, because the residuals average gradients already. Leave b1 out",
    "momentum": "the residuals act as momentum already. Leave momentum out, and begin with "
    "1 / (1 - momentum) times the learning rate",
}


def rate_alone(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """The factory with errors that help users of the optimizers of optax.

    A second positional argument could be meant as ``b1``, as in ``optax.adamw``, as the momentum,
    as in ``optax.sgd``, or as the density, and 0.9 is valid for each of them.

    Args:
      factory: its first parameter is the learning rate, and all others are keywords.
    """
    name, known = getattr(factory, "__name__", ""), inspect.signature(factory).parameters

    @functools.wraps(factory)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 1:
            raise TypeError(
                f"{name} takes the learning rate and keywords, got {args[1]!r} as well: write "
                f"{name}(learning_rate, density={args[1]!r}, axis=...), if it is the density that "
                "you mean. (The second argument is b1 in optax.adamw and momentum in optax.sgd; "
                "neither is valid here.)"
            )
        for momentum, reason in _MOMENTUM.items():
            if momentum in kwargs and momentum not in known:
                raise TypeError(f"{name} has no {momentum}=: {reason}.")
        return factory(*args, **kwargs)

    return checked
