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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

import optax_ext

from .._common import options, reports
from . import _tables
from ._data import read_images, read_text
from ._recorded_training import MOMENTUM, schedule
from ._simulated_training import AXIS, Task, Variant, exact_top_k, train
from ._small_models import HEADS, WIDTH, convolutional
from ._small_tasks import image_task, text_task

TASKS = ("images", "text")
# What is measured, and whether it is to be large.
MEASURES = {"images": ("test accuracy", True), "text": ("validation loss", False)}
DECAY = 0.01
RECIPE = "warm-up, small leaves dense"
DENSE = "dense"
# What --json writes, as far as --read uses it. A run that has diverged is one too.
MEASURED = [
    {
        "task": reports.text(*TASKS),
        "variant": reports.text(),
        "workers": reports.whole(1),
        "density": reports.number(0, 1),
        "batch": reports.whole(1),
        "rate": reports.number(),
        "curves": [
            {
                "steps": [reports.whole(0)],
                "values": [reports.number(nan=True)],
                "words": reports.optional(reports.number(nan=True)),
            }
        ],
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


def run_all(tasks: Sequence[Task], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One report for each task, variant and number of workers."""
    runs = []
    for task in tasks:
        names = ("rate", "batch", "steps")
        rate, batch, steps = (getattr(args, f"{name}_{task.name}") for name in names)
        given = {"steps": steps, "batch": batch, "every": max(1, steps // args.points)}
        chosen = variants(task.name, args.density, steps, rate)
        for name in filter(lambda name: not args.only or name in args.only, chosen):
            for workers in args.workers:
                common = given | {"workers": workers, "seeds": range(args.seeds), "label": name}
                runs.append(
                    {
                        "task": task.name,
                        "variant": name,
                        "workers": workers,
                        "density": args.density,
                        "batch": batch,
                        "width": args.width if task.name == "text" else None,
                        "rate": rate,
                        "curves": [x._asdict() for x in train(task, chosen[name], **common)],
                    }
                )
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
            numbers = {"seeds": len(values), "mean": values.mean(), "worse": None}
            if worse is not None and run["variant"] != DENSE:
                numbers["worse"] = worse.mean()
            deviation = values.std(ddof=1) if len(values) > 1 else None
            words = run["curves"][0]["words"]
            rows.append(run | numbers | {"deviation": deviation, "words": words})
        title = "after {} steps, density {density:.1%}, batch {batch}, rate {rate:g}"
        after = title.format(rows[0]["curves"][0]["steps"][-1], **rows[0])
        unit = "points" if large else "%"
        fields = "variant workers seeds mean deviation worse words"
        _tables.show(f"{task}: {measure} {after}; worse than dense by {unit}", fields, rows)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves: one color for each variant, one line style for each number of workers."""
    panels = []
    for task in dict.fromkeys(run["task"] for run in runs):
        rows = [run for run in runs if run["task"] == task]
        names = list(dict.fromkeys(run["variant"] for run in rows))
        counts = sorted({run["workers"] for run in rows})
        lines = []
        for run in rows:
            values = np.mean([curve["values"] for curve in run["curves"]], 0)
            line = ("-", "--", ":", "-.")[counts.index(run["workers"]) % 4]
            style = f"C{names.index(run['variant'])}{line}"
            label = f"{run['variant']}, P = {run['workers']}"
            lines.append((run["curves"][0]["steps"], values, style, label))
        panels.append({"title": f"{task}, {MEASURES[task][0]}", "xlabel": "step", "lines": lines})
        # The first steps would take up most of the height.
        ends = np.concatenate([y[min(2, len(y) - 1) :] for _, y, _, _ in lines])
        if (room := 0.05 * np.ptp(ends)) > 0:
            panels[-1]["ylim"] = (ends.min() - room, ends.max() + room)
    _tables.draw(path, panels)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS)
    add("--workers", type=options.several, nargs="+", default=[16, 32], metavar="P")
    add("--only", nargs="+", metavar="NAME", help="of these variants")
    add("--density", type=options.share, default=0.01)
    add("--steps", type=options.several, help="of each run, of both tasks")
    add("--steps-images", type=options.several, default=1000)
    add("--steps-text", type=options.several, default=2000)
    add("--width", type=options.at_least_one, default=WIDTH, help="of the transformer")
    add("--batch-images", type=options.at_least_one, default=128, help="of all workers")
    add("--batch-text", type=options.at_least_one, default=32, help="of all workers")
    add("--rate-images", type=options.positive, default=0.05, help="the peak")
    add("--rate-text", type=options.positive, default=0.02, help="the peak")
    add("--seeds", type=options.at_least_one, default=2)
    add("--points", type=options.at_least_one, default=10, help="of a curve")
    options.add_outputs(parser, plot=True)
    add("--read", type=Path, nargs="+", metavar="FILE", help="from --json")
    args = parser.parse_args(argv)
    if args.steps:
        args.steps_images = args.steps_text = args.steps
    known = {name for task in args.tasks for name in variants(task, args.density, 2, 1.0)}
    for name in args.only or ():
        if name not in known:
            parser.error(f"--only {name!r} is none of: {'; '.join(sorted(known))}")
    if args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    for workers in args.workers:
        for task in args.tasks:
            if getattr(args, f"batch_{task}") % workers:
                parser.error(f"--batch-{task} can't be dealt out to {workers} workers")
    return args


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What --json wrote.

    Raises:
      InputError: a file cannot be read, or holds something else.
    """
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
    if args.read:
        runs = read_runs(args.read)
    else:
        tasks = []
        if "images" in args.tasks:
            data = read_images(args.images)
            network = convolutional(data.train_images.shape[1:], data.classes)
            tasks.append(image_task(data, network))
        if "text" in args.tasks:
            tasks.append(text_task(read_text(args.text), width=args.width))
        runs = run_all(tasks, args)
    show(runs)
    if args.plot:
        draw(runs, args.plot)


if __name__ == "__main__":
    sys.exit(main())
