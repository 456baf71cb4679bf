"""Selectors in trainings: `benchmarks.training`."""

from typing import Any

from ._data import LABELS, Rows, code, percent, read

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
