"""How unions of selections grow with the number of workers, measured and predicted."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparse_collectives import cost_model

UNIFORM_WORKERS = (2, 4, 8, 16, 32, 64)


def growth(selections: Iterable[np.ndarray], size: int) -> np.ndarray:
    """The size of the union of the first selection, of the first two, and so on.

    Args:
      selections: the indices of each worker; ``size`` marks padding.
      size: n.
    """
    seen = np.zeros(size + 1, bool)
    unions = []
    for indices in selections:
        seen[indices] = True
        unions.append(np.count_nonzero(seen[:size]))
    return np.array(unions)


def uniform_row(unions: np.ndarray, size: int, selected: int, workers: int) -> dict[str, Any]:
    """The mean of some unions of uniform selections beside its expectation.

    Args:
      unions: the union in each trial, at least two of them.
      size: n.
      selected: k.
      workers: P.
    """
    expected = cost_model.expected_union(size, selected, workers)
    error = np.std(unions, ddof=1) / math.sqrt(len(unions))
    mean = np.mean(unions)
    return {
        "workers": workers,
        "expected": expected,
        "mean": mean,
        "standard_error": error,
        "errors_off": (mean - expected) / error if error > 0 else 0.0,
    }


def uniform(size: int, density: float, trials: int, seed: int) -> dict[str, Any]:
    """The table of uniformly random selections for one density."""
    random = np.random.default_rng(seed)
    k = max(1, round(density * size))
    most = max(UNIFORM_WORKERS)
    unions = np.array(
        [
            growth((random.choice(size, k, False, shuffle=False) for _ in range(most)), size)
            for _ in range(trials)
        ]
    )
    rows = [uniform_row(unions[:, p - 1], size, k, p) for p in UNIFORM_WORKERS]
    return {"size": size, "density": density, "k": k, "trials": trials, "rows": rows}


def last_quarter(series: Sequence[float] | np.ndarray) -> Any:
    """That of the steps, at least one."""
    return series[len(series) - max(1, len(series) // 4) :]


def parts(series: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The mean over all steps, over the first tenth, and over the last quarter."""
    return {
        "mean": float(np.mean(series)),
        "first_tenth": float(np.mean(series[: max(1, len(series) // 10)])),
        "last_quarter": float(np.mean(last_quarter(series))),
    }


def predictions(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The union of the largest run, predicted from those of fewer workers.

    Args:
      reports: the runs of one task, of :func:`record`.
    """
    largest = max(reports, key=lambda report: report["workers"])
    size, k, workers = largest["size"], largest["k"], largest["workers"]

    def predict(measured: float, of: int) -> float:
        overlap = cost_model.Overlap(measured * size, of)
        return cost_model.expected_union(size, k, workers, overlap=overlap) / size

    counts = [p for p in (2, 4, 8, 16, 32, 64) if p < workers]
    smaller = [report for report in reports if report["workers"] < workers]
    return {
        "workers": workers,
        "measured": largest["union"]["mean"],
        "uniform": largest["uniform"],
        "same_run": {p: predict(largest["growth"][p - 1], p) for p in counts},
        "other_runs": {
            report["workers"]: predict(report["union"]["mean"], report["workers"])
            for report in smaller
        },
        "other_runs_by_step": {
            report["workers"]: np.mean([predict(x, report["workers"]) for x in report["series"]])
            for report in smaller
        },
    }
