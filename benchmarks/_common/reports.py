"""Reports in JSON files: written whole, and checked when they are read.

A pattern says what a file must hold. A dictionary: what must be under its keys; others may be
there. A list of one pattern: a list of what fits it, at least one; a tuple of one pattern: the
same, and none will do. A function: a single value, of which it says what else it expects, or None.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .options import InputError

Check = Callable[[Any], str | None]
Pattern = dict[str, "Pattern"] | list["Pattern"] | tuple["Pattern"] | Check


def write(path: Path | None, content: Any) -> None:
    """Writes a report where there is a path; what was there stays until all of it is written."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    text = json.dumps(content, indent=1, default=lambda x: np.asarray(x).tolist())
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path, pattern: Pattern, source: str) -> Any:
    """The content of a report that fits the pattern, as ``source`` writes it, or an InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a JSON file of {source}: {error}") from error
    complaint = _complaint(content, pattern, "")
    if complaint:
        raise InputError(f"{path} is not a file of {source}: {complaint}")
    return content


def number(least: float, most: float) -> Check:
    """A number in ``[least, most]``."""
    expected = f"a number from {least:g} to {most:g}"
    return lambda x: None if type(x) in (int, float) and least <= x <= most else expected


def whole(least: int, most: int = 2**31 - 1) -> Check:
    """A whole number in ``[least, most]``."""
    expected = f"a whole number from {least} to {most}"
    return lambda x: None if type(x) is int and least <= x <= most else expected


def text() -> Check:
    """A string."""
    return lambda x: None if isinstance(x, str) else "a string"


def _complaint(value: Any, pattern: Pattern, where: str) -> str | None:
    """The first thing that does not fit, in words; None where all does."""
    expected, parts = None, []
    if isinstance(pattern, dict):
        if not isinstance(value, dict) or not pattern.keys() <= value.keys():
            expected = f"an object with {', '.join(pattern)}"
        else:
            parts = [(value[key], inner, f"{where}.{key}") for key, inner in pattern.items()]
    elif isinstance(pattern, list | tuple):
        if not isinstance(value, list) or (isinstance(pattern, list) and not value):
            expected = "a list with something in it"
        else:
            parts = [(x, pattern[0], f"{where}[{i}]") for i, x in enumerate(value)]
    else:
        expected = pattern(value)
    if expected:
        return f"{where.lstrip('.') or 'it'} must be {expected}, got {json.dumps(value)[:40]}"
    return next(filter(None, (_complaint(*part) for part in parts)), None)
