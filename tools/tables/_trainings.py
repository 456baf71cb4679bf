"""Selectors and counts in trainings: `benchmarks.training`."""

from typing import Any

from ._data import LABELS, Rows, blank_repeats, code, interval, percent, read

Row = dict[str, Any]


def table_selector_quality() -> Rows:
    """Each selector next to the exact top-k."""
    runs = [run["selectors"] for run in read("select_quality.json")["runs"]]

    def line(row: Row) -> list[str]:
        overlap, worst = (row["overlap"][of] for of in ("mean", "worst"))
        shown = percent(overlap, 1 if 0.985 < overlap < 0.9995 else 0)
        if overlap > 0.9995 and worst < 1:
            shown = f"{percent(overlap, 2)} (worst {percent(worst, 2)})"
        return [f"{row['passed']['last_quarter']:.2f}", shown]

    names = LABELS["selector_quality"]["shown"]
    return [[code(name), *(x for run in runs for x in line(run[name]))] for name in names]


def table_paper_counts() -> Rows:
    """Both rules of the paper's thresholds in trainings of their own, over the seeds."""
    rows = []
    for run in read("paper_counts.json"):
        task = LABELS["paper_counts"][run["task"]]
        line = [f"{task}, k = {run['k']:,}, tau' = {run['period']}", run["rule"]]
        for of in (run["local"], run["global"]):
            line.append(f"{interval([100 * value for value in of['after']], 0)} %")
            line.append(interval(of["mean"], 2))
        rows.append(line)
    return blank_repeats(rows)
