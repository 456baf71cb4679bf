"""The spec of a part: its name and arguments, declared by the factory that made it.

A checkpoint is compared with the program that restores it by their specs. Specs are
therefore part of a format: they change when the meaning of a part changes, and not
when the code of its factory is rewritten.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


@dataclasses.dataclass(frozen=True)
class Spec:
    """The name and the arguments of a factory, as text: ``topk(density=0.01)``.

    Attributes:
      name: the name of the factory.
      arguments: ``(name, text)`` of each argument, in alphabetical order.

    Example:
      >>> Spec.of("topk", density=0.01)
      Spec('topk(density=0.01)')
      >>> str(Spec.of("by_layer", scale=np.ones(2, np.float32), inner=Spec.of("topk", k=3)))
      'by_layer(inner=topk(k=3), scale=float32[2]#80b8fd6d)'
      >>> Spec.of("topk", density=0.01).number("density")
      0.01
    """

    name: str
    arguments: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, factory: str, /, **arguments: Any) -> "Spec | None":
        """The spec of the part that ``factory(**arguments)`` returns.

        Args:
          factory: the name of the factory.
          **arguments: numbers, strings, dtypes, None, arrays, parts that have a spec,
            and tuples, lists and dictionaries of these.

        Returns:
          The spec, or None if a part among the arguments has no spec.

        Raises:
          TypeError: an argument of another kind, whose text could differ between programs.
            Give it a name, as a string.
        """
        if any(hasattr(value, "spec") and value.spec is None for value in arguments.values()):
            return None
        texts = tuple((name, as_text(name, value)) for name, value in sorted(arguments.items()))
        return cls(factory, texts)

    def number(self, name: str) -> float | None:
        """The value of a numeric argument; None if there is no such argument."""
        text = dict(self.arguments).get(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={text}' for name, text in self.arguments)})"

    def __repr__(self) -> str:
        return f"Spec({str(self)!r})"


def as_text(name: str, value: Any) -> str:
    """An argument as text that is the same in every program."""
    spec = getattr(value, "spec", value)
    if isinstance(spec, Spec):
        return str(spec)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    # jnp.float32 and similar.
    if callable(value) and isinstance(getattr(value, "dtype", None), np.dtype):
        return value.dtype.name  # pyright: ignore[reportFunctionMemberAccess]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_as_text(value)
    if isinstance(value, Mapping):
        pairs = (f"{as_text(name, key)}: {as_text(name, item)}" for key, item in value.items())
        return "{" + ", ".join(sorted(pairs)) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(as_text(name, item) for item in value) + ")"
    raise TypeError(
        f"{name} is {value!r}, which has no text that is the same in every program. Give numbers, "
        "strings, arrays, parts that have a spec, or containers of these."
    )


def _array_as_text(x: Any) -> str:
    text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return text
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return f"{text}#{hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:8]}"
