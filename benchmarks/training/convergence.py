"""Accuracy and loss with Ok-Topk beside the dense allreduce, after the same number of steps.

    python -m benchmarks.training.convergence [--images FOLDER] [--text FILE] [--plot FILE.png]

A convolutional network on images (SGD with momentum, test accuracy) and a small transformer on
characters (AdamW, validation loss), over simulated workers. Dense and sparse runs of a seed start
from the same parameters and see the same batches, whose size does not depend on the number of
workers. The learning rates were chosen for the dense runs.

A long experiment can be cut in pieces: ``--tasks``, ``--workers`` and ``--only`` choose what is
trained, ``--json`` keeps each run when it is done, and ``--read FILE ...`` prints and plots runs
that were kept, and trains nothing.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

import optax_ext

from .._common import display, options, reports
from .._common.contestants import DECAY
from ._data import read_images, read_text
from ._recorded_training import MOMENTUM, schedule
from ._simulated_training import AXIS, Task, Variant, exact_top_k, train
from ._small_models import HEADS, WIDTH, convolutional
from ._small_tasks import image_task, text_task

# What is measured, and whether it is to be large.
MEASURES = {"images": ("test accuracy", True), "text": ("validation loss", False)}
TASKS = tuple(MEASURES)
RECIPE = "warm-up, small leaves dense"
DENSE = "dense"
# What --json writes, as far as --read uses it. A run that has diverged is one too.
_NUMBER = reports.number(nan=True)
_CURVE = {"steps": [reports.whole(0)], "values": [_NUMBER], "words": reports.optional(_NUMBER)}
MEASURED = [
    {
        "task": reports.text(*TASKS),
        "variant": reports.text(),
        "workers": reports.whole(1),
        "density": reports.number(0, 1),
        "batch": reports.whole(1),
        "rate": reports.number(),
        "curves": [_CURVE],
    }
]


def variants(task: str, density: float, steps: int, rate: float) -> dict[str, Variant]:
    """By name, the dense one first."""
    peak, warm = schedule(rate, steps), max(1, steps // 10)
    common = {"density": density, "axis": AXIS, "selector": exact_top_k(density)}
    sparse = functools.partial(optax_ext.ok_topk, **common)
    if task == "images":
        optimizer = optax.sgd(peak, momentum=MOMENTUM)
        # Without momentum the same distance takes a rate larger by what momentum sums up.
        inside = schedule(rate / (1 - MOMENTUM), steps)
        correction = optax_ext.momentum_correction(MOMENTUM)
        special = {
            "dense warm-up": Variant(sparse(dense_steps=warm), optimizer),
            "momentum correction": Variant(sparse(correction=correction), optax.sgd(peak)),
            "ok_topk_sgd": Variant(optax_ext.ok_topk_sgd(inside, **common), optax.identity()),
        }
    else:
        optimizer = optax.adamw(peak, weight_decay=DECAY)
        recipe = sparse(dense_steps=warm, dense_leaves=optax_ext.small_leaves())
        special = {RECIPE: Variant(recipe, optimizer)}
    usual = {DENSE: optax_ext.dense(axis=AXIS), "ok_topk": sparse()}
    return {name: Variant(exchange, optimizer) for name, exchange in usual.items()} | special


def tasks(args: argparse.Namespace) -> dict[str, Task]:
    """Those that are asked for, by name."""
    made = {}
    if "images" in args.tasks:
        data = read_images(args.images)
        made["images"] = image_task(data, convolutional(data.train_images.shape[1:], data.classes))
    if "text" in args.tasks:
        made["text"] = text_task(read_text(args.text), width=args.width)
    return made


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One report for each task, variant and number of workers."""
    runs = []
    for name, task in tasks(args).items():
        rate, batch, steps = (getattr(args, f"{x}_{name}") for x in ("rate", "batch", "steps"))
        given = {"steps": steps, "batch": batch, "every": max(1, steps // args.points)}
        chosen = variants(name, args.density, steps, rate)
        kept = [variant for variant in chosen if not args.only or variant in args.only]
        for variant, workers in itertools.product(kept, args.workers):
            given |= {"workers": workers, "seeds": range(args.seeds), "label": variant}
            case = {"task": name, "variant": variant, "workers": workers, "batch": batch}
            case |= {"density": args.density, "width": args.width, "rate": rate}
            curves = train(task, chosen[variant], **given)
            runs.append(case | {"curves": [x._asdict() for x in curves]})
            reports.write(args.json, runs)
    return runs


def last_of(report: dict[str, Any]) -> np.ndarray:
    """The last value of each seed."""
    return np.array([curve["values"][-1] for curve in report["curves"]])


def gaps(report: dict[str, Any], runs: Sequence[dict[str, Any]]) -> np.ndarray | None:
    """What is worse than the dense run of each seed that both have.

    In points of accuracy, or in percent of the dense loss. None without a dense run. A dense
    run with another number of workers does: it differs by rounding alone.
    """
    dense = [r for r in runs if r["task"] == report["task"] and r["variant"] == DENSE]
    if not dense:
        return None
    same = [r for r in dense if r["workers"] == report["workers"]]
    values, reference = last_of(report), last_of((same or dense)[0])
    both = min(len(values), len(reference))
    values, reference = values[:both], reference[:both]
    if MEASURES[report["task"]][1]:
        return 100 * (reference - values)
    return 100 * (values / reference - 1)


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Prints the table of each task."""
    for task in dict.fromkeys(run["task"] for run in runs):
        rows, (measure, large) = [], MEASURES[task]
        for run in (run for run in runs if run["task"] == task):
            worse, values = gaps(run, runs), last_of(run) * (100 if large else 1)
            row = run | {"seeds": len(values), "mean": values.mean(), "worse": None}
            if worse is not None and run["variant"] != DENSE:
                row["worse"] = worse.mean()
            row["deviation"] = values.std(ddof=1) if len(values) > 1 else None
            rows.append(row | {"words": run["curves"][0]["words"]})
        title = "after {} steps, density {density:.1%}, batch {batch}, rate {rate:g}"
        after = title.format(rows[0]["curves"][0]["steps"][-1], **rows[0])
        unit = "points" if large else "%"
        fields = "variant workers seeds mean deviation worse words"
        display.show_fields(f"{task}: {measure} {after}; worse than dense by {unit}", fields, rows)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves, the mean of the seeds, without the first points."""
    panels = []
    for task in dict.fromkeys(run["task"] for run in runs):
        lines = {}
        for run in (run for run in runs if run["task"] == task):
            steps = run["curves"][0]["steps"]
            first = min(2, len(steps) - 1)
            values = np.mean([curve["values"] for curve in run["curves"]], 0)
            lines[f"{run['variant']}, P = {run['workers']}"] = steps[first:], values[first:]
        panels.append({"title": f"{task}, {MEASURES[task][0]}", "xlabel": "step", "lines": lines})
    display.draw(path, panels)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = options.parser_of(__doc__)
    options.add_data(parser)
    add = parser.add_argument
    options.add_usual(parser, workers=[16, 32], density=0.01, width=WIDTH)
    options.add_usual(parser, seeds=2, points=10)
    add("--tasks", nargs="+", choices=TASKS, default=TASKS)
    add("--only", nargs="+", metavar="NAME", help="of these variants")
    add("--steps", type=options.several, help="of each run, of both tasks")
    for task, steps, batch, rate in (("images", 1000, 128, 0.05), ("text", 2000, 32, 0.02)):
        add(f"--steps-{task}", type=options.several, default=steps)
        add(f"--batch-{task}", type=options.at_least_one, default=batch, help="of all workers")
        add(f"--rate-{task}", type=options.positive, default=rate, help="the peak")
    options.add_outputs(parser, plot=True)
    add("--read", type=Path, nargs="+", metavar="FILE", help="from --json")
    args = parser.parse_args(argv)
    if args.steps:
        args.steps_images = args.steps_text = args.steps
    known = {name for task in args.tasks for name in variants(task, args.density, 2, 1.0)}
    options.check_names(parser, args.only, sorted(known))
    if args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    for workers, task in itertools.product(args.workers, args.tasks):
        if getattr(args, f"batch_{task}") % workers:
            parser.error(f"--batch-{task} can't be dealt out to {workers} workers")
    return args


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What --json wrote; an InputError where a file cannot be read, or holds something else."""
    runs = []
    for path in paths:
        for report in reports.read(path, MEASURED, "benchmarks.training.convergence --json"):
            name, curves = f"{path}: {report['task']}, {report['variant']}", report["curves"]
            steps = curves[0]["steps"]
            if len(steps) < 2:
                raise options.InputError(f"{name}: a curve needs two points, got {len(steps)}")
            if any(len(c["values"]) != len(steps) or c["steps"] != steps for c in curves):
                raise options.InputError(
                    f"{name}: all seeds need the same steps, and a value after each of them"
                )
            runs.append(report)
    return runs


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    args = parse(argv)
    runs = read_runs(args.read) if args.read else run_all(args)
    show(runs)
    if args.plot:
        draw(runs, args.plot)


if __name__ == "__main__":
    sys.exit(main())
