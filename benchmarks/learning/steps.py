"""Loss, or accuracy, after the same number of steps, of ways to train over simulated workers.

    python -m benchmarks.learning.steps --task text --runs FILE [--text FILE] [options]
    python -m benchmarks.learning.steps --only dense --options gain=2 --options b2=0.999 gain=2

Each contestant trains once with every rate of ``--rates``, and with the best of them from the
other seeds. All see the same batches in the same order, whatever the number of workers. A run that
is in FILE is not made again, so that an experiment can be cut short and go on; ``--show`` prints
what is there and trains nothing. Each ``--options`` adds a contestant: the default of the library
with these options, such as gain, b2, step_ahead or density.

Words are those that a worker receives in a step, as multiples of k (P-1)/P for k = 1 % of n.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._common import display, options
from ..training._simulated_training import Task, train
from ..training._small_models import HEADS
from . import _plot, _tasks
from ._contestants import DENSE, DENSITY, Contestant, contestants
from ._neighbours import neighbour, option
from ._store import Store
from ._tasks import KINDS

# What a run has: what tells it from others, and what it came to.
KEY = ("task", "width", "contestant", "share", "workers", "batch", "steps", "rate", "seed")
NEEDED = (*KEY, "value", "words", "curve")


def chosen(args: argparse.Namespace) -> dict[str, Contestant]:
    """The contestants that are to train, by name."""
    everyone = contestants(args.task, args.share)
    kept = {name: make for name, make in everyone.items() if not args.only or name in args.only}
    return kept | args.neighbours


def run_all(task: Task, store: Store, args: argparse.Namespace) -> None:
    """All runs that are not in the store."""
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    for name, make in chosen(args).items():
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
            found = store.best_rate(KINDS[args.task].large, **case)
            for seed in range(1, args.seeds):
                if found is not None:
                    one(found, seed)


def case_of(name: str, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a contestant have in common."""
    return {
        "task": args.task,
        "width": args.width,
        "contestant": name,
        # A dense run is the same for every share, and for every number of workers.
        "share": 1.0 if name == DENSE else args.share,
        "workers": 1 if name == DENSE else workers,
        "batch": args.batch,
        "steps": args.steps,
    }


def kept(store: Store, args: argparse.Namespace) -> Iterator[_plot.Line]:
    """The runs with the best rate of each contestant, in the store, in the order of the seeds."""
    stored = (run["contestant"] for run in store.runs)
    for name in dict.fromkeys([*contestants(args.task, args.share), *args.neighbours, *stored]):
        for workers in args.workers:
            case = case_of(name, workers, args)
            rate = store.best_rate(KINDS[args.task].large, **case)
            if rate is None or (name == DENSE and workers != args.workers[0]):
                continue
            runs = sorted(store.find(rate=rate, **case), key=lambda run: run["seed"])
            yield _plot.Line(name, None if name == DENSE else workers, runs)


def show(store: Store, args: argparse.Namespace) -> None:
    """The table of the best rate of each contestant, and the figure that is asked for."""
    lines, reference, found = [], None, list(kept(store, args))
    for name, workers, runs in found:
        if name == DENSE:
            reference = {run["seed"]: run["value"] for run in runs}
        lines.append(_line(name, workers, runs, reference, KINDS[args.task].large))
    head = ("", "P", "rate", "seeds", "mean", "deviation", "worse by", "of each seed", "words")
    unit = "points" if KINDS[args.task].large else "% of the loss"
    title = f"{args.task}, {args.steps} steps, rates {', '.join(f'{r:g}' for r in args.rates)}"
    display.show(f"{title}; worse by {unit}", head, lines)
    if args.plot:
        measure = "accuracy" if KINDS[args.task].large else "validation loss"
        title = f"{args.task}, {args.steps} steps, share {args.share:g}; best rate of each"
        _plot.draw(args.plot, title, measure, found, args.workers)


def _line(
    name: str,
    workers: int | None,
    runs: list[dict[str, Any]],
    reference: dict[int, float] | None,
    large: bool,
) -> list[str]:
    scale, first = 100 if large else 1, runs[0]
    ended = scale * np.array([run["value"] for run in runs])
    worse = []
    if reference is not None and name != DENSE:
        for run in runs:
            if run["seed"] in reference:
                other, value = reference[run["seed"]], run["value"]
                worse.append(100 * (other - value if large else value / other - 1))
    words = "-"
    if workers is not None and first["words"] is not None:
        k = DENSITY * first["curve"]["size"] * (workers - 1) / workers
        words = f"{first['words'] / k:.2f}"
    return [
        name,
        "any" if workers is None else str(workers),
        f"{first['rate']:g}",
        str(len(ended)),
        f"{ended.mean():.3f}",
        f"{ended.std(ddof=1):.3f}" if len(ended) > 1 else "-",
        f"{np.mean(worse):+.2f}" if worse else "-",
        ", ".join(f"{x:+.2f}" for x in worse) or "-",
        words,
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    tasks = "; ".join(f"{name}: {kind.model}, {kind.optimizer}" for name, kind in KINDS.items())
    add("--task", choices=tuple(KINDS), default="text", help=tasks)
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--runs", type=options.output, metavar="FILE", help="keep runs here, and go on with them")
    add("--show", action="store_true", help="what is in --runs, and train nothing")
    add("--workers", type=options.several, nargs="+", default=[4, 8, 16, 32], metavar="P")
    add("--steps", type=options.several, default=2000)
    add("--rates", type=options.positive, nargs="+", metavar="RATE", help="peaks")
    add("--seeds", type=options.at_least_one, default=3)
    add("--only", nargs="+", metavar="NAME", help="of these contestants, and those of --options")
    add("--options", type=option, nargs="+", action="append", default=[], metavar="NAME=VALUE")
    add("--share", type=options.positive, default=1.0, help="multiplies every density")
    add("--width", type=options.at_least_one, help="of the model")
    add("--batch", type=options.at_least_one, help="of all workers")
    add("--points", type=options.at_least_one, default=8, help="of a curve")
    add("--plot", type=options.output, metavar="FILE", help="draw the curves: a PNG")
    args = parser.parse_args(argv)
    kind = KINDS[args.task]
    args.rates = sorted(args.rates or kind.rates)
    args.batch = args.batch or kind.batch
    if args.width and kind.width is None:
        parser.error(f"--width: the model of {args.task} has one width")
    args.width = args.width or kind.width
    names = contestants(args.task, args.share)
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only {name!r} is none of: {'; '.join(names)}")
    try:
        args.neighbours = dict(neighbour(args.task, args.share, given) for given in args.options)
    except ValueError as error:
        parser.error(f"--options: {error}")
    if args.task == "text" and args.width % HEADS:
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
    store = Store(args.runs, NEEDED)
    if not args.show:
        run_all(_tasks.make(args.task, args.width, args.text, args.images), store, args)
    show(store, args)


if __name__ == "__main__":
    sys.exit(main())
