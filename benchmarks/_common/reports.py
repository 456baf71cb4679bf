"""Reports in JSON files, written as a whole and checked when they are read.

A pattern describes the content of a file. A dictionary gives a pattern for each required key, and
allows other keys. A list of one pattern matches a list of at least one element that fits it; a
tuple of one pattern also matches an empty list. A function checks a single value: it returns what
it expects instead, or None if the value fits.
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
    """Writes a report if there is a path; an old file stays until the new one is complete."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    text = json.dumps(content, indent=1, default=lambda x: np.asarray(x).tolist())
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path, pattern: Pattern, source: str) -> Any:
    """The content of a report of ``source``; an InputError if it does not fit the pattern."""
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
    """The first thing that does not fit, in words; None if everything does."""
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
