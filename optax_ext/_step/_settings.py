"""What a state was made for, in words: so that a checkpoint can be checked."""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


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
      correction: the momentum correction with its arguments, or none.
      axis: the mesh axis of the workers; a ``Ranks`` for an MPI communicator.
    """

    selector: str
    allreduce: str
    learning_rate: bool
    residual: str
    correction: str
    axis: Hashable


def describe(part: Any) -> str:
    """The factory of a selector, allreduce or codec, and the arguments it keeps.

    They are read from the closures of its functions, so that every factory is
    described, also those of users, and none has to say it twice. They are numbers,
    strings, dtypes, parts made by factories, and tuples, lists and dictionaries of these.
    An array is described by dtype, shape and a hash of its content; a tracer, or an array
    that other processes hold, without the hash. Anything else is left out.

    Example:
      >>> import numpy as np, sparse_collectives as sc
      >>> describe(sc.select.topk(density=0.1))
      'topk(density=0.1)'
      >>> def by_layer(densities, scale):
      ...     return (lambda acc: (densities, scale),)
      >>> describe(by_layer((0.1, 0.2), np.ones(2)))
      'by_layer(densities=(0.1, 0.2), scale=float64[2]#5f07eef0)'
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


def _collect(functions: Sequence[Any], found: dict[str, str], seen: set[int]) -> None:
    for function in functions:
        if isinstance(function, functools.partial):
            named = {f"arg{i}": value for i, value in enumerate(function.args)}
            _add({**named, **function.keywords}, found, seen)
            function = function.func
        function = inspect.unwrap(function)  # What jax.jit has wrapped, among others.
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        named = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                named[name] = cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
        _add(named, found, seen)


def _add(named: dict[str, Any], found: dict[str, str], seen: set[int]) -> None:
    for name, value in named.items():
        if _is_part(value):
            if id(value) not in seen:
                seen.add(id(value))
                found[name] = describe(value)
        elif (words := _words(value)) is not None:
            found[name] = words
        elif callable(value):
            _collect([value], found, seen)


def _is_part(value: Any) -> bool:
    """Whether it is a NamedTuple of functions, as selectors and allreduces are."""
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named and any(callable(part) for part in value)


def _words(value: Any) -> str | None:
    """A value in words; None where it says nothing that is the same in every program."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if isinstance(getattr(value, "dtype", None), np.dtype) and callable(value):
        return value.dtype.name  # jnp.float32 and its like.
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_words(value)
    if isinstance(value, Mapping):
        pairs = [(_inner_words(key), _inner_words(item)) for key, item in value.items()]
        return "{" + ", ".join(sorted(f"{key}: {item}" for key, item in pairs)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_inner_words, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_inner_words, value)) + ")"
    return None


def _inner_words(value: Any) -> str:
    """A value in a container, which keeps its place also where it has no words."""
    return describe(value) if _is_part(value) else _words(value) or type(value).__name__


def _array_words(x: Any) -> str:
    words = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return words
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return f"{words}#{hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:8]}"
