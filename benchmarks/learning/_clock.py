"""Training for so many seconds: how many steps to take, and the rate of each.

Nobody knows beforehand how many steps a budget has room for, and the rate has to come to its end
exactly with the budget. So the rate is a function of the time that has passed, and steps are taken
in parts: the time of a part tells how many steps the rest has room for. The parts become shorter
towards each measurement, so that little is missing there, or too much. What is not training, such
as a measurement, takes none of the budget.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# Of the budget in which the rate rises, and what it begins and ends with, of its peak: those of
# `_recorded_training.schedule`.
_WARM_UP, _FIRST, _LAST = 1 / 20, 1 / 20, 1 / 100
# So few steps are taken in one part; and of so many steps before it the time of one is known by.
_FEW, _MEMORY = 3, 10


class Curve(NamedTuple):
    """What came of a budget: values, and the seconds of training and steps at each."""

    seconds: list[float]
    steps: list[int]
    values: list[float]


def rate_at(peak: float, share: float) -> float:
    """The rate when so large a share of the budget is spent: a warm-up, and then a cosine."""
    share = min(share, 1.0)
    if share < _WARM_UP:
        return peak * (_FIRST + (1 - _FIRST) * share / _WARM_UP)
    fallen = (1 - math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP))) / 2
    return peak * (1 - (1 - _LAST) * fallen)


def spend(
    budget: float,
    points: int,
    guess: float,
    take: Callable[[list[float]], float],
    measure: Callable[[], float],
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
