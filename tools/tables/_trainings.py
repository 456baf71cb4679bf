"""Selectors, counts and accuracy in trainings: `benchmarks.training`."""

from typing import Any

from ._data import blank_repeats, percent, read
from ._pages import Rows

QUALITY = {
    "topk": "`topk`",
    "mstopk": "`mstopk`, 30 samplings",
    "threshold_reuse": "`threshold_reuse`",
    "threshold_reuse, no servo": "`threshold_reuse(servo=False)`",
    "gaussian_k": "`gaussian_k`",
    "gaussian_k, adjusted": "`gaussian_k(adjust=True)`",
    "redsync": "`redsync`",
    "sidco": "`sidco`",
    "sidco, gamma": "`sidco`, gamma",
    "sidco, pareto": "`sidco`, pareto",
    "dgc": "`dgc`",
    "layerwise(topk)": "`layerwise(topk)`",
    "bucketed": "`bucketed`",
    "adtopk": "`adtopk`",
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

    return [
        [shown, *(cell for run in runs for cell in cells(run[name]))]
        for name, shown in QUALITY.items()
    ]


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
    """The paper's schedule of thresholds in trainings of its own."""
    rows = []
    for run in read("paper_counts.json"):
        local, total = run["local"], run["global"]
        rows.append(
            [
                f"{run['task']}, k = {run['k']:,}",
                str(run["period"]),
                *(percent(local[x]) for x in ("deviation", "first tenth", "after it")),
                f"{local['mean']:.2f}",
                f"**{percent(total['deviation'])}**",
                percent(total["after it"]),
                f"{total['mean']:.2f}",
            ]
        )
    return blank_repeats(rows)
