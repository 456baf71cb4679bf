"""Times of contestants that take turns, as ratios to one of them in the same round."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def seconds_of(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds until the result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, result


def in_turns(
    runs: Mapping[str, Callable[[int], Any]],
    rounds: int,
    *,
    seen: Callable[[str, Any], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round.

    Args:
      runs: ``run(round)`` by name; each does all that it needs once before, so that nothing is
        compiled here.
      rounds: how many. Each begins one contestant further, so that nobody always comes first.
      seen: ``seen(name, result)``, called with each result when the clock has stopped.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
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


def ratios(times: Mapping[str, Sequence[float]], base: str) -> list[dict[str, Any]]:
    """For each contestant the median of its time over that of ``base`` in the same round."""
    rows = []
    for name, seconds in times.items():
        low, ratio, high = quartiles([s / b for s, b in zip(seconds, times[base], strict=True)])
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
    return [
        row["contestant"],
        f"{row['ratio']:.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{row['median_ms']:.2f}",
    ]


CELLS = ("contestant", "ratio", "quartiles", "ms")
