"""What the programs of loss against steps and against time share: options, rows and curves."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display, options
from ..training._small_models import HEADS
from ._contestants import Option, option
from ._tasks import KINDS


def parser_of(doc: str | None, tasks: Iterable[str], default: str) -> argparse.ArgumentParser:
    """A parser with the options of both; ``tasks`` may be chosen."""
    parser = options.parser_of(doc)
    add = parser.add_argument
    chosen = {name: KINDS[name] for name in tasks}
    what = "; ".join(f"{name}: {kind.model}, {kind.optimizer}" for name, kind in chosen.items())
    add("--task", choices=tuple(chosen), default=default, help=what)
    options.add_data(parser)
    add("--runs", type=options.output, metavar="FILE", help="keep runs here, and go on with them")
    add("--show", action="store_true", help="what is in --runs, and train nothing")
    add("--rates", type=options.positive, nargs="+", metavar="RATE", help="peaks")
    add("--only", nargs="+", metavar="NAME", help="of these contestants, and those of --options")
    add("--options", type=option, nargs="+", action="append", default=[], metavar="NAME=VALUE")
    options.add_usual(parser, width=None, batch=(None, "of all workers"))
    add("--plot", type=options.output, metavar="FILE", help="draw the curves: a PNG")
    return parser


def complete(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    names: Sequence[str],
    neighbour: Callable[[Sequence[Option]], tuple[str, Any]],
    **usual: Any,
) -> None:
    """Fills in what is usual, and ends with one line where an option is wrong.

    ``neighbours`` is added, contestants of --options by name, which ``neighbour`` makes. ``usual``
    has rates, batch and width where they are others than those of the task.
    """
    kind = KINDS[args.task]
    usual = kind._asdict() | usual
    if args.width and kind.width is None:
        parser.error(f"--width: the model of {args.task} has one width")
    args.rates = sorted(args.rates or usual["rates"])
    args.batch, args.width = args.batch or usual["batch"], args.width or usual["width"]
    options.check_names(parser, args.only, names)
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


class Line(NamedTuple):
    """The runs of a contestant, one for each seed.

    ``group`` is with which others: P, None where it is the same for all; or a link.
    """

    name: str
    group: Any
    runs: Sequence[dict[str, Any]]

    def mean(self, what: str) -> np.ndarray:
        """The ``values``, ``steps`` or ``seconds`` of the curve, on average over the seeds."""
        curves = [run["curve"] for run in self.runs]
        # A run that was made with another number of points is left out.
        alike = [curve for curve in curves if len(curve["steps"]) == len(curves[0]["steps"])]
        return np.mean([curve[what] for curve in alike], axis=0)

    def ends(self, large: bool) -> list[str]:
        """Rate, number of seeds, mean and deviation of the values at the end."""
        ended = (100 if large else 1) * np.array([run["value"] for run in self.runs])
        deviation = f"{ended.std(ddof=1):.3f}" if len(ended) > 1 else "-"
        return [f"{self.runs[0]['rate']:g}", str(len(ended)), f"{ended.mean():.3f}", deviation]


def worse(value: float, other: float, large: bool) -> float:
    """By how much a value is worse: in points of an accuracy, or % of a loss."""
    return 100 * (other - value if large else value / other - 1)


def draw(path: Path, lines: Sequence[Line], groups: Iterable[Any], x: str, title: str) -> None:
    """A PNG with a panel for each group: values against ``steps`` or ``seconds``."""
    panels = []
    for group in groups:
        here = {
            f"{line.name}, {line.runs[0]['rate']:g}": (line.mean(x)[1:], line.mean("values")[1:])
            for line in lines
            if line.group in (None, group)
        }
        panels.append({"title": str(group), "xlabel": x, "lines": here})
    display.draw(path, panels, title=f"{title}; best rate of each")
