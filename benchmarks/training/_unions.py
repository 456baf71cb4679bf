"""How unions of selections grow with the number of workers, measured and predicted."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparse_collectives import cost_model

UNIFORM_WORKERS = (2, 4, 8, 16, 32, 64)


def growth(selections: Iterable[np.ndarray], size: int) -> np.ndarray:
    """The size of the union of the first selection, of the first two, and so on; n is padding."""
    seen = np.zeros(size + 1, bool)
    unions = []
    for indices in selections:
        seen[indices] = True
        unions.append(np.count_nonzero(seen[:size]))
    return np.array(unions)


def uniform(size: int, density: float, trials: int, seed: int) -> dict[str, Any]:
    """Mean sizes of unions of uniformly random selections in some trials, next to the formula."""
    random, k = np.random.default_rng(seed), max(1, round(density * size))
    unions = []
    for _ in range(trials):
        each = (random.choice(size, k, False, shuffle=False) for _ in range(max(UNIFORM_WORKERS)))
        unions.append(growth(each, size))
    rows = []
    for p in UNIFORM_WORKERS:
        expected, own = cost_model.expected_union(size, k, p), np.array(unions)[:, p - 1]
        error, mean = np.std(own, ddof=1) / math.sqrt(trials), np.mean(own)
        off = (mean - expected) / error if error > 0 else 0.0
        row = {"workers": p, "expected": expected, "mean": mean}
        rows.append(row | {"standard_error": error, "errors_off": off})
    return {"size": size, "density": density, "k": k, "trials": trials, "rows": rows}


def parts(series: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The mean over all steps, over the first 10 %, and over the last quarter."""
    return {
        "mean": float(np.mean(series)),
        "first_tenth": float(np.mean(series[: max(1, len(series) // 10)])),
        "last_quarter": float(np.mean(series[-max(1, len(series) // 4) :])),
    }


def predictions(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The union of the largest run of a task, predicted from the unions of fewer workers."""
    largest = max(reports, key=lambda report: report["workers"])
    size, k, workers = largest["size"], largest["k"], largest["workers"]

    def predict(measured: float, of: int) -> float:
        overlap = cost_model.Overlap(measured * size, of)
        return cost_model.expected_union(size, k, workers, overlap=overlap) / size

    smaller = {run["workers"]: run for run in reports if run["workers"] < workers}
    series = {p: [predict(x, p) for x in run["series"]] for p, run in smaller.items()}
    return {
        "workers": workers,
        "measured": largest["union"]["mean"],
        "uniform": largest["uniform"],
        "same_run": {
            p: predict(largest["growth"][p - 1], p) for p in UNIFORM_WORKERS if p < workers
        },
        "other_runs": {p: predict(run["union"]["mean"], p) for p, run in smaller.items()},
        "other_runs_by_step": {p: np.mean(by_step) for p, by_step in series.items()},
    }
