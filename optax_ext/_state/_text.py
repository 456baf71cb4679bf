"""Values of any kind, as from a file, compared and shown."""

import numbers
from typing import Any


def equal(one: Any, other: Any) -> bool:
    """Whether both are the same kind of value, and equal.

    A tuple is a list, as in JSON, and an integer of NumPy is an integer.
    """
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if _is_integer(one) and _is_integer(other):
        return bool(one == other)
    # Of an array no comparison says yes or no.
    return type(one) is type(other) and bool(one == other)


def short(value: Any) -> str:
    """The value for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
