"""Optimizers by what exchanges their gradients: `benchmarks.learning.optimizers`."""

import statistics

from ._data import Rows
from ._learning import END, best_runs, runs

FILE = "learning_optimizers.jsonl"
# What exchanges the gradients, a column for each.
SHOWN = ("quantized((2, 4))", "inside", "every=10", "powersgd(2)", "ok_topk(0.01)")


def table_other_optimizers() -> Rows:
    """How far losses at the best learning rates are above dense: the mean and the worst seed."""
    optimizers = dict.fromkeys(run["contestant"].partition(", ")[0] for run in runs(FILE))
    rows = []
    for optimizer in optimizers:
        names = {f"{optimizer}, {name}": name for name in ("dense", *SHOWN)}
        dense, *others = best_runs(names, FILE)
        cells = {}
        for one in others:
            above = one.above(dense)
            end = END if one.edge else ""
            cells[one.shown] = f"{statistics.mean(above):+.1f} % ({max(above):+.1f}){end}"
        row = [cells.get(name, "") for name in SHOWN]
        rows.append([optimizer, *row, f"{dense.mean:.3f}{END if dense.edge else ''}"])
    return rows
