"""Optimizers by what exchanges their gradients: `benchmarks.learning.optimizers`."""

import statistics

from ._data import LABELS, Rows, blank_repeats
from ._learning import best_runs, runs

FILE = "learning_optimizers.jsonl"


def table_other_optimizers() -> Rows:
    """Losses at the best learning rates; of each seed above the dense run of that seed."""
    optimizers = dict.fromkeys(run["contestant"].partition(", ")[0] for run in runs(FILE))
    rows = []
    for optimizer in optimizers:
        exchanges = LABELS["other_optimizers"].items()
        found = best_runs({f"{optimizer}, {name}": shown for name, shown in exchanges}, FILE)
        dense, *others = found
        rows.append([optimizer, dense.shown, "1", dense.rate_shown, f"{dense.mean:.3f}", "", ""])
        for one in others:
            above = one.above(dense)
            # With 8 workers.
            share = f"1/{2 * one.size * 7 / 8 / one.words:.1f}"
            row = [optimizer, one.shown, share, one.rate_shown, f"{one.mean:.3f}"]
            each = ", ".join(f"{x:+.1f}" for x in above)
            rows.append([*row, f"{statistics.mean(above):+.1f} %", each])
    return blank_repeats(rows)
