"""The options of error feedback, which every transformation that has it takes as keywords."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

import jax
import optax

from optax_ext._step._accumulation import Residual
from optax_ext._step._momentum_correction import MomentumCorrection

# The first so many, or a function of the steps taken, ``i32[]``, that says which.
DenseSteps = int | Callable[[jax.Array], Any]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DEFAULTS = {"nonfinite": "skip"}


class FeedbackOptions(TypedDict, total=False):
    """What every transformation with error feedback takes; :func:`sparse_allreduce` has it all.

    Attributes:
      nonfinite: what to do with what is not finite: ``"skip"`` (the default), ``"drop"``,
        ``"raise"`` or ``"propagate"``.
      residual: from :func:`optax_ext.residual`: dtype, decay and step-ahead of the residual.
      dense_steps: how many steps to begin with are dense, or a function of the steps taken that
        says which. None: none.
      dense_leaves: which leaves are averaged by one dense allreduce: a function of the parameters,
        such as :func:`small_leaves`, or a pytree of labels. None: none.
    """

    nonfinite: str
    residual: Residual | None
    dense_steps: DenseSteps | None
    dense_leaves: Any


class LocalOptions(FeedbackOptions, total=False):
    """And a transformation of each worker's own gradient, before it is accumulated.

    Attributes:
      local: an optax transformation, in float32, with a state for each worker.
    """

    local: optax.GradientTransformation | None


class SparseOptions(LocalOptions, total=False):
    """And what goes with a sparse exchange alone.

    Attributes:
      correction: from :func:`momentum_correction`: momentum before the accumulation.
      limit: a magnitude of an entry of an update, beyond which three quarters of the rest wait.
      every: steps from one exchange to the next. None: 1.
    """

    correction: MomentumCorrection | None
    limit: optax.ScalarOrSchedule | None
    every: int | None


def takes(*options: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Names the options in the signature of a function that takes them as ``**options``.

    ``optax.inject_hyperparams`` and ``help`` see each of them, and one that is mistyped is an error
    of the function that was called.

    Args:
      *options: ``TypedDict`` types, and functions whose keywords are passed on.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        known = {p.name: p for p in own}
        for source in options:
            known = {p.name: p for p in _parameters(source)} | known
        # Those of the function first, in its order.
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
    """Of the options in a ``TypedDict``."""
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
