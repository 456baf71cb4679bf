"""The options of error feedback, which every transformation with it takes as keywords."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

import jax
import optax

from optax_ext._step._accumulation import Residual
from optax_ext._step._momentum_correction import MomentumCorrection

# The number of dense first steps, or a function of the number of steps taken, ``i32[]``.
DenseSteps = int | Callable[[jax.Array], Any]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DEFAULTS = {"nonfinite": "skip"}


class FeedbackOptions(TypedDict, total=False):
    """Options of every transformation with error feedback; see :func:`sparse_allreduce`.

    Attributes:
      nonfinite: the treatment of numbers that are not finite: ``"skip"`` (the default),
        ``"drop"``, ``"raise"`` or ``"propagate"``.
      residual: from :func:`optax_ext.residual`: dtype, decay and step-ahead of the residual.
      dense_steps: the number of first steps that are dense, or a function of the number of steps
        taken that returns whether a step is dense. None: no step.
      dense_leaves: the leaves that one dense allreduce averages: a function of the parameters,
        such as :func:`small_leaves`, or a pytree of labels. None: no leaf.
    """

    nonfinite: str
    residual: Residual | None
    dense_steps: DenseSteps | None
    dense_leaves: Any


class LocalOptions(FeedbackOptions, total=False):
    """:class:`FeedbackOptions`, and a transformation of each worker's own gradient.

    Attributes:
      local: an optax transformation before the accumulation, in float32, with a state for each
        worker.
    """

    local: optax.GradientTransformation | None


class SparseOptions(LocalOptions, total=False):
    """:class:`LocalOptions`, and options of sparse exchanges only.

    Attributes:
      correction: from :func:`momentum_correction`: momentum before the accumulation.
      limit: update clipping: if an entry of an update exceeds this magnitude, 75 % of the excess
        stays in the residuals. None: no clipping.
      every: the steps from one exchange to the next. None: 1.
    """

    correction: MomentumCorrection | None
    limit: optax.ScalarOrSchedule | None
    every: int | None


def takes(*options: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Adds the options to the signature of a function that takes them as ``**options``.

    ``optax.inject_hyperparams`` and ``help`` then see each option, and a mistyped option raises an
    error that names the called function.

    Args:
      *options: ``TypedDict`` types, and functions whose keywords are passed on.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        known = {p.name: p for p in own}
        for source in options:
            known = {p.name: p for p in _parameters(source)} | known
        # The function's own parameters come first, in its order.
        known = {p.name: p for p in own} | known

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1)
                    hint = f" Did you mean {near[0]}=?" if near else ""
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}.{hint} "
                        f"It takes {', '.join(known)}."
                    )
            return function(*args, **kwargs)

        made = signature.replace(parameters=list(known.values()))
        checked.__signature__ = made  # pyright: ignore[reportAttributeAccessIssue]
        return checked

    return decorate


def names(options: type[Any]) -> tuple[str, ...]:
    """The names of the options in a ``TypedDict``."""
    return tuple(get_type_hints(options))


def _parameters(source: Any) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    if not inspect.isclass(source):
        found = inspect.signature(source).parameters.values()
        return [p for p in found if p.kind == keyword]
    return [
        inspect.Parameter(name, keyword, default=_DEFAULTS.get(name), annotation=hint)
        for name, hint in get_type_hints(source).items()
    ]
