"""Times of contestants that take turns, as ratios to one of them in the same round."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def seconds_of(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds until the result is ready, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, result


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each round and whose turn it is; each round starts one further, so the first one varies."""
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield turn, name


def in_turns(
    runs: Mapping[str, Callable[[int], Any]], rounds: int, *, seen: Any = lambda name, result: None
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, by name.

    Each run has been called once before, so that nothing is compiled here. ``seen`` is called with
    each name and result after the clock has stopped.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn, name in turns(list(runs), rounds):
        seconds, result = seconds_of(runs[name], turn)
        times[name].append(seconds)
        seen(name, result)
        # Frees its memory before the next one runs.
        del result
    return times


def steady(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, given: Sequence[Any], before: int
) -> Callable[[int], Any]:
    """A run for :func:`in_turns` of ``step(given, state) -> (result, state)``.

    Each call continues from the last state. ``before`` calls are made first, until everything is
    compiled, pages are touched and states are steady.
    """

    def run(turn: int) -> Any:
        nonlocal state
        result, state = step(given[turn % len(given)], state)
        return result, state

    for turn in range(before):
        jax.block_until_ready(run(turn))
    return run


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a single value is all three."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio in each round."""
    return [a / b for a, b in zip(values, others, strict=True)]


def ratios(times: Mapping[str, Sequence[float]], base: str) -> list[dict[str, Any]]:
    """For each contestant, the median of its time divided by the time of ``base`` in that round."""
    rows = []
    for name, seconds in times.items():
        low, ratio, high = quartiles(over(seconds, times[base]))
        row = {"contestant": name, "ratio": ratio, "ratio_quartiles": [low, high]}
        rows.append(row | {"median_ms": 1e3 * quartiles(seconds)[1]})
    return rows


def times_as_fast(base: Sequence[float], own: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of how many times as fast as the base one is."""
    return quartiles(over(base, own))
