"""Reads a file of `measure --json` for `plan --measured`."""

import json
from typing import NamedTuple

from sparse_collectives import _units

# `measure` writes some kilobytes.
_LONGEST_FILE = 1 << 20
# A median error above this means that latency and bandwidth hardly describe the network.
LARGEST_ERROR = 0.3
# No median is worse; a larger number is no result of a fit.
_WORST_ERROR = 1e9


class MeasuredFile(NamedTuple):
    """The numbers of a file that the planner uses, as they are written there.

    Attributes:
      file: its name.
      latency: alpha, in seconds.
      bandwidth: in bytes per second.
      error: the error of the fit; None if the file does not have it.
    """

    file: str
    latency: float
    bandwidth: float
    error: float | None


def read(file: str) -> MeasuredFile:
    """Reads a file that `measure --json` wrote.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is not JSON, or not an object with the two numbers.
    """
    with open(file, "rb") as stream:
        content = stream.read(_LONGEST_FILE + 1)
    hint = "Write it with 'measure --json'."
    if len(content) > _LONGEST_FILE:
        raise ValueError(f"--measured {file} must be at most 1 MiB long, and is longer. {hint}")
    try:
        found = json.loads(content)
    # A nesting too deep for the parser is a RecursionError.
    except (ValueError, RecursionError):
        raise ValueError(
            f"--measured {file} must hold JSON, and cannot be read as such. {hint}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f"--measured {file} must hold a JSON object with 'latency' and 'bandwidth', got "
            f"{_units.shown(found)}. {hint}"
        )
    for name in ("latency", "bandwidth"):
        if name not in found:
            raise ValueError(f"--measured {file} has no {name!r}. {hint}")
    error = found.get("error")
    numbers = [("latency", found["latency"]), ("bandwidth", found["bandwidth"])]
    for name, value in numbers if error is None else [*numbers, ("error", error)]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(
                f"{name} in --measured {file} must be a number, got {_units.shown(value)}. {hint}"
            )
    if error is not None and not 0 <= error <= _WORST_ERROR:
        raise ValueError(
            f"error in --measured {file} must be a share of at least 0, such as 0.05, got "
            f"{_units.shown(error)}. {hint}"
        )
    return MeasuredFile(file, found["latency"], found["bandwidth"], error)


def warnings(error: float | None) -> list[str]:
    """Lines to print if the fit of a network is poor; none if it is good."""
    if error is None or error <= LARGEST_ERROR:
        return []
    return [
        f"Warning: latency and bandwidth miss the measured times by {error:.0%} (the median); over "
        f"{LARGEST_ERROR:.0%} they hardly describe this network."
    ]
