"""Programs of other people with several exchanges: `benchmarks.learning.programs`."""

import statistics
from typing import Any

from ._data import LABELS, Rows, by, listed, number, read


def _all(row: dict[str, Any]) -> str:
    """The mean, and in brackets the result of each seed."""
    mean = statistics.mean(row["value"])
    digits = 3 if mean < 10 else 2 if mean < 100 else 0
    return f"{mean:.{digits}f} ({listed(row['value'], digits)})"


def table_gallery() -> Rows:
    """Results of all seeds, and how many fewer words there are than with `dense`."""
    found, rows = by(read("gallery.json")["rows"], "program", "exchange"), []
    for program in dict.fromkeys(name for name, _ in found):
        arms = {name: found[program, name] for name in LABELS["gallery"]}
        words = {name: statistics.mean(arms[name]["words"]) for name in arms if name != "before"}
        fewer = (number(words["dense"] / words[x], 0) for x in words if x != "dense")
        rows.append([program, *map(_all, arms.values()), ", ".join(fewer)])
    return rows
