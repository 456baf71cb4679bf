"""Shared by the programs of loss against steps and against time: stored runs, and rows.

Runs are stored in a file of JSON lines, so that an interrupted experiment can continue.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display, options
from .._common.options import InputError
from ..training._small_models import HEADS
from ._contestants import Option, option
from ._tasks import KINDS

Case = dict[str, Any]
# A contestant of --options with its name, and the groups in which a contestant is compared.
Added = Callable[[Sequence[Option]], tuple[str, Any]]
Groups = Callable[[str], Iterable[Any]]


class Store:
    """The runs of a file; without a path they are kept until the program ends.

    Each run has all keys in ``needed``, such as its ``rate``, ``seed`` and last ``value``;
    ``large`` says whether a large value is a good one.
    """

    def __init__(self, path: Path | None, needed: Sequence[str], large: bool):
        self._path, self._sign = path, -1 if large else 1
        self.runs = _read(path, needed) if path is not None and path.exists() else []

    def _find(self, **wanted: Any) -> list[dict[str, Any]]:
        return [run for run in self.runs if wanted.items() <= run.items()]

    def has(self, case: Case, rate: float, seed: int) -> bool:
        """Whether this run of a case is there."""
        return bool(self._find(**case, rate=rate, seed=seed))

    def best(self, **case: Any) -> list[dict[str, Any]]:
        """The runs of a case by seed, with the learning rate that is best for seed 0."""
        ended = [run for run in self._find(seed=0, **case) if math.isfinite(run["value"])]
        if not ended:
            return []
        rate = min(ended, key=lambda run: self._sign * run["value"])["rate"]
        return sorted(self._find(rate=rate, **case), key=lambda run: run["seed"])

    def reported(self, **case: Any) -> list[dict[str, Any]]:
        """The same with the learning rate of the best mean, among those run with as many seeds."""
        best = self.best(**case)
        of_rate = {run["rate"]: self._find(rate=run["rate"], **case) for run in self._find(**case)}
        means = {
            rate: self._sign * float(np.mean([run["value"] for run in runs]))
            for rate, runs in of_rate.items()
            if len(runs) >= len(best)
        }
        ended = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
        if not ended:
            return best
        return sorted(of_rate[min(ended, key=lambda x: ended[x])], key=lambda run: run["seed"])

    def missing(
        self, rates: Sequence[float], seeds: int, **case: Any
    ) -> Iterator[tuple[float, int]]:
        """Learning rates and seeds to run: all with seed 0, then the best with other seeds."""
        for seed in range(seeds):
            for rate in [run["rate"] for run in self.best(**case)[:1]] if seed else rates:
                if not self._find(rate=rate, seed=seed, **case):
                    yield rate, seed

    def add(self, run: dict[str, Any]) -> None:
        """Keeps a run, at once."""
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


def _read(path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """The runs; removes an incomplete last line, during which the program was ended."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    whole, end, cut_off = text.rpartition("\n")
    if cut_off:
        path.write_text(whole + end, encoding="utf-8")
    runs = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            run = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number} is no JSON: {error}") from error
        missing = [name for name in needed if not isinstance(run, dict) or name not in run]
        if missing:
            raise InputError(f"{path}, line {number} is no run of this program: no {missing[0]!r}")
        runs.append(run)
    return runs


def parser_of(doc: Any, tasks: Iterable[str], default: str, **usual: Any) -> ArgumentParser:
    """A parser with the options of both programs and ``usual`` ones, for these tasks."""
    chosen = {name: KINDS[name] for name in tasks}
    what = "; ".join(f"{name}: {kind.model}, {kind.optimizer}" for name, kind in chosen.items())
    both = {"task": (default, what, tuple(chosen)), "batch": (None, "of all workers")}
    both |= {"show": (False, "what is in --runs, and train nothing")}
    names = ("text", "images", "runs", "rates", "only", "width", "plot")
    parser = options.parser_of(doc, *names, **both, **usual)
    more: dict[str, Any] = {"nargs": "+", "action": "append", "default": []}
    parser.add_argument("--options", type=option, metavar="NAME=VALUE", **more)
    return parser


def complete(
    parser: ArgumentParser, args: Namespace, names: Sequence[str], neighbour: Added, **usual: Any
) -> None:
    """Fills in defaults, and ends with one line if an option is wrong.

    ``usual`` has learning rates, batch and width if they differ from the task's. Contestants of
    --options are added as ``neighbours``, by the name that ``neighbour`` gives them.
    """
    kind = KINDS[args.task]
    usual = kind._asdict() | usual
    if args.width and kind.width is None:
        parser.error(f"--width: the model of {args.task} has one width")
    args.rates = sorted(args.rates or usual["rates"])
    args.batch, args.width = args.batch or usual["batch"], args.width or usual["width"]
    options.check_names(parser, args.only, [*names, "none"])
    args.neighbours = {}
    for given in args.options:
        try:
            args.neighbours |= [neighbour(given)]
        except (TypeError, ValueError) as error:
            written = " ".join(f"{name}={value}" for name, value in given)
            parser.error(f"--options: {written}: {error}")
    if args.task == "text" and args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    for workers in args.workers if isinstance(args.workers, list) else [args.workers]:
        options.check_batch(parser, args.batch, workers)
    if args.show and args.runs is None:
        parser.error("--show needs --runs FILE")


def chosen(args: Namespace, names: Iterable[str]) -> list[str]:
    """The contestants of a run: the names in --only, or all, and the contestants of --options.

    With ``--only none``, only --options adds contestants.
    """
    return [*(name for name in names if not args.only or name in args.only), *args.neighbours]


def run_missing(
    store: Store, args: Namespace, case: Case, train: Callable[[float, int], Case]
) -> None:
    """Runs ``train(rate, seed)`` for the runs of a case that are not in the store."""
    for rate, seed in store.missing(args.rates, args.seeds, **case):
        store.add({**case, "rate": rate, "seed": seed, **train(rate, seed)})


class Line(NamedTuple):
    """The runs of a contestant, one for each seed.

    ``group`` is the group in which it is compared: P, or None if it is the same for all; or a link.
    """

    name: str
    group: Any
    runs: Sequence[dict[str, Any]]

    def mean(self, what: str) -> np.ndarray:
        """The ``values``, ``steps`` or ``seconds`` of the curve, averaged over the seeds."""
        curves = [run["curve"] for run in self.runs]
        # A run that was made with another number of points is left out.
        alike = [curve for curve in curves if len(curve["steps"]) == len(curves[0]["steps"])]
        return np.mean([curve[what] for curve in alike], axis=0)

    def ends(self, large: bool) -> dict[str, Any]:
        """Learning rate, number of seeds, and mean and deviation of the final values."""
        ended = (100 if large else 1) * np.array([run["value"] for run in self.runs])
        row = {"rate": self.runs[0]["rate"], "seeds": len(ended), "mean": ended.mean()}
        return row | {"deviation": ended.std(ddof=1) if len(ended) > 1 else None}


def lines_of(
    store: Store, names: Iterable[str], groups: Groups, case_of: Callable[[str, Any], Case]
) -> list[Line]:
    """The best runs in the store of these contestants and of all others in it."""
    found = []
    for name in dict.fromkeys([*names, *(run["contestant"] for run in store.runs)]):
        cases = ((group, store.reported(**case_of(name, group))) for group in groups(name))
        found += [Line(name, group, runs) for group, runs in cases if runs]
    return found


def worse(value: float, other: float, large: bool) -> float:
    """By how much a value is worse: in points of an accuracy, or % of a loss."""
    return 100 * (other - value if large else value / other - 1)


def draw(
    path: Path | None, lines: Sequence[Line], groups: Iterable[Any], x: str, title: str
) -> None:
    """Draws a PNG with a panel for each group: values against ``steps`` or ``seconds``."""
    panels = []
    # A contestant looks the same in all panels.
    names = list(dict.fromkeys(line.name for line in lines))
    for group in groups:
        here = {
            f"{line.name}, {line.runs[0]['rate']:g}": (
                *(line.mean(x)[1:], line.mean("values")[1:]),
                display.style_of(names.index(line.name)),
            )
            for line in lines
            if line.group in (None, group)
        }
        panels.append({"title": str(group), "xlabel": x, "ylabel": "validation", "lines": here})
    display.draw(path, panels, title=f"{title}; best rate of each")
