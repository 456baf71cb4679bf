"""Selectors, counts and accuracy in trainings: `benchmarks.training`."""

from typing import Any

from ._data import blank_repeats, code, interval, percent, read
from ._files import Rows

PAPER_TASKS = {
    "images": "a convolutional network, digits",
    "lstm": "an LSTM, characters",
    "text": "a transformer, characters",
}


def quality() -> Rows:
    """Each selector beside the exact top-k."""
    runs = [run["selectors"] for run in read("select_quality.json")["runs"]]

    def cells(row: dict[str, Any]) -> list[str]:
        overlap, worst = (row["overlap"][of] for of in ("mean", "worst"))
        shown = percent(overlap, 1 if 0.985 < overlap < 0.9995 else 0)
        if overlap > 0.9995 and worst < 1:
            shown = f"{percent(overlap, 2)} (worst {percent(worst, 2)})"
        passed = [row["passed"][part] for part in ("first_tenth", "last_quarter")]
        return [*(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in passed), shown]

    return [[code(name), *(cell for run in runs for cell in cells(run[name]))] for name in runs[0]]


def missing() -> Rows:
    """Rows of the LSTM without a selected entry."""
    rates = read("select_quality.json")["runs"][1]["missing_rows"]["accumulator"]
    whole, layers, rows = rates["top-k of all"], rates["top-k of each layer"], rates["adtopk"]

    def line(name: str, values: list[float]) -> list[str]:
        return [name, *(percent(x, 0 if x > 0.005 else 2) for x in values)]

    return [
        ["the paper: LSTM, words of WikiText-2", "96 %", "", "", "", "26 %"],
        line("top-k of each layer, mean of the matrices", layers["mean of matrices"]),
        line("top-k of each layer, all rows", layers["all rows"]),
        line("top-k of the whole buffer, all rows", whole["all rows"]),
        line("`adtopk`", rows["all rows"]),
    ]


def paper_counts() -> Rows:
    """Both rules of the paper's thresholds in trainings of their own, over the seeds."""

    def shares(values: list[float]) -> str:
        return f"{interval([100 * value for value in values], 0)} %"

    rows = []
    for run in read("paper_counts.json"):
        name = f"{PAPER_TASKS[run['task']]}, k = {run['k']:,}"
        cells = [name, str(run["period"]), run["rule"]]
        for of in (run["local"], run["global"]):
            cells += [shares(of["deviation"]), shares(of["after"]), interval(of["mean"], 2)]
        rows.append(cells)
    return blank_repeats(rows, 2)
