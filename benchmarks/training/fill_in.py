"""Fill-in: how many distinct indices the selections of all workers have together.

    python -m benchmarks.training.fill_in [--text FILE] [--images FOLDER] [--plot FILE.png]

First, selections of uniformly random indices: the mean size of their union over some trials, with
its standard error, next to the formula n (1 - (1 - k/n)^P) of SparCML (appendix B).

Second, selections of real training. Two networks (an LSTM on characters, a VGG-like network on
images) are trained with exact top-k error feedback over P simulated workers. At every step the
union of the workers' selections is counted: the density of the result of an allreduce that delivers
all of it. Third, the prediction of `cost_model` for this union from the union of fewer workers: the
first ones of a run, and the workers of separate runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_collectives import cost_model

from .._common import display, options, reports
from ._recorded_tasks import recorded_runs, recording_parser
from ._recorded_training import Recorder, Run
from ._unions import growth, parts, predictions, uniform

# Ok-Topk, section 5.2: the density of the result, by run and number of workers.
PAPER = {("images", 16): 0.132, ("text", 32): 0.345}
UNIFORM_DENSITIES = (0.01, 0.02)


def record(run: Run, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains with so many workers and counts the unions."""
    recorder, unions = Recorder(run, workers), []

    def count(step, acc, gradient, selections):
        indices = (np.asarray(coo.indices) for coo in selections)
        unions.append(growth(indices, recorder.size))

    report = recorder.description(recorder.train(args.steps, visit=count))
    table, size, k = np.array(unions), recorder.size, recorder.k
    mean = table.mean(0)
    overlap = cost_model.Overlap(mean[-1], workers)
    return report | {
        "batch": args.batch,
        "union": parts(table[:, -1] / size),
        "union_of_k": mean[-1] / k,
        "uniform": cost_model.expected_union(size, k, workers) / size,
        "effective_size": cost_model._fill_in.effective_size(k, overlap) / size,
        "paper": PAPER.get((run.name, workers)),
        "growth": mean / size,
        "series": np.round(table[:, -1] / size, 5),
    }


def draw(tasks: Sequence[Sequence[dict[str, Any]]], path: Path | None) -> None:
    """Draws the growth with the number of workers, and the union over the steps."""
    above, below = [], []
    for runs in tasks:
        grown, followed, largest = {}, {}, max(runs, key=lambda run: run["workers"])
        for run in runs:
            workers, label = run["workers"], f"P = {run['workers']}"
            grown[label] = np.arange(1, workers + 1), 100 * run["growth"]
            if run["paper"]:
                grown["Ok-Topk paper"] = workers, 100 * run["paper"], "k*"
            followed[label] = np.arange(run["steps"]), 100 * run["series"]
            uniform = np.full(run["steps"], 100 * run["uniform"])
            followed[f"{label}, uniform"] = np.arange(run["steps"]), uniform
        counts, size, k = range(1, 1 + largest["workers"]), largest["size"], largest["k"]
        formula = [100 * cost_model.expected_union(size, k, p) / size for p in counts]
        grown["uniform"] = counts, formula, "k:"
        given = {"ylabel": "union / n, %"}
        title = f"{largest['run']}, density {largest['density']:.1%}"
        above.append({"title": title, "xlabel": "workers", "lines": grown, **given})
        below.append({"xlabel": "step", "lines": followed, **given})
    display.draw(path, above, below)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    usual = {"steps": 120, "workers": [16, 32], "trials": (30, "with random selections")}
    usual |= {"uniform_size": (100_000, "n, random selections")}
    args = recording_parser(__doc__, "plot", **usual).parse_args(argv)
    runs = recorded_runs(args)
    tables = [uniform(args.uniform_size, x, args.trials, args.seed) for x in UNIFORM_DENSITIES]
    for table in tables:
        title = "uniform selections: n = {size:,}, k = {k:,}, {trials} trials".format(**table)
        display.show_rows(title, table["rows"])
    tasks, predicted = [], []
    for run in runs:
        tasks.append([record(run, workers, args) for workers in args.workers])
        predicted.append(predictions(tasks[-1]))
        display.show_rows(f"{run.name}: the union, / n", tasks[-1])
        display.show_rows("predicted from fewer workers, / n", [predicted[-1]])
    content = {"uniform": tables, "runs": tasks, "predictions": predicted}
    reports.write(args.json, {"backend": jax.default_backend()} | content)
    draw(tasks, args.plot)


if __name__ == "__main__":
    raise SystemExit(main())
