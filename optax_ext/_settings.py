"""What a state was made for, in words: so that a checkpoint can be checked."""

import dataclasses
import functools
import types
from typing import Any

import jax

from sparse_collectives._types import AxisName


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a :func:`sparse_allreduce`, as part of its state's tree.

    A pytree without leaves: all of it is static.

    Attributes:
      selector: the selector with its arguments, as ``topk(density=0.01)``.
      allreduce: the allreduce with its arguments.
      learning_rate: whether a learning rate was applied before accumulation. It is
        the unit of the residual.
      residual: dtype and decay of the residual.
      axis: the mesh axis of the workers.
    """

    selector: str
    allreduce: str
    learning_rate: bool
    residual: str
    axis: AxisName


def describe(part: Any) -> str:
    """The factory of a selector, allreduce or codec, and the arguments it keeps.

    They are read from the closures of its functions, so that every factory is
    described, also those of users, and none has to say it twice. Values other than
    numbers, strings, and parts made by factories are left out.

    Example:
      >>> import sparse_collectives as sc
      >>> describe(sc.select.topk(density=0.1))
      'topk(density=0.1)'
    """
    found: dict[str, str] = {}
    functions = [f for f in part if callable(f)]
    _collect(functions, found, {id(part)})
    arguments = ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
    return f"{_factory(functions)}({arguments})"


def _factory(functions: list[Any]) -> str:
    """The name of the factory that the last function with a closure was made in."""
    made = [
        name.split(".<locals>")[0]
        for function in functions
        if ".<locals>" in (name := getattr(function, "__qualname__", ""))
    ]
    # A factory that needs no closure is named by the module of its functions.
    return made[-1] if made else functions[-1].__module__.rpartition(".")[2].lstrip("_")


def _collect(functions: list[Any], found: dict[str, str], seen: set[int]) -> None:
    for function in functions:
        if isinstance(function, functools.partial):
            function = function.func
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
            if value is None or isinstance(value, bool | int | float | str):
                found[name] = repr(value)
            elif isinstance(value, tuple) and hasattr(value, "_fields"):
                if id(value) not in seen and any(callable(part) for part in value):
                    seen.add(id(value))
                    found[name] = describe(value)
            elif callable(value):
                _collect([value], found, seen)
