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
import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._common import display, options
from ..training._simulated_training import Task, train
from . import _lines, _tasks
from ._contestants import DENSE, DENSITY, contestants, neighbour
from ._lines import Line, worse
from ._store import Store
from ._tasks import KINDS

# What a run has: what tells it from others, and what it came to.
KEY = ("task", "width", "contestant", "share", "workers", "batch", "steps", "rate", "seed")
NEEDED = (*KEY, "value", "words", "curve")


def run_all(task: Task, store: Store, args: argparse.Namespace) -> None:
    """All runs that are not in the store."""
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    everyone = contestants(args.task, args.share)
    chosen = {name: make for name, make in everyone.items() if not args.only or name in args.only}
    chosen |= args.neighbours
    for (name, make), workers in itertools.product(chosen.items(), args.workers):
        case = case_of(name, workers, args)
        for rate, seed in store.missing(args.rates, args.seeds, **case):
            given = {"workers": workers, "steps": args.steps, "batch": args.batch}
            every, label = max(1, args.steps // args.points), f"{name} at {rate:g}"
            variant = make(rate, args.steps)
            curve = train(task, variant, **given, every=every, seeds=[seed], label=label)[0]
            found = {"rate": rate, "seed": seed, "value": curve.values[-1], "words": curve.words}
            points = {"steps": curve.steps, "values": curve.values, "size": size}
            store.add({**case, **found, "curve": points})


def case_of(name: str, workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a contestant have in common."""
    case = {key: getattr(args, key) for key in ("task", "width", "share", "batch", "steps")}
    # A dense run is the same for every share, and for every number of workers.
    own = {"share": 1.0, "workers": 1} if name == DENSE else {"workers": workers}
    return case | {"contestant": name} | own


def kept(store: Store, args: argparse.Namespace) -> Iterator[Line]:
    """The runs with the best rate of each contestant, in the store, in the order of the seeds."""
    stored = (run["contestant"] for run in store.runs)
    names = dict.fromkeys([*contestants(args.task, args.share), *args.neighbours, *stored])
    for name in names:
        for workers in args.workers[:1] if name == DENSE else args.workers:
            if runs := store.best(**case_of(name, workers, args)):
                yield Line(name, None if name == DENSE else workers, runs)


def show(store: Store, args: argparse.Namespace) -> None:
    """The table of the best rate of each contestant, and the figure that is asked for."""
    large, found = KINDS[args.task].large, list(kept(store, args))
    dense = {run["seed"]: run["value"] for x in found if x.name == DENSE for run in x.runs}
    head = ("", "P", "rate", "seeds", "mean", "deviation", "worse by", "of each seed", "words")
    title = f"{args.task}, {args.steps} steps, rates {', '.join(f'{r:g}' for r in args.rates)}"
    title += f"; worse by {'points' if large else '% of the loss'}"
    display.show(title, head, [_cells(line, dense, large) for line in found])
    if args.plot:
        title = f"{args.task}, {args.steps} steps, share {args.share:g}"
        _lines.draw(args.plot, found, args.workers, "steps", title)


def _cells(line: Line, dense: dict[int, float], large: bool) -> list[str]:
    name, workers, runs = line
    pairs = [(run["value"], dense[run["seed"]]) for run in runs if run["seed"] in dense]
    each = [] if name == DENSE else [worse(*pair, large) for pair in pairs]
    words = "-"
    if workers is not None and runs[0]["words"] is not None:
        k = DENSITY * runs[0]["curve"]["size"] * (workers - 1) / workers
        words = f"{runs[0]['words'] / k:.2f}"
    of_each = [f"{np.mean(each):+.2f}", ", ".join(f"{x:+.2f}" for x in each)] if each else "--"
    return [name, "any" if workers is None else str(workers), *line.ends(large), *of_each, words]


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains what is missing, and prints all of it."""
    parser = _lines.parser_of(__doc__, KINDS, "text")
    add = parser.add_argument
    options.add_usual(parser, workers=[4, 8, 16, 32], seeds=3)
    options.add_usual(parser, share=(1.0, "multiplies every density"), points=8)
    add("--steps", type=options.several, default=2000)
    args = parser.parse_args(argv)
    names = list(contestants(args.task, args.share))
    _lines.complete(parser, args, names, functools.partial(neighbour, args.task, args.share))
    store = Store(args.runs, NEEDED, KINDS[args.task].large)
    if not args.show:
        run_all(_tasks.make(args.task, args.width, args.text, args.images), store, args)
    show(store, args)


if __name__ == "__main__":
    sys.exit(main())
