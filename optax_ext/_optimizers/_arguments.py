"""Arguments of the dense optimizer that the whole optimizers here lack, or have elsewhere."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MOMENTUM = {
    "b1": "there is no first moment, as the wait in the residuals averages gradients already. "
    "Leave b1 out",
    "momentum": "the wait in the residuals is a momentum already. Leave momentum out, and begin "
    "with 1 / (1 - momentum) times the rate",
}


def rate_alone(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """The factory, which says what to write to who calls it as the optimizer of optax.

    Its second argument is a density, where that of ``optax.adamw`` is b1 and that of
    ``optax.sgd`` a momentum: 0.9 is legal for all of them.

    Args:
      factory: its first parameter is the learning rate, and all others are keywords.
    """
    name = getattr(factory, "__name__", "")

    @functools.wraps(factory)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 1:
            raise TypeError(
                f"{name} takes the learning rate and keywords, got {args[1]!r} as well: write "
                f"{name}(learning_rate, density={args[1]!r}, axis=...), if it is the density that "
                "you mean. (The second argument of optax.adamw is b1, and that of optax.sgd "
                "momentum; these have no place here.)"
            )
        for momentum, reason in _MOMENTUM.items():
            if momentum in kwargs:
                raise TypeError(f"{name} has no {momentum}=: {reason}.")
        return factory(*args, **kwargs)

    return checked
