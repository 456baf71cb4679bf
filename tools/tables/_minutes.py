"""Loss after the same seconds over links: `benchmarks.learning.time`."""

import statistics
from collections.abc import Iterable

from ._data import LABELS, Rows
from ._learning import Best, best_runs

LINKS = ("100mbit", "1gbit")


def losses_by_time(link: str, file: str, workers: int = 4) -> list[Best]:
    """Two minutes over a link, in the order of the table."""
    return best_runs(LABELS["loss_after_minutes"], file, task="text", link=link, workers=workers)


def loss_after_minutes(link: str, file: str = "learning_time.jsonl", workers: int = 4) -> Rows:
    """Two minutes over a link: the worst seed, and how far the mean is above the first."""
    found = losses_by_time(link, file, workers)
    rows = []
    for one in found:
        steps = round(statistics.mean(run["steps"] for run in one.runs))
        megabytes = statistics.mean(run["received"] for run in one.runs) / 1e6
        above = f"{100 * (one.mean / found[0].mean - 1):.1f} %" if rows else ""
        line = [one.shown, one.rate_shown, f"{one.mean:.3f}", above, f"{max(one.losses):.3f}"]
        rows.append([*line, f"{steps:,}", f"{megabytes:.2f}"])
    return rows


def table_loss_after_minutes() -> Rows:
    """Two minutes over both links: the worst seed, and the steps that were taken."""
    links = [{row[0]: row for row in loss_after_minutes(link)} for link in LINKS]
    rows = []
    names = dict.fromkeys(name for link in links for name in link)
    # The ranks above and below it say enough.
    for shown in (name for name in names if "PowerSGD(2)" not in name):
        cells = [shown]
        for _, _, mean, above, worst, steps, _ in (link.get(shown, [""] * 7) for link in links):
            apart = f", +{above}" if above else ""
            cells += [f"{mean}{apart} ({worst})" if mean else "", steps]
        rows.append([*cells, next(link[shown][-1] for link in links if shown in link)])
    return rows


def table_loss_over_latency() -> Rows:
    """Over links with latency: a column for each, with the mean and the worst seed."""
    cases = ("100mbit+50ms", 4), ("20mbit+150ms", 4), ("100mbit+50ms", 8)
    columns = [
        {x.shown: x for x in losses_by_time(link, "learning_late.jsonl", workers)}
        for link, workers in cases
    ]
    # Over these links float16 ends like dense.
    names = [x for x in LABELS["loss_after_minutes"].values() if "float16" not in x]
    shown = [x for x in names if any(x in of for of in columns)]
    return [[x, *(_compared(of.get(x), of.values()) for of in columns)] for x in shown]


def _compared(one: Best | None, others: Iterable[Best]) -> str:
    """The mean of a contestant, how far it is above the lowest one, and the worst seed."""
    if one is None:
        return ""
    lowest = min(x.mean for x in others)
    above = f", +{100 * (one.mean / lowest - 1):.1f} %" if one.mean > lowest else ""
    worst = f" ({max(one.losses):.3f})" if len(one.losses) > 1 else ", one seed"
    return f"{one.mean:.3f}{above}{worst}"
