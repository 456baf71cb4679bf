"""The files that options of `plan` name: a measured network, and steps to the same loss."""

import json
import math
import operator
from collections.abc import Mapping
from typing import NamedTuple

from sparse_collectives import _units
from sparse_collectives.cost_model._numbers import NUMBERS

# `measure` writes some kilobytes.
_LONGEST_FILE = 1 << 20
# A median error above this means that latency and bandwidth hardly describe the network.
LARGEST_ERROR = 0.3
# No median is worse; a larger number is no result of a fit.
_WORST_ERROR = 1e9


class MeasuredFile(NamedTuple):
    """The numbers of a file that the planner uses, as they are written there."""

    file: str
    latency: float  # seconds
    bandwidth: float  # bytes per second
    error: float | None  # of the fit; None if the file does not have it

    def number(self, field: str) -> float:
        """A number of the network, after its check."""
        value, name = getattr(self, field), f"{field} in --measured {self.file}"
        if value == math.inf:
            raise ValueError(
                f"{name} must be finite, got {value}: no time grew with the size when it was "
                f"measured. Pass --{field}."
            )
        return (_units.seconds if field == "latency" else _units.bandwidth)(name, value)

    def warnings(self) -> list[str]:
        """What to say of the fit; nothing if the file does not have its error."""
        return [] if self.error is None else warnings(self.error)


def read_measured(file: str) -> MeasuredFile:
    """Reads a file that `measure --json` wrote.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is not JSON, or not an object with the two numbers.
    """
    with open(file, "rb") as stream:
        content = stream.read(_LONGEST_FILE + 1)
    where, hint = f"--measured {file}", "Write it with 'measure --json'."
    if len(content) > _LONGEST_FILE:
        raise ValueError(f"{where} must be at most 1 MiB long, and is longer. {hint}")
    try:
        found = json.loads(content)
    # A nesting too deep for the parser is a RecursionError.
    except (ValueError, RecursionError):
        raise ValueError(f"{where} must hold JSON, and cannot be read as such. {hint}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{where} must hold a JSON object with 'latency' and 'bandwidth', got "
            f"{_units.shown(found)}. {hint}"
        )
    for name in ("latency", "bandwidth"):
        if name not in found:
            raise ValueError(f"{where} has no {name!r}. {hint}")
    error = found.get("error")
    numbers = MeasuredFile(file, found["latency"], found["bandwidth"], error)
    for name, value in list(numbers._asdict().items())[1 : 3 if error is None else 4]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            shown = _units.shown(value)
            raise ValueError(f"{name} in {where} must be a number, got {shown}. {hint}")
    if error is not None and not 0 <= error <= _WORST_ERROR:
        raise ValueError(
            f"error in {where} must be a share of at least 0, such as 0.05, got "
            f"{_units.shown(error)}. {hint}"
        )
    return numbers


def warnings(error: float) -> list[str]:
    """Lines to print if the fit of a network is poor; none if it is good."""
    if error <= LARGEST_ERROR:
        return []
    return [
        f"Warning: latency and bandwidth miss the measured times by {error:.0%} (the median); over "
        f"{LARGEST_ERROR:.0%} they hardly describe this network."
    ]


# Stands for the measured factors instead of a file.
ADAMW = "adamw"

# By workers and density.
MEASURED: Mapping[str, Mapping[tuple[int, float], float]] = {
    name: {(workers, density): factor for workers, density, factor in cases}
    for name, cases in NUMBERS["steps"].items()
}
# The measured factors do not apply if workers or density differ by a larger factor.
_WORKERS, _DENSITY = 4.0, 1.5


def read_steps(source: str, workers: int, density: float) -> dict[str, float]:
    """Steps to the same loss, as a multiple of the steps of a dense run, by allreduce.

    ``source`` is the name of a JSON file, or ``ADAMW`` for the measured steps of the nearest case,
    if one is near.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file does not hold a JSON object.
    """
    if source == ADAMW:
        found = {name: _nearest(cases, workers, density) for name, cases in MEASURED.items()}
        return {name: factor for name, factor in found.items() if factor is not None}
    with open(source, encoding="utf-8") as stream:
        try:
            content = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--same-loss {source} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f'--same-loss {source} must hold an object such as {{"ok_topk": 1.4}}, the steps to '
            "the same loss as a multiple of the steps of a dense run."
        )
    return content


def _nearest(
    cases: Mapping[tuple[int, float], float], workers: int, density: float
) -> float | None:
    """The factor of the case with the nearest workers and density; None if it is far."""

    def distance(case: tuple[int, float]) -> tuple[float, float]:
        return abs(math.log(case[0] / workers)), abs(math.log(case[1] / density))

    most = math.log(_WORKERS), math.log(_DENSITY)
    near = [case for case in cases if all(map(operator.le, distance(case), most))]
    return cases[min(near, key=lambda case: sum(distance(case)))] if near else None
