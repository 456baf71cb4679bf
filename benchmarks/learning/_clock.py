"""Training for a given number of seconds: how many steps to take, and their learning rates.

The number of steps in a budget is not known beforehand, but the learning rate must reach its end
exactly when the budget does. The learning rate is therefore a function of the time that has passed.
Steps are taken in parts: the duration of a part determines how many steps fit in the rest. The
parts become shorter towards each measurement, so that each is taken almost at its exact time.
Anything but training, such as a measurement, takes none of the budget.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..training._recorded_training import schedule

# The most steps of a short part, and about how many steps the estimated time of one averages.
_FEW, _MEMORY = 3, 10
_STEPS = 10**6


Take = Callable[[list[float]], float]


class Curve(NamedTuple):
    """The result of a budget: values, and the seconds of training and the steps at each."""

    seconds: list[float]
    steps: list[int]
    values: list[float]


def rates_at(peak: float, shares: Sequence[float]) -> list[float]:
    """The learning rates after these shares of the budget, as after these shares of the steps."""
    return schedule(peak, _STEPS)(_STEPS * np.minimum(shares, 1.0)).tolist()


def spend(
    budget: float, points: int, guess: float, take: Take, measure: Callable[[], float]
) -> Curve:
    """Takes steps for the seconds of the budget, and measures after each of so many equal parts.

    ``take(shares)`` takes a step for each of the shares of the budget that have passed when the
    steps begin, and returns the seconds of all of them. At least one step is taken; ``guess`` is
    roughly its duration. The clock stops during ``measure``.
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
    """How many steps the next part has if there is room for so many; 0 if there is none left."""
    # Half a step too many is as good as half a step too few.
    count = max(0, math.floor(room + 0.5))
    if not taken:
        return max(1, min(count, _FEW))
    # If no part has more steps than all before it, a wrong guess does little harm.
    return count if count <= _FEW else min(-(-count // 2), max(_FEW, taken))
