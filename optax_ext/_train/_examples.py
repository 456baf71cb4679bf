"""Which arguments of a step are its batch, and are split over the workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._state import _batch_checks, _nnx, _wrappers
from optax_ext._train import _ahead
from sparse_collectives import _validation

Examples = int | str | tuple[str, ...] | None


class Chosen:
    """The arguments of a step that are split over the workers, by their positions.

    Args:
      step: the function.
      examples: how many of the last arguments, or their names; None: they are found.

    Raises:
      ValueError: ``examples`` is below 1, or no name of an argument.
    """

    def __init__(self, step: Callable[..., Any], examples: Examples):
        self._step = getattr(step, "__name__", "step")
        self._signature = _signature_of(step)
        self._names = [x.name for x in self._parameters() if x.kind in _BY_POSITION]
        self._count, self._at = None, None
        if isinstance(examples, (str, tuple, list)):
            given = (examples,) if isinstance(examples, str) else tuple(examples)
            if not given or not set(given) <= set(self._names):
                raise ValueError(
                    f"examples={examples!r} must be names of arguments of {self._step}, which has "
                    f"{self._names}, or how many of the last arguments are the batch."
                )
            self._at = tuple(sorted(map(self._names.index, given)))
        elif examples is not None:
            self._count = _validation.check_positive_int("examples", examples)

    def by_position(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments of a call in their order, with defaults for those in between.

        Raises:
          TypeError: the step does not take them, or some by keyword only.
        """
        # A part of the batch may have a default.
        missing = self._at is not None and self._at[-1] >= len(args)
        if not named and not missing:
            return args
        others = [name for name in named if name not in self._names]
        if self._signature is None and not named:
            return args
        if others or self._signature is None:
            raise TypeError(
                f"{self._step} takes no argument {(others or [*named])[0]!r} that data_parallel "
                "could give it by position: let it have one, before any *, or bind it with "
                "functools.partial."
            )
        bound = self._signature.bind(*args, **named)
        if bound.kwargs or missing:
            bound.apply_defaults()
        return bound.args

    def _parameters(self) -> list[inspect.Parameter]:
        return [*self._signature.parameters.values()] if self._signature else []

    def positions(self, args: tuple[Any, ...], workers: int) -> tuple[int, ...]:
        """The positions in ``args``.

        Without ``examples`` it is the last argument with an array that is neither a scalar nor a
        key of ``jax.random``.

        Raises:
          ValueError: an argument of ``examples`` holds the optimizer's state or the parameters.
          ValueError: another argument might be examples too.
          ValueError: arguments of ``examples`` that are missing, or nothing but keys.
        """
        at = self._at
        if self._count is not None:
            at = tuple(range(max(len(args) - self._count, 0), len(args)))
        if at is None:
            return (self._found(args, workers),)
        if at[-1] >= len(args) or not any(_has_rows(args[i]) for i in at):
            raise ValueError(
                f"examples= makes {self._listed(at)} of {self._step} the batch, which has no array "
                "to split over the workers (a key or a number is none). Name the arguments that "
                f"are the batch, {self._written(at[:1])}, or leave examples= out."
            )
        return at

    def _found(self, args: tuple[Any, ...], workers: int) -> int:
        with_rows = [i for i, arg in enumerate(args) if _has_rows(arg)]
        kept = {i for i, arg in enumerate(args) if _is_kept(arg, args)}
        if with_rows[-1] in kept:
            others = [i for i in with_rows if i not in kept]
            raise ValueError(
                f"{self._step} ends with {self._listed(with_rows[-1:])}, the model or its "
                "optimizer, and data_parallel splits the last argument that has examples over the "
                f"workers. Put the batch last, or name it: data_parallel({self._written(others)})."
            )
        batch = with_rows[-1]
        leads = _leads(args[batch])
        state = min(i for i, arg in enumerate(args) if _wrappers.reductions(arg))
        for i in with_rows[:-1]:
            rows = _leads(args[i])
            after = i > state and not any(x % workers for x in rows)
            if i not in kept and (after or len(rows) == 1 and rows == leads):
                raise ValueError(
                    f"{self._listed([i])} of {self._step} may hold examples, as "
                    f"{self._listed([batch])} does, and only the latter would be split over the "
                    "workers. Name the arguments that are split: "
                    f"data_parallel({self._written([i, batch])}), or "
                    f"data_parallel({self._written([batch])}) if all workers need the whole of the "
                    "other."
                )
        return batch

    def _listed(self, at: Any) -> str:
        return " and ".join(f"argument {i} ({''.join(self._names[i : i + 1])})" for i in at)

    def _written(self, at: Any) -> str:
        named = tuple(name for i in at for name in self._names[i : i + 1]) or ("x", "y")
        return f"examples={(named[0] if len(named) == 1 else named)!r}"


_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def _signature_of(step: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):
        return None


def _has_rows(arg: Any) -> bool:
    """Whether it has an array that is neither a scalar nor a key."""
    return any(jnp.ndim(x) and not _batch_checks.is_key(x) for x in _arrays_of(arg))


def _leads(arg: Any) -> set[int]:
    return {jnp.shape(x)[0] if jnp.ndim(x) else 0 for x in _arrays_of(arg)}


def _arrays_of(arg: Any) -> list[Any]:
    return list(filter(_ahead.is_array, jax.tree.leaves(arg)))


def _is_kept(arg: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a model or an optimizer: a module, a state, or shaped as the parameters."""
    if _nnx.is_module(arg) or _wrappers.reductions(arg):
        return True
    shapes = sorted(map(jnp.shape, _arrays_of(arg)))
    return bool(shapes) and shapes in map(_shapes_of, (args, *args))


def _shapes_of(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of the parameters of the optimizers in a tree; an argument may be of one."""
    states = _wrappers.get_states(tree)
    return sorted(shape for state in states for shape in state.layout.shapes)
