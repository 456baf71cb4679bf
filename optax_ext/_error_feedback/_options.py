"""The options of error feedback, which every transformation takes as keywords; their checks."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._residual import Residual
from sparse_collectives import AxisName, Selector, SparseAllreduce, _axes, _validation

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
    error that names the called function. An option that is a number by default is None in the
    signature, which stands for that number: ``optax.inject_hyperparams`` makes arrays of numbers,
    also of those that have to be static.

    Args:
      *options: ``TypedDict`` types, and functions whose keywords are passed on.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        passed = {p.name: p for source in reversed(options) for p in _parameters(source)}
        numbers = {name for name, p in passed.items() if type(p.default) in (int, float)}
        numbers -= {p.name for p in own}
        known = {n: p.replace(default=None) if n in numbers else p for n, p in passed.items()}
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
            for name in numbers:
                if kwargs.get(name, 0) is None:
                    del kwargs[name]
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


def check_parts(selector: Any, allreduce: Any) -> None:
    """Each part has the type of its argument."""
    wanted = (
        ("selector", selector, Selector, "sparse_collectives.select.topk(density=0.01)"),
        ("allreduce", allreduce, SparseAllreduce, "sparse_collectives.allreduce.topk_a()"),
    )
    for name, part, kind, example in wanted:
        if not isinstance(part, kind):
            raise TypeError(
                f"{name} must be a {kind.__name__}, got {part!r} of type {type(part).__name__}. "
                f"Write for example {name}={example}."
            )


def check_residual_option(residual: Any) -> None:
    """The option was made by :func:`optax_ext.residual`."""
    if residual is not None and not isinstance(residual, Residual):
        raise TypeError(
            f"residual must be made by optax_ext.residual, got {residual!r}. Write for example "
            "residual=optax_ext.residual(jnp.bfloat16, decay=0.99)."
        )


def check_step_ahead(residual: Residual | None, local: Any) -> None:
    """A residual that is applied to the parameters has their unit."""
    if residual is not None and residual.step_ahead and local is None:
        raise ValueError(
            f"residual has step_ahead={residual.step_ahead}, but without local= it holds "
            "gradients, which can't be added to parameters. Apply the learning rate and its sign "
            "before the exchange, with local=optax.scale_by_learning_rate(rate), and use no "
            "optimizer after it; or use optax_ext.sparse_adamw or sparse_sgd."
        )


def check_limit(limit: Any, local: Any) -> None:
    """A limit of updates is positive, and the exchanged values are updates of parameters."""
    if limit is None:
        return
    if local is None:
        raise ValueError(
            "limit bounds how far an entry of the parameters moves in a step, but without local= "
            "the exchanged values are gradients. Apply the learning rate and its sign before the "
            "exchange, with local=optax.scale_by_learning_rate(rate), and use no optimizer after "
            "it; or use optax_ext.sparse_adamw. To clip gradients, use "
            "optax_ext.local_clip_by_global_norm."
        )
    check_positive_limit(limit)


def check_positive_limit(limit: Any) -> None:
    """A limit is a schedule, an array, or a number above 0."""
    check_width("limit", limit)
    if callable(limit) or isinstance(limit, jax.Array):
        return
    number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not number or not limit > 0:
        raise ValueError(f"limit must be a number greater than 0 or None, got {limit!r}.")


def check_every(every: Any) -> int:
    """H; 1 for None, the default, as optax.inject_hyperparams would make an array of a number."""
    return 1 if every is None else _validation.check_positive_int("every", every)


def check_late(decay: float, dense_steps: Any) -> None:
    """An exchange during the steps of a round is sparse, and its residuals have no decay."""
    if decay != 1.0:
        raise ValueError(
            f"residual(decay={decay}) in optax_ext.make_train_round: workers take steps during an "
            "exchange, and a decay at its end would lose a part of the delivered entries. Leave "
            "decay out."
        )
    if callable(dense_steps) or dense_steps:
        raise ValueError(
            f"dense_steps={dense_steps!r} in optax_ext.make_train_round, whose exchanges are all "
            "sparse. Take the dense steps with optax_ext.make_train_step, and make the rounds with "
            "a tx that has none: the state is the same."
        )


def check_rounds(every: Any, local: Any, dense_leaves: Any) -> int:
    """H; in rounds residuals hold updates of parameters, and every parameter has a residual."""
    every = check_every(every)
    if every == 1:
        return every
    if local is None:
        raise ValueError(
            f"every={every} lets each worker take its own steps between two exchanges, but without "
            "local= its residual holds gradients, which are no steps of the parameters. Apply the "
            "learning rate and its sign before the exchange, with "
            "local=optax.scale_by_learning_rate(rate), and use no optimizer after it; or use "
            "optax_ext.sparse_adamw or sparse_sgd. To accumulate gradients and exchange their sum: "
            "optax_ext.multi_steps(tx, k)."
        )
    if dense_leaves is not None:
        raise ValueError(
            f"every={every} lets each worker take its own steps between two exchanges, and dense "
            "leaves have no residual that keeps them. Leave out dense_leaves=, or write every=1."
        )
    return every


def check_hyperparameter(name: str, value: Any, low: float, high: float) -> float | jax.Array:
    """A number in [low, high], or a scalar array of any value from ``inject_hyperparams``."""
    if not isinstance(value, jax.Array):
        number = _validation.check_number(name, value, low, high)
        if math.isinf(number):
            raise ValueError(f"{name} must be finite, got {value!r}.")
        return number
    if value.shape:
        raise ValueError(f"{name} must be a number or a scalar, got an array of {value.shape}.")
    check_width(name, value)
    return value.astype(jnp.float32)


def check_decay_rate(name: str, value: Any, what: str) -> float | jax.Array:
    """As :func:`check_hyperparameter`, in [0, 1): the decay of an average of ``what``."""
    value = check_hyperparameter(name, value, 0.0, 1.0)
    if isinstance(value, float) and value == 1.0:
        raise ValueError(f"{name} must be less than 1, got 1.0: {what} would ignore gradients.")
    return value


def check_momentum(momentum: Any) -> float:
    """A momentum in [0, 1)."""
    momentum = _validation.check_number("momentum", momentum, 0.0, 1.0)
    if momentum == 1.0:
        raise ValueError(
            "momentum must be less than 1, got 1.0: the velocity would grow without bound. Write "
            "for example momentum=0.9."
        )
    return momentum


def check_width(name: str, value: Any) -> None:
    """An array of ``inject_hyperparams`` is not narrower than float32.

    In bfloat16 0.999 is 1, and in float16 1e-8 is 0.
    """
    if isinstance(value, jax.Array) and value.dtype.itemsize < 4:
        raise ValueError(
            f"{name} is an array of {value.dtype}, in which hyperparameters round (b2=0.999 is 1 "
            "in bfloat16, eps=1e-8 is 0 in float16). optax.inject_hyperparams takes the dtype of "
            "the parameters: write optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
        )


def check_learning_rate(rate: Any) -> Any:
    """A number, an array of ``inject_hyperparams``, or a schedule, whose numbers are checked."""
    number = isinstance(rate, int | float | np.generic | np.ndarray)
    if not number and not isinstance(rate, jax.Array) and not callable(rate):
        raise TypeError(
            f"learning_rate must be a number, such as 1e-3, or a schedule of optax, got {rate!r}."
        )
    if callable(rate):
        return lambda count: _one_rate(rate(count))
    check_width("learning_rate", rate)
    if number and not np.isfinite(rate).all():
        raise ValueError(f"learning_rate must be finite, got {rate!r}: every step is skipped.")
    return _one_rate(rate)


def _one_rate(rate: Any) -> Any:
    if np.shape(rate):
        raise ValueError(
            f"learning_rate must be one number, got an array of shape {np.shape(rate)}. For parts "
            "with learning rates of their own use optax.partition."
        )
    return rate


def whether_dense(answer: Any) -> jax.Array:
    """The answer of a function ``dense_steps``, as ``bool[]``."""
    given = jnp.asarray(answer) if isinstance(answer, (bool, np.bool_, jax.Array)) else None
    if given is None or given.shape or given.dtype != jnp.bool_:
        came = repr(answer) if given is None else f"{given.dtype}{list(given.shape)}"
        raise ValueError(
            "dense_steps must return one bool for the number of the step, as lambda step: "
            f"step >= 9000 does; it returned {came}."
        )
    return given


def check_densities(selector: Selector, allreduce: SparseAllreduce) -> None:
    """The selector selects no more than the allreduce delivers, if both declare a density."""
    specs = selector.spec, allreduce.spec
    selected, delivered = (None if spec is None else spec.number("density") for spec in specs)
    if selected is not None and delivered is not None and selected > delivered:
        raise ValueError(
            f"the selector has density={selected} and the allreduce density={delivered}: every "
            "worker would select entries that the result has no room for, and keep them. Give "
            f"both density={selected}, or both density={delivered}."
        )


def check_row_axes(selector: Selector, allreduce: SparseAllreduce) -> None:
    """Selector and allreduce have the same rows, if both declare an axis of rows."""
    specs = selector.spec, allreduce.spec
    selected, delivered = (None if spec is None else spec.number("row_axis") for spec in specs)
    if None not in (selected, delivered) and selected != delivered:
        raise ValueError(
            f"the selector has row_axis={selected:g} and the allreduce row_axis={delivered:g}: "
            "entries of a row of the one are in many rows of the other, and find no slot. Give "
            f"both row_axis={selected:g}, or both row_axis={delivered:g}."
        )


def check_shard_axis(axis: AxisName, shard_axis: AxisName) -> None:
    """``axis`` has the axes of the nodes and, as ``shard_axis``, of the workers in a node."""
    # In the form in which it was given: a single name is not a tuple.
    names = _axes.axis_names(shard_axis)
    _axes.outer_axis(axis, names[0] if len(names) == 1 else names)
