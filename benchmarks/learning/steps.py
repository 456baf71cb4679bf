"""Loss, or accuracy, after the same number of steps, of ways to train over simulated workers.

    python -m benchmarks.learning.steps --task text --runs FILE [--text FILE] [options]
    python -m benchmarks.learning.steps --only dense --options gain=2 --options b2=0.999 gain=2

Each contestant trains once with every learning rate of ``--rates``, and with the best of them from
the other seeds. All see the same batches in the same order, whatever the number of workers. A run
that is in FILE is not repeated, so that an interrupted experiment can continue; ``--show`` prints
the runs in FILE and trains nothing. Each ``--options`` adds a contestant: the default of the
library with these options, such as gain, b2, step_ahead or density; with ``--only none`` these are
the only ones.

``--together`` trains a contestant with all rates and all seeds in one program, which is as fast on
a GPU as a few runs. With ``JAX_DEFAULT_MATMUL_PRECISION=float32`` a GPU computes as a CPU does.

Words are those that a worker receives in a step, as multiples of k (P-1)/P for k = 1 % of n.
``--options optimizer=diloco every=10`` adds AdamW in the rounds of another system. ``--plot-bytes``
draws the loss at the end against all bytes that a worker received: a line for each optimizer, over
its densities, or over the H of its rounds.
"""

import argparse
import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._common import display, options
from ..training._simulated_training import Curve, Task, train
from . import _lines, _tasks
from ._contestants import DENSE, DENSITY, ROUNDS, contestants, neighbour
from ._lines import Groups, Line, Store, worse
from ._tasks import KINDS

# The keys of a run: those that identify it, and its results.
NEEDED = ("task", "width", "contestant", "share", "workers", "batch", "steps", "rate", "seed")
NEEDED += ("value", "words", "curve")


def case_of(args: argparse.Namespace, name: str, workers: int | None) -> dict[str, Any]:
    """The keys that a contestant's runs share; a dense one is the same for any P."""
    case = {key: getattr(args, key) for key in ("task", "width", "share", "batch", "steps")}
    own = {"workers": workers} if workers else {"share": 1.0, "workers": 1}
    return case | {"contestant": name} | own


def run_all(task: Task, store: Store, makes: Any, groups: Groups, args: argparse.Namespace) -> None:
    """Makes all runs that are not in the store; with --together all of a case, or none."""
    given = {"steps": args.steps, "every": max(1, args.steps // args.points), "batch": args.batch}
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    cases = itertools.chain.from_iterable(
        ((name, workers) for workers in groups(name))
        for name in _lines.chosen(args, contestants(args.task))
    )
    for name, workers in cases:
        case = case_of(args, name, workers)
        many = {"workers": workers or args.workers[0], "together": args.together, **given}

        def trained(rates, seeds, name=name, many=many) -> dict[tuple[float, int], Any]:
            label = name if args.together else f"{name} at {rates[0]:g}"
            found = train(task, makes[name], rates=rates, seeds=seeds, label=label, **many)
            return {key: _results(curve, size) for key, curve in found.items()}

        if not args.together:
            _lines.run_missing(
                store, args, case, lambda rate, seed, of=trained: of([rate], [seed])[rate, seed]
            )
            continue
        keys = [(rate, seed) for rate in args.rates for seed in range(args.seeds)]
        missing = [key for key in keys if not store.has(case, *key)]
        found = trained(args.rates, range(args.seeds)) if missing else {}
        for rate, seed in missing:
            store.add({**case, "rate": rate, "seed": seed, **found[rate, seed]})


def _results(curve: Curve, size: int) -> dict[str, Any]:
    """The keys of a run that it has after the training."""
    points = {"steps": curve.steps, "values": curve.values, "size": size}
    return {"value": curve.values[-1], "words": curve.words, "curve": points}


def row_of(line: Line, dense: dict[int, float], large: bool) -> dict[str, Any]:
    """A row of the table: a contestant at its best, compared with the dense runs by seed."""
    name, workers, runs = line
    row = {"": name, "P": workers or "any", **line.ends(large)}
    pairs = [(run["value"], dense[run["seed"]]) for run in runs if run["seed"] in dense]
    each = [] if name == DENSE else [worse(*pair, large) for pair in pairs]
    row |= {"worse by": np.mean(each) if each else None, "of each seed": each or None}
    words = None
    if workers and runs[0]["words"] is not None:
        k = DENSITY * runs[0]["curve"]["size"] * (workers - 1) / workers
        words = runs[0]["words"] / k
    return row | {"words": words}


def draw_bytes(
    path: Path | None, lines: Iterable[Line], workers: Iterable[int], steps: int, title: str
) -> None:
    """Draws a PNG with a panel for each number of workers: final values against megabytes."""
    panels = []
    for p in workers:
        families: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            if line.group not in (None, p):
                continue
            words = line.runs[0]["words"]
            if words is None or line.group is None:
                words = 2 * line.runs[0]["curve"]["size"] * (p - 1) / p
            value = float(np.mean([run["value"] for run in line.runs]))
            families.setdefault(_family(line.name), []).append((4e-6 * words * steps, value))
        drawn = {
            name: tuple(zip(*sorted(points), strict=True)) for name, points in families.items()
        }
        label = "MB that a worker received"
        panels.append({"title": f"P = {p}", "xlabel": label, "xscale": "log", "lines": drawn})
    display.draw(path, panels, title=f"{title}; best rate of each")


def _family(name: str) -> str:
    """The contestants on one line: all densities of an optimizer, or all H of another system."""
    first, *given = name.split()
    left_out = ("density=", "every=") if first in ROUNDS else ("density=",)
    return " ".join([first, *(x for x in given if not x.startswith(left_out))])


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains the missing runs, and prints all of them."""
    usual = {"workers": [4, 8, 16, 32], "seeds": 3, "points": 8}
    usual |= {"share": (1.0, "multiplies every density")}
    usual |= {"together": (False, "all rates and seeds of a contestant in one program")}
    parser = _lines.parser_of(__doc__, KINDS, "text", **usual)
    parser.add_argument("--steps", type=options.several, default=2000)
    parser.add_argument("--plot-bytes", type=options.output, help="against bytes: a PNG")
    args = parser.parse_args(argv)
    makes, large = contestants(args.task, args.share), KINDS[args.task].large
    _lines.complete(parser, args, list(makes), functools.partial(neighbour, args.task, args.share))
    store = Store(args.runs, NEEDED, large)

    def groups(name: str) -> Sequence[int | None]:
        return [None] if name == DENSE else args.workers

    if not args.show:
        task = _tasks.make(args.task, args.width, args.text, args.images)
        run_all(task, store, makes | args.neighbours, groups, args)
    names = [*makes, *args.neighbours]
    found = _lines.lines_of(store, names, groups, functools.partial(case_of, args))
    dense = {run["seed"]: run["value"] for x in found if x.name == DENSE for run in x.runs}
    unit = "points" if large else "% of the loss"
    title = f"{args.task}, {args.steps} steps, share {args.share:g}"
    rates = ", ".join(f"{rate:g}" for rate in args.rates)
    rows = [row_of(line, dense, large) for line in found]
    display.show_rows(f"{title}, rates {rates}; worse by {unit}", rows)
    _lines.draw(args.plot, found, args.workers, "steps", title)
    draw_bytes(args.plot_bytes, found, args.workers, args.steps, title)


if __name__ == "__main__":
    raise SystemExit(main())
