"""Loss after the same seconds over links: `benchmarks.learning.time`."""

import functools
import statistics
from collections.abc import Iterable

from ._data import LABELS, Rows, listed
from ._learning import Best, best_runs

LINKS = ("100mbit", "1gbit")


def losses_by_time(link: str, file: str, workers: int = 4) -> list[Best]:
    """Two minutes over a link, in the order of the table."""
    return best_runs(LABELS["loss_after_minutes"], file, task="text", link=link, workers=workers)


def loss_after_minutes(link: str, file: str = "learning_time.jsonl", workers: int = 4) -> Rows:
    """Two minutes over a link: every seed, and how far the mean is above the first."""
    found = losses_by_time(link, file, workers)
    rows = []
    for one in found:
        steps = round(statistics.mean(run["steps"] for run in one.runs))
        megabytes = statistics.mean(run["received"] for run in one.runs) / 1e6
        above = f"{100 * (one.mean / found[0].mean - 1):.1f} %" if rows else ""
        line = [one.shown, one.rate_shown, f"{one.mean:.3f}", above, listed(one.losses, 3)]
        rows.append([*line, f"{steps:,}", f"{megabytes:.2f}"])
    return rows


table_loss_after_minutes = functools.partial(loss_after_minutes, "100mbit")
table_loss_after_minutes_1gbit = functools.partial(loss_after_minutes, "1gbit")
table_loss_after_minutes_late = functools.partial(
    loss_after_minutes, "100mbit+50ms", "learning_late.jsonl"
)


def table_muon_after_minutes() -> Rows:
    """Muon by what exchanges its gradients, one column of losses and steps for each link."""
    columns = [
        {
            x.shown: x
            for x in best_runs(LABELS["muon_after_minutes"], "learning_time.jsonl", link=link)
        }
        for link in LINKS
    ]
    rows = []
    for shown in LABELS["muon_after_minutes"].values():
        cells = [shown]
        for of in columns:
            one = of[shown]
            steps = statistics.mean(run["steps"] for run in one.runs)
            cells += [one.rate_shown, listed(one.losses, 3), f"{steps:,.0f}"]
        megabytes = statistics.mean(run["received"] for run in one.runs) / 1e6
        rows.append([*cells, f"{megabytes:.2f}"])
    return rows


def table_loss_after_minutes_later() -> Rows:
    """Over a slower link, and with more workers: a column for each, with the mean and the seeds."""
    cases = ("20mbit+150ms", 4), ("100mbit+50ms", 8), ("20mbit+150ms", 8)
    columns = [
        {x.shown: x for x in losses_by_time(link, "learning_late.jsonl", workers)}
        for link, workers in cases
    ]
    shown = [x for x in LABELS["loss_after_minutes"].values() if any(x in of for of in columns)]
    return [[x, *(_compared(of.get(x), of.values()) for of in columns)] for x in shown]


def _compared(one: Best | None, others: Iterable[Best]) -> str:
    """The mean of a contestant, how far it is above the lowest one, and each seed."""
    if one is None:
        return ""
    lowest = min(x.mean for x in others)
    above = f", +{100 * (one.mean / lowest - 1):.1f} %" if one.mean > lowest else ""
    return f"{one.mean:.3f}{above} ({listed(one.losses, 3)})"
