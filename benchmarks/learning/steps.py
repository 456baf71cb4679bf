"""Loss, or accuracy, after the same number of steps, of ways to train over simulated workers.

    python -m benchmarks.learning.steps --runs FILE [--text FILE | --images FOLDER] [options]

Each contestant trains once with every rate of ``--rates``, and with the best of them from the
other seeds. All see the same batches in the same order, whatever the number of workers. A run that
is in FILE is not made again, so that an experiment can be cut short and go on; ``--show`` prints
what is there and trains nothing.

Words are those that a worker receives in a step, as multiples of k (P-1)/P for k = 1 % of n.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._common import display, options
from ..training._data import read_images, read_text
from ..training._simulated_training import Task, train
from ..training._small_models import HEADS, WIDTH, convolutional
from ..training._small_tasks import image_task, text_task
from ._contestants import DENSE, DENSITY, contestants
from ._store import Store

# Whether a large value is a good one.
LARGE = {"text": False, "images": True}
RATES = {"text": (0.01, 0.02, 0.03), "images": (0.02, 0.05, 0.1, 0.2, 0.5)}
BATCHES = {"text": 32, "images": 128}


def best(store: Store, task: str, **case: Any) -> float | None:
    """The rate whose run from seed 0 ended best; None without runs."""
    ended = store.find(task=task, seed=0, **case)
    ended = [run for run in ended if math.isfinite(run["value"])]
    if not ended:
        return None
    sign = -1 if LARGE[task] else 1
    return min(ended, key=lambda run: sign * run["value"])["rate"]


def run_all(task: Task, store: Store, args: argparse.Namespace) -> None:
    """All runs that are not in the store."""
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    for name, make in contestants(args.task, args.share).items():
        if args.only and name not in args.only:
            continue
        for workers in args.workers:
            case = case_of(name, workers, args)

            def one(rate: float, seed: int, make=make, workers=workers, case=case) -> None:
                if store.find(rate=rate, seed=seed, **case):
                    return
                curve = train(
                    task,
                    make(rate, args.steps),
                    workers=workers,
                    steps=args.steps,
                    every=max(1, args.steps // args.points),
                    batch=args.batch,
                    seeds=[seed],
                    label=f"{case['contestant']} at {rate:g}",
                )[0]
                found = {"value": curve.values[-1], "words": curve.words}
                curve = {"steps": curve.steps, "values": curve.values, "size": size}
                store.add({**case, "rate": rate, "seed": seed, **found, "curve": curve})

            for rate in args.rates:
                one(rate, 0)
            chosen = best(store, **case)
            for seed in range(1, args.seeds):
                if chosen is not None:
                    one(chosen, seed)


def case_of(name: str, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a contestant have in common."""
    return {
        "task": args.task,
        "width": args.width if args.task == "text" else None,
        "contestant": name,
        "share": args.share,
        # A dense run is the same for every number of workers.
        "workers": min(args.workers) if name == DENSE else workers,
        "batch": args.batch,
        "steps": args.steps,
    }


def show(store: Store, args: argparse.Namespace) -> None:
    """The table of the best rate of each contestant."""
    lines, reference = [], None
    for name in contestants(args.task, args.share):
        for workers in args.workers:
            case = case_of(name, workers, args)
            if name == DENSE and workers != case["workers"]:
                continue
            rate = best(store, **case)
            if rate is None:
                continue
            runs = sorted(store.find(rate=rate, **case), key=lambda run: run["seed"])
            values = {run["seed"]: run["value"] for run in runs}
            if name == DENSE:
                reference = values
            lines.append(_line(name, workers, rate, values, reference, runs[0], args.task))
    head = ("", "P", "rate", "seeds", "mean", "deviation", "worse by", "of each seed", "words")
    unit = "points" if LARGE[args.task] else "% of the loss"
    title = f"{args.task}, {args.steps} steps, rates {', '.join(f'{r:g}' for r in args.rates)}"
    display.show(f"{title}; worse by {unit}", head, lines)


def _line(
    name: str,
    workers: int,
    rate: float,
    values: dict[int, float],
    reference: dict[int, float] | None,
    run: dict[str, Any],
    task: str,
) -> list[str]:
    scale = 100 if LARGE[task] else 1
    ended = scale * np.array(list(values.values()))
    worse = []
    if reference is not None and name != DENSE:
        for seed, value in values.items():
            if seed in reference:
                other = reference[seed]
                worse.append(100 * (other - value if LARGE[task] else value / other - 1))
    k = DENSITY * run["curve"]["size"] * (workers - 1) / workers
    return [
        name,
        "any" if name == DENSE else str(workers),
        f"{rate:g}",
        str(len(ended)),
        f"{ended.mean():.3f}",
        f"{ended.std(ddof=1):.3f}" if len(ended) > 1 else "-",
        f"{np.mean(worse):+.2f}" if worse else "-",
        ", ".join(f"{x:+.2f}" for x in worse) or "-",
        "-" if run["words"] is None or name == DENSE else f"{run['words'] / k:.2f}",
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--task", choices=tuple(LARGE), default="text")
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--runs", type=options.output, metavar="FILE", help="keep runs here, and go on with them")
    add("--show", action="store_true", help="what is in --runs, and train nothing")
    add("--workers", type=options.several, nargs="+", default=[4, 8, 16, 32], metavar="P")
    add("--steps", type=options.several, default=2000)
    add("--rates", type=options.positive, nargs="+", metavar="RATE", help="peaks")
    add("--seeds", type=options.at_least_one, default=3)
    add("--only", nargs="+", metavar="NAME", help="of these contestants")
    add("--share", type=options.positive, default=1.0, help="multiplies every density")
    add("--width", type=options.at_least_one, default=WIDTH, help="of the transformer")
    add("--batch", type=options.at_least_one, help="of all workers")
    add("--points", type=options.at_least_one, default=8, help="of a curve")
    args = parser.parse_args(argv)
    args.rates = sorted(args.rates or RATES[args.task])
    args.batch = args.batch or BATCHES[args.task]
    names = contestants(args.task, args.share)
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only {name!r} is none of: {'; '.join(names)}")
    if args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    for workers in args.workers:
        if args.batch % workers:
            parser.error(f"--batch {args.batch} can't be dealt out to {workers} workers")
    if args.show and args.runs is None:
        parser.error("--show needs --runs FILE")
    return args


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains what is missing, and prints all of it."""
    args = parse(argv)
    store = Store(args.runs)
    if not args.show:
        run_all(_task(args), store, args)
    show(store, args)


def _task(args: argparse.Namespace) -> Task:
    if args.task == "text":
        return text_task(read_text(args.text), width=args.width)
    data = read_images(args.images)
    return image_task(data, convolutional(data.train_images.shape[1:], data.classes))


if __name__ == "__main__":
    sys.exit(main())
