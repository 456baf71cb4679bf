"""Times of contestants that take turns, as ratios to one of them in the same round."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax


def seconds_of(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds until the result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, result


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each round and whose turn it is; it begins one further, so nobody always comes first."""
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield turn, name


def in_turns(
    runs: Mapping[str, Callable[[int], Any]],
    rounds: int,
    *,
    seen: Callable[[str, Any], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, by name.

    A run has done all that it needs once before, so that nothing is compiled here. ``seen`` is
    called with each name and result when the clock has stopped.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn, name in turns(list(runs), rounds):
        seconds, result = seconds_of(runs[name], turn)
        times[name].append(seconds)
        if seen is not None:
            seen(name, result)
        # Its memory is free before the next one runs.
        del result
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of one value it is all three."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(values, others, strict=True)]


def ratios(times: Mapping[str, Sequence[float]], base: str) -> list[dict[str, Any]]:
    """For each contestant the median of its time over that of ``base`` in the same round."""
    rows = []
    for name, seconds in times.items():
        low, ratio, high = quartiles(over(seconds, times[base]))
        rows.append(
            {
                "contestant": name,
                "ratio": ratio,
                "ratio_quartiles": [low, high],
                "median_ms": 1e3 * statistics.median(seconds),
            }
        )
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Those of a table for a row of :func:`ratios`, under ``CELLS``."""
    low, high = row["ratio_quartiles"]
    ratio, spread = f"{row['ratio']:.3f}", f"{low:.3f} - {high:.3f}"
    return [row["contestant"], ratio, spread, f"{row['median_ms']:.2f}"]


CELLS = ("contestant", "ratio", "quartiles", "ms")


def times_as_fast(base: Sequence[float], own: Sequence[float]) -> list[str]:
    """Two cells: the median and the quartiles of how many times as fast as the base one is."""
    low, middle, high = quartiles(over(base, own))
    return [f"{middle:.2f}", f"{low:.2f} - {high:.2f}"]
