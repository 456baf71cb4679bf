"""Neighbours of a default: the whole optimizer of a task with other options, by name."""

import argparse
import inspect
import json
from collections.abc import Sequence
from typing import Any

import optax_ext
import sparse_collectives as sc

from ._contestants import DENSITY, Contestant, whole
from ._tasks import ADAMW, KINDS

Option = tuple[str, Any]
# Arguments of the optimizers that are numbers; those of `residual`; and what makes others of one.
_NUMBERS = ("density", "b2", "eps", "weight_decay", "gain", "dense_steps")
_OF_RESIDUAL = ("step_ahead", "decay")
_MADE = {
    "bits": ("exchange", lambda bits: sc.allreduce.agreed(bits=bits)),
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


def neighbour(task: str, share: float, given: Sequence[Option]) -> tuple[str, Contestant]:
    """``sparse_adamw``, or ``sparse_sgd`` where the task has that, with other options.

    Args:
      task: a key of KINDS.
      share: what the density is multiplied by where it is not among the options.
      given: the options.

    Returns:
      A name that has the options in it, and the contestant.

    Raises:
      ValueError: there is no such option, or the value is none for it.
    """
    make = optax_ext.sparse_adamw if KINDS[task].optimizer == ADAMW else optax_ext.sparse_sgd
    arguments = inspect.signature(make).parameters
    possible = [name for name in _NUMBERS if name in arguments] + list(_OF_RESIDUAL)
    possible += [name for name, (argument, _) in _MADE.items() if argument in arguments]
    options: dict[str, Any] = {"density": 5 * share * DENSITY}
    kept = {"step_ahead": "auto"}
    for name, value in given:
        if name not in possible:
            raise ValueError(f"{make.__name__} has no {name!r} here: it has {', '.join(possible)}")
        try:
            if name in _OF_RESIDUAL:
                kept[name] = value
            elif name in _MADE:
                argument, made = _MADE[name]
                options[argument] = made(value)
            else:
                options[name] = value
            contestant = whole(make, residual=optax_ext.residual(**kept), **options)
            # What is wrong shows when it is made.
            contestant(0.1, 10)
        except TypeError as error:
            raise ValueError(f"{name}={value}: {error}") from error
    values = [
        f"{name}={value if isinstance(value, str) else format(value, 'g')}"
        for name, value in sorted(given)
    ]
    return " ".join([make.__name__, *values]), contestant
