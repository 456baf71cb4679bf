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
        passed = [row["passed"][part] for part in ("first_tenth", "last_quarter")]
        return [*(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in passed), shown]

    labels = {name: LABELS["selector_quality"].get(name, code(name)) for name in runs[0]}
    return [
        [shown, *(x for run in runs for x in line(run[name]))] for name, shown in labels.items()
    ]


def table_missing_rows() -> Rows:
    """Rows of the LSTM without a selected entry."""
    rates = read("select_quality.json")["runs"][1]["missing_rows"]["accumulator"]
    rows = [["the paper: LSTM, words of WikiText-2", "96 %", "", "", "", "26 %"]]
    for shown, (selector, of) in LABELS["missing_rows"].items():
        rows.append([shown, *(percent(x, 0 if x > 0.005 else 2) for x in rates[selector][of])])
    return rows


def table_paper_counts() -> Rows:
    """Both rules of the paper's thresholds in trainings of their own, over the seeds."""
    rows = []
    for run in read("paper_counts.json"):
        task = LABELS["paper_counts"][run["task"]]
        line = [f"{task}, k = {run['k']:,}", str(run["period"]), run["rule"]]
        for of in (run["local"], run["global"]):
            for values in (of["deviation"], of["after"]):
                line.append(f"{interval([100 * value for value in values], 0)} %")
            line.append(interval(of["mean"], 2))
        rows.append(line)
    return blank_repeats(rows, 2)
