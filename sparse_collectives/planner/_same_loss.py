"""How many steps a sparse exchange needs to reach the loss of a dense one."""

import json
import math
from collections.abc import Mapping

from sparse_collectives.cost_model._numbers import NUMBERS

# Stands for the measured factors instead of a file.
ADAMW = "adamw"

# By workers and density.
MEASURED: Mapping[str, Mapping[tuple[int, float], float]] = {
    name: {(workers, density): factor for workers, density, factor in cases}
    for name, cases in NUMBERS["steps"].items()
}
# The measured factors do not apply if workers or density differ by a larger factor.
_WORKERS, _DENSITY = 4.0, 1.5


def read(source: str, workers: int, density: float) -> dict[str, float]:
    """Factors by the name of an algorithm, for so many workers and a density.

    Args:
      source: ``ADAMW`` for the measured factors of the nearest case, if one is near; or the
        name of a JSON file.
      workers: P.
      density: k / n.

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

    nearest = min(cases, key=lambda case: sum(distance(case)))
    of_workers, of_density = distance(nearest)
    if of_workers > math.log(_WORKERS) or of_density > math.log(_DENSITY):
        return None
    return cases[nearest]
