"""Programs of other people with several exchanges: `benchmarks.learning.programs`."""

import statistics
from typing import Any

from ._data import LABELS, Rows, blank_repeats, by, listed, number, read


def _all(row: dict[str, Any]) -> str:
    """The mean, and in brackets the result of each seed."""
    mean = statistics.mean(row["value"])
    digits = 3 if mean < 10 else 2 if mean < 100 else 0
    return f"{mean:.{digits}f} ({listed(row['value'], digits)})"


def table_more_clients() -> Rows:
    """Results of all seeds, and how many fewer words there are than with `dense`."""
    found, rows = by(read("more_clients.json")["rows"], "program", "exchange"), []
    for program in dict.fromkeys(name for name, _ in found):
        arms = {name: found[program, name] for name in LABELS["more_clients"]}
        words = {name: statistics.mean(arms[name]["words"]) for name in arms if name != "before"}
        fewer = (number(words["dense"] / words[name], 0) for name in ("powersgd(2)", "after"))
        rows.append([program, *map(_all, arms.values()), ", ".join(fewer)])
    return rows


def table_more_clients_rates() -> Rows:
    """Two programs at several learning rates, a row for each exchange."""
    found = by(read("more_clients_rates.json")["rows"], "program", "exchange", "factor")
    programs, arms, factors = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))
    labels = LABELS["more_clients"]
    rows = [
        [program, labels.get(arm) or f"the same, `{arm}`"]
        + [_all(found[program, arm, factor]) for factor in factors]
        for program in programs
        for arm in arms
    ]
    return blank_repeats(rows)
