"""Optimizers by what exchanges their gradients: `benchmarks.learning.optimizers`."""

import statistics

from ._data import Rows
from ._learning import END, best_runs, runs

FILE = "learning_optimizers.jsonl"
# What exchanges the gradients, a column for each.
SHOWN = ("quantized((2, 4))", "inside", "every=10", "powersgd(2)", "ok_topk(0.01)")


def table_other_optimizers() -> Rows:
    """How far losses at the best learning rates are above dense: the mean and the worst seed."""
    return _above_dense(SHOWN, 600)


def table_other_optimizers_longer() -> Rows:
    """The same after more steps."""
    return _above_dense((*SHOWN[:2], "every=3", *SHOWN[2:4]), 4000)


def table_other_optimizers_wide() -> Rows:
    """The same of a wider model."""
    shown = (*SHOWN[:2], "every=3", "powersgd(8)", "powersgd(4)", SHOWN[-1])
    return _above_dense(shown, 4000, width=128)


def _above_dense(shown: tuple[str, ...], steps: int, *, width: int = 32) -> Rows:
    found = runs(FILE, steps=steps, width=width)
    optimizers = dict.fromkeys(run["contestant"].partition(", ")[0] for run in found)
    rows = []
    for optimizer in optimizers:
        names = {f"{optimizer}, {name}": name for name in ("dense", *shown)}
        dense, *others = best_runs(names, FILE, steps=steps, width=width)
        cells = {}
        for one in others:
            above = one.above(dense)
            end = END if one.edge else ""
            worst = f" ({max(above):+.1f})" if len(above) > 1 else ""
            cells[one.shown] = f"{statistics.mean(above):+.1f} %{worst}{end}"
        row = [cells.get(name, "") for name in shown]
        rows.append([optimizer, *row, f"{dense.mean:.3f}{END if dense.edge else ''}"])
    return rows
