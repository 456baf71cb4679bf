"""Load balance in Ok-Topk: regions and data balancing, on and off (Figure 7 of the paper).

    python -m benchmarks.training.load_balance [--text FILE] [--images FOLDER] [--plot FILE.png]

Two networks are trained with exact top-k error feedback over the largest requested number of
simulated workers, and the selections of some steps are recorded; smaller numbers of workers use the
first of them. They go through `ok_topk` with `regions` equal and balanced, and `balance` never,
auto and always: as the training gives them, and with the gradient of one layer multiplied before
the accumulation (and divided again before the optimizer), so that nearly all are from a small part
of the indices.

benchmarks/archive.md explains the counts in the split and reduce and in the allgather. The regions
are cut at the first record, and then only if many entries overflow; `--period 1` cuts them at each.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparse_collectives import PaddedCOO

from .._common import display, options, reports
from ._measures import Leaf
from ._recorded_tasks import recorded_runs, recording_parser
from ._recorded_training import Recorder
from ._replay import owned, received, replay, unevenness

REGIONS = ("equal", "balanced")
BALANCES = ("never", "auto", "always")
# The paper balances if the largest count is more than so many times the mean.
PAPER_TRIGGER = 4


def recordings(args: argparse.Namespace) -> Iterator[tuple[list[PaddedCOO], dict[str, Any]]]:
    """Selections of some steps, ``[P, c]`` each, of both runs, without and with a layer scaled."""
    for run, hard in itertools.product(recorded_runs(args), (False, True)):
        recorder = Recorder(run, max(args.workers), args.factor if hard else None)
        steps: list[PaddedCOO] = []

        def keep(step, acc, gradient, selections, steps=steps):
            if step % args.every == args.every - 1:
                steps.append(jax.tree.map(lambda *x: np.stack(x), *jax.device_get(selections)))

        description = recorder.description(recorder.train(args.steps, visit=keep)) | {
            "case": f"{run.hard} x {args.factor:g}" if hard else "as trained",
            "recorded": len(steps),
            "layers": concentration(np.stack([step.indices for step in steps]), recorder.layout),
        }
        yield steps, description


def concentration(indices: np.ndarray, layout: Sequence[Leaf]) -> dict[str, dict[str, float]]:
    """The share of each layer in the parameters and in the selected entries."""
    edges = np.array([leaf.start for leaf in layout] + [sum(leaf.size for leaf in layout)])
    counts, sizes = owned(indices, edges), np.diff(edges)
    return {
        leaf.name: {"parameters": sizes[i] / edges[-1], "selected": counts[i] / counts.sum()}
        for i, leaf in enumerate(layout)
    }


def compare(
    steps: Sequence[PaddedCOO], workers: int, regions: str, density: float, period: int
) -> dict[str, Any]:
    """The report on one number of workers and one way to cut the regions."""
    size = steps[0].size
    k = max(1, round(density * size))
    bound = 6 * k * (workers - 1) / workers
    common = {"workers": workers, "density": density, "regions": regions, "period": period}
    results = {mode: replay(steps, balance=mode, **common) for mode in BALANCES}
    loads, before = [], []
    for recorded, result in zip(steps, results["auto"], strict=True):
        loads.append(received(recorded.indices[:workers], result.boundaries))
        # With 'auto' everything is delivered: a region's entries in the total are its owner's own.
        before.append(owned(result.indices, result.boundaries))
    selected = sum(np.count_nonzero(step.indices[:workers] < size) for step in steps)
    ratios = [unevenness(counts) for counts in before]
    return {
        "workers": workers,
        "regions": regions,
        "received": np.mean([unevenness(load) for load in loads]),
        "received_of_k": np.mean([np.max(load) for load in loads]) / k,
        "overflow": sum(step.overflow for step in results["auto"]) / selected,
        "before": np.mean(ratios),
        "over_trigger": np.mean([ratio > PAPER_TRIGGER for ratio in ratios]),
        "balance": {
            mode: {
                "after": np.mean([unevenness((s.indices < size).sum(1)) for s in of_mode]),
                "delivered": np.mean([step.delivered for step in of_mode]) / k,
                "words_of_bound": np.mean([step.words for step in of_mode]) / bound,
            }
            for mode, of_mode in results.items()
        },
    }


def draw(runs: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Draws the unevenness in both phases over the number of workers, a column for each run."""
    above, below = [], []
    for report in runs:
        reduced, gathered = {}, {}
        for regions, rows in display.grouped(report["rows"], "regions").items():
            workers = [row["workers"] for row in rows]
            reduced[f"{regions} regions"] = workers, [row["received"] for row in rows]
            gathered[f"{regions} regions, before"] = workers, [row["before"] for row in rows]
            for mode in BALANCES[1:]:
                after = [row["balance"][mode]["after"] for row in rows]
                gathered[f"{regions} regions, {mode}"] = workers, after
        title = f"{report['run']}, {report['case']}"
        given = {"xlabel": "workers", "workers": True}
        above.append({"title": title, "ylabel": "received, max / mean", "lines": reduced} | given)
        below.append({"ylabel": "to send, max / mean", "lines": gathered} | given)
    display.draw(path, above, below)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    usual = {"steps": 40, "workers": [16, 32, 64], "every": 5}
    usual |= {"period": (64, "records to a repartition")}
    usual |= {"factor": (100.0, "on the gradient of a layer")}
    parser = recording_parser(__doc__, "plot", **usual)
    args = parser.parse_args(argv)
    if args.every > args.steps:
        parser.error(f"--every {args.every} records nothing of {args.steps} steps")
    runs = []
    for steps, report in recordings(args):
        report["rows"] = [
            compare(steps, workers, regions, report["density"], args.period)
            for workers in sorted(args.workers)
            for regions in REGIONS
        ]
        runs.append(report)
        title = f"{report['run']}, {report['case']}"
        layers = [{"layer": name, **share} for name, share in report["layers"].items()]
        display.show_rows(f"{title}: shares of the layers", layers)
        display.show_rows(title, report["rows"])
    content = {"every": args.every, "period": args.period, "runs": runs}
    reports.write(args.json, {"backend": jax.default_backend()} | content)
    draw(runs, args.plot)


if __name__ == "__main__":
    raise SystemExit(main())
