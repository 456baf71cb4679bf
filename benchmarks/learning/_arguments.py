"""The options that `steps` and `time` have in common."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .._common import options
from ..training._small_models import HEADS
from ._neighbours import Option, option
from ._tasks import KINDS


def parser_of(doc: str | None, tasks: Iterable[str], default: str) -> argparse.ArgumentParser:
    """A parser with these options; ``tasks`` may be chosen."""
    parser = options.parser_of(doc)
    add = parser.add_argument
    chosen = {name: KINDS[name] for name in tasks}
    what = "; ".join(f"{name}: {kind.model}, {kind.optimizer}" for name, kind in chosen.items())
    add("--task", choices=tuple(chosen), default=default, help=what)
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--runs", type=options.output, metavar="FILE", help="keep runs here, and go on with them")
    add("--show", action="store_true", help="what is in --runs, and train nothing")
    add("--rates", type=options.positive, nargs="+", metavar="RATE", help="peaks")
    add("--only", nargs="+", metavar="NAME", help="of these contestants, and those of --options")
    add("--options", type=option, nargs="+", action="append", default=[], metavar="NAME=VALUE")
    add("--width", type=options.at_least_one, help="of the model")
    add("--batch", type=options.at_least_one, help="of all workers")
    add("--plot", type=options.output, metavar="FILE", help="draw the curves: a PNG")
    return parser


def complete(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    names: Iterable[str],
    neighbour: Callable[[Sequence[Option]], tuple[str, Any]],
    usual: dict[str, Any],
) -> None:
    """Fills in what is usual, and ends with one line where an option is wrong.

    ``neighbours`` is added, contestants of --options by name, which ``neighbour`` makes. ``usual``
    has rates, batch and width where they are others than those of the task.
    """
    kind = KINDS[args.task]
    args.rates = sorted(args.rates or usual.get("rates", kind.rates))
    args.batch = args.batch or usual.get("batch", kind.batch)
    if args.width and kind.width is None:
        parser.error(f"--width: the model of {args.task} has one width")
    args.width = args.width or usual.get("width", kind.width)
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only {name!r} is none of: {'; '.join(names)}")
    try:
        args.neighbours = dict(neighbour(given) for given in args.options)
    except ValueError as error:
        parser.error(f"--options: {error}")
    if args.task == "text" and args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    for workers in args.workers if isinstance(args.workers, list) else [args.workers]:
        if args.batch % workers:
            parser.error(f"--batch {args.batch} can't be dealt out to {workers} workers")
    if args.show and args.runs is None:
        parser.error("--show needs --runs FILE")
