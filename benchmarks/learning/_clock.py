"""Training for so many seconds: how many steps to take, and the rate of each.

Nobody knows beforehand how many steps a budget has room for, and the rate has to come to its end
exactly with the budget. So the rate is a function of the time that has passed, and steps are taken
in parts: the time of a part tells how many steps the rest has room for. The parts become shorter
towards each measurement, so that little is missing there, or too much. What is not training, such
as a measurement, takes none of the budget.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..training._recorded_training import schedule

# So few steps are taken in one part; and of so many steps before it the time of one is known by.
_FEW, _MEMORY = 3, 10
_STEPS = 10**6


Take = Callable[[list[float]], float]


class Curve(NamedTuple):
    """What came of a budget: values, and the seconds of training and steps at each."""

    seconds: list[float]
    steps: list[int]
    values: list[float]


def rates_at(peak: float, shares: Sequence[float]) -> list[float]:
    """The rate when so large shares of the budget are spent: that of as many steps."""
    return schedule(peak, _STEPS)(_STEPS * np.minimum(shares, 1.0)).tolist()


def spend(
    budget: float, points: int, guess: float, take: Take, measure: Callable[[], float]
) -> Curve:
    """Takes steps for the seconds of the budget, and measures after each of so many equal parts.

    ``take(shares)`` takes a step for each and returns the seconds of all of them; ``shares`` of the
    budget have passed when they begin. One is taken even if the budget is shorter; ``guess`` is
    about what it takes. The clock stands still for ``measure``.
    """
    curve = Curve([0.0], [0], [measure()])
    spent, steps, each = 0.0, 0, guess
    for point in range(1, points + 1):
        end = budget * point / points
        while count := _count((end - spent) / each, steps):
            seconds = take([(spent + i * each) / budget for i in range(count)])
            # The first part is better than a guess.
            weight = count / (count + _MEMORY) if steps else 1.0
            each += weight * (seconds / count - each)
            spent, steps = spent + seconds, steps + count
        curve.seconds.append(spent)
        curve.steps.append(steps)
        curve.values.append(measure())
    return curve


def _count(room: float, taken: int) -> int:
    """How many steps the next part has, where there is room for so many; 0: none any more."""
    # Half a step too many is as good as half a step too few.
    count = max(0, math.floor(room + 0.5))
    if not taken:
        return max(1, min(count, _FEW))
    # Where no part has more steps than all before it, a wrong guess does little harm.
    return count if count <= _FEW else min(-(-count // 2), max(_FEW, taken))
