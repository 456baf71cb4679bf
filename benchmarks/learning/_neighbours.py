"""Neighbours of a default: the whole optimizer of a task with other options, by name."""

import argparse
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import optax_ext
import sparse_collectives as sc

from .._common.contestants import DECAY
from ._contestants import DENSITY, Train, whole
from ._tasks import ADAMW, KINDS

Option = tuple[str, Any]
# Arguments of the optimizers that are numbers; those of `residual`; and what makes others of one.
_NUMBERS = ("density", "b2", "eps", "weight_decay", "gain", "limit", "dense_steps")
_OF_RESIDUAL = ("step_ahead", "decay")
_MADE = {
    "bits": ("allreduce", lambda bits: sc.allreduce.agreed(bits=bits)),
    "momentum": ("correction", optax_ext.momentum_correction),
    "dense_below": ("dense_leaves", lambda size: optax_ext.small_leaves(min_size=size)),
}


def option(text: str) -> Option:
    """The type of ``gain=2``: a name, and a number or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE, such as gain=2")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def neighbour(task: str, share: float, given: Sequence[Option]) -> tuple[str, Train]:
    """``sparse_adamw``, or ``sparse_sgd`` where the task has that, with other options.

    The name has the options in it; a density that is not among them is multiplied by ``share``. A
    ValueError where there is no such option, or the value is none for it.
    """
    make = optax_ext.sparse_adamw if KINDS[task].optimizer == ADAMW else optax_ext.sparse_sgd
    made = arguments(make, given)
    density = made.pop("density", 5 * share * DENSITY)
    contestant = whole(functools.partial(make, **made), density)
    _checked(given, contestant, 0.1, 10)
    return name_of(make, given), contestant


def arguments(make: Callable[..., Any], given: Sequence[Option]) -> dict[str, Any]:
    """What an optimizer is called with for the options; a ValueError as above."""
    taken = inspect.signature(make).parameters
    possible = [name for name in _NUMBERS if name in taken] + list(_OF_RESIDUAL)
    possible += [name for name, (argument, _) in _MADE.items() if argument in taken]
    unknown = [name for name, _ in given if name not in possible]
    if unknown:
        raise ValueError(
            f"{make.__name__} has no {unknown[0]!r} here: it has {', '.join(possible)}"
        )
    made = {"weight_decay": DECAY} if make is optax_ext.sparse_adamw else {}
    made |= {name: value for name, value in given if name in _NUMBERS}
    kept = {name: value for name, value in given if name in _OF_RESIDUAL}
    if kept:
        kept = {"step_ahead": 1.0, **kept}
        made["residual"] = _checked(given, lambda: optax_ext.residual(**kept))
    for name, value in given:
        if name in _MADE:
            argument, function = _MADE[name]
            made[argument] = _checked(given, function, value)
    return made


def name_of(make: Callable[..., Any], given: Sequence[Option]) -> str:
    """The name of an optimizer with options, the same in whatever order they come."""
    values = [
        f"{name}={format(value, 'g') if isinstance(value, (int, float)) else value}"
        for name, value in sorted(given)
    ]
    return " ".join([make.__name__, *values])


def _checked(given: Sequence[Option], make: Callable[..., Any], *values: Any) -> Any:
    """``make(*values)``; of a word in place of a number a ValueError, too."""
    try:
        return make(*values)
    except TypeError as error:
        written = " ".join(f"{name}={value}" for name, value in given)
        raise ValueError(f"{written}: {error}") from error
