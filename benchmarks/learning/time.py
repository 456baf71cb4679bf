"""Loss against seconds: real training over links with a limited bandwidth.

    sudo python -m benchmarks.learning.time --link 100mbit 1gbit --seconds 60 --runs FILE [options]
    python -m benchmarks.learning.time --show --runs FILE --plot FILE

Every worker is a process on a host of its own, a network namespace (as in
``benchmarks.network.run``), and takes real gradients of a real model. Each contestant trains for
the same number of seconds, and its rate comes to its end exactly then, whatever a step takes;
compiling and measuring take none of them. It does so with every rate of ``--rates``, and with the
best of them from the other seeds. A run that is in FILE is not made again.

Where PyTorch is installed, its DistributedDataParallel and hooks are contestants, too, with the
same parameters and batches. Each ``--options`` adds a contestant: ``sparse_adamw`` with these
options, such as density=0.01.

Linux only, with root and iproute2 (ip, tc); ``--show`` needs none of it.
"""

import argparse
import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._common import display, namespaces, options
from .._common.processes import interrupt_when_told
from ..network._workers import WorkerError, Workers, workers
from ..training._small_models import HEADS
from . import _clock, _over_links, _plot, _times
from ._contestants import DENSE
from ._neighbours import Option, option
from ._store import Store
from ._tasks import ADAMW, KINDS

# What a run has: what tells it from others, and what it came to.
_CASE = ("task", "width", "contestant", "link", "workers", "batch", "seconds")
NEEDED = (*_CASE, "rate", "seed", "value", "curve")
# With these widths a model has over a million parameters, and with this batch a step of the
# transformer is not all gradient.
WIDTHS = {"words": 128, "text": 208, "lstm": 480}
RATES = {"words": (0.005, 0.01, 0.02), "text": (0.002, 0.005, 0.01)}
BATCHES = {"text": 8}
# The tasks of `_torch_models`, which can't be imported without PyTorch.
_IN_TORCH = ("words", "text")
_PORT = 9500
# Steps that tell how long one takes, about.
_WARM_UP = 3


def run_all(store: Store, args: argparse.Namespace) -> None:
    """All runs that are not in the store."""
    missing = [
        (name, link)
        for name, link in itertools.product(chosen(args), args.link)
        if next(_missing(store, args, name, link), None) is not None
    ]
    if not missing:
        return
    with namespaces.network(args.workers) as made, started(made, args) as group_of:
        for name, link in missing:
            made.limit(link)
            for rate, seed in _missing(store, args, name, link):
                found = _train(group_of(name), args, name, link, rate, seed)
                store.add({**case_of(name, link, args), "rate": rate, "seed": seed, **found})


def chosen(args: argparse.Namespace) -> dict[str, Sequence[Option] | None]:
    """The contestants that are to train, and the options of those that have some."""
    possible = [*_over_links.contestants(), *(_over_links.TORCH if _has_torch(args.task) else ())]
    names = [name for name in possible if not args.only or name in args.only]
    return dict.fromkeys(names) | args.neighbours


def _has_torch(task: str) -> bool:
    return importlib.util.find_spec("torch") is not None and task in _IN_TORCH


def case_of(name: str, link: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a contestant over a link have in common."""
    values = (args.task, args.width, name, link, args.workers, args.batch, args.seconds)
    return dict(zip(_CASE, values, strict=True))


def _missing(
    store: Store, args: argparse.Namespace, name: str, link: str
) -> Iterator[tuple[float, int]]:
    """Rates and seeds: the best rate is known when all of them have been tried."""
    case = case_of(name, link, args)
    for seed in range(args.seeds):
        best = store.best_rate(KINDS[args.task].large, **case)
        rates = args.rates if seed == 0 else [] if best is None else [best]
        for rate in rates:
            if not store.find(rate=rate, seed=seed, **case):
                yield rate, seed


@contextlib.contextmanager
def started(made: namespaces.Hosts, args: argparse.Namespace) -> Iterator[Callable[[str], Workers]]:
    """Gives the processes for a contestant, which start when they are first asked for."""
    files = {
        name: str(path.resolve()) if path else None
        for name, path in (("text", args.text), ("images", args.images))
    }
    config = {
        **files,
        "task": args.task,
        "width": args.width,
        "workers": args.workers,
        "batch": args.batch,
        "pin": not args.no_pin,
    }
    given = {"threads": 0 if args.no_pin else 1, "seconds": args.timeout}
    groups: dict[str, Workers] = {}
    with contextlib.ExitStack() as stack:

        def group_of(contestant: str) -> Workers:
            program = "_torch_trainer" if contestant in _over_links.TORCH else "_trainer"
            if program not in groups:
                options.say(f"starting the processes of {program}")
                own = {"coordinator": f"{made.addresses[0]}:{_PORT + len(groups)}"}
                group = workers(f"{__package__}.{program}", made, config | own, **given)
                groups[program] = stack.enter_context(group)
            return groups[program]

        yield group_of


def _train(
    group: Workers, args: argparse.Namespace, name: str, link: str, rate: float, seed: int
) -> dict[str, Any]:
    """One run."""
    label = f"{args.task}, {name} at {rate:g}, {link}, seed {seed}"
    options.say(f"{label}: compiling")
    asked = {"contestant": name, "options": args.neighbours.get(name), "seed": seed}
    begun = group.ask("begin", **asked, warmup=_WARM_UP)
    received: list[float] = []
    parts: list[tuple[int, float]] = []

    def take(shares: list[float]) -> float:
        rates = [_clock.rate_at(rate, share) for share in shares]
        answers = group.ask("take", rates=rates)
        received.append(len(rates) * np.mean([answer["received"] for answer in answers]))
        each = max(answer["seconds"] for answer in answers)
        parts.append((len(rates), each))
        return len(rates) * each

    def measure() -> float:
        value = group.ask("evaluate")[0]["value"]
        options.say(f"{label}: {value:.4f}")
        return value

    guess = max(answer["seconds"] for answer in begun)
    curve = _clock.spend(args.seconds, args.points, guess, take, measure)
    return {
        "value": curve.values[-1],
        "steps": curve.steps[-1],
        "received": sum(received) / max(1, curve.steps[-1]),
        "curve": {**curve._asdict(), "size": begun[0]["size"], "parts": parts},
    }


def kept(store: Store, args: argparse.Namespace) -> Iterator[_plot.Line]:
    """The runs with the best rate of each contestant over each link, in the order of the seeds."""
    stored = (run["contestant"] for run in store.runs)
    known = [*_over_links.contestants(), *_over_links.TORCH]
    names = dict.fromkeys([*known, *args.neighbours, *stored])
    for link, name in itertools.product(args.link, names):
        case = case_of(name, link, args)
        rate = store.best_rate(KINDS[args.task].large, **case)
        if rate is not None:
            runs = sorted(store.find(rate=rate, **case), key=lambda run: run["seed"])
            yield _plot.Line(name, link, runs)


def show(store: Store, args: argparse.Namespace) -> None:
    """A table for each link, and the figure that is asked for."""
    large, lines = KINDS[args.task].large, list(kept(store, args))
    for link in args.link:
        here = [line for line in lines if line.group == link]
        if not here:
            continue
        dense = next((line for line in here if line.name == DENSE), None)
        size = here[0].runs[0]["curve"]["size"]
        head = ("", "rate", "seeds", "end", "deviation", "worse by", "time")
        head += ("ms", "quartiles", "MB", "steps")
        unit = "points" if large else "% of the loss"
        title = f"{args.task}, n = {size:,}, P = {args.workers}, {link}, {args.seconds:g} s"
        note = f"worse by {unit}; time until dense's end is reached; ms and MB of a step"
        display.show(f"{title}; {note}", head, [_times.cells(line, dense, large) for line in here])
    if args.plot:
        measure = "accuracy" if large else "validation loss"
        _plot.draw_links(
            args.plot, f"{args.task}, P = {args.workers}; best rate of each", measure, lines
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    tasks = [name for name, kind in KINDS.items() if kind.optimizer == ADAMW]
    add("--task", choices=tasks, default="words")
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--runs", type=options.output, metavar="FILE", help="keep runs here, and go on with them")
    add("--show", action="store_true", help="what is in --runs, and train nothing")
    add("--link", type=options.link, nargs="+", default=["100mbit", "1gbit"], metavar="RATE")
    add("--workers", type=options.several, default=4, metavar="P")
    add("--seconds", type=options.positive, default=60.0, help="of training")
    add("--points", type=options.at_least_one, default=12, help="of a curve")
    add("--rates", type=options.positive, nargs="+", metavar="RATE", help="peaks")
    add("--seeds", type=options.at_least_one, default=1)
    add("--only", nargs="+", metavar="NAME", help="of these contestants, and those of --options")
    add("--options", type=option, nargs="+", action="append", default=[], metavar="NAME=VALUE")
    add("--width", type=options.at_least_one, help="of the model")
    add("--batch", type=options.at_least_one, help="of all workers")
    add("--no-pin", action="store_true", help="let processes use all cores")
    add("--timeout", type=options.positive, default=900, help="seconds for one answer")
    add("--plot", type=options.output, metavar="FILE", help="draw the curves: a PNG")
    args = parser.parse_args(argv)
    kind = KINDS[args.task]
    args.rates = sorted(args.rates or RATES.get(args.task, kind.rates))
    args.batch = args.batch or BATCHES.get(args.task, kind.batch)
    if args.width and kind.width is None:
        parser.error(f"--width: the model of {args.task} has one width")
    args.width = args.width or WIDTHS.get(args.task)
    if args.task == "text" and args.width % HEADS:
        parser.error(f"--width {args.width} can't be divided into {HEADS} heads")
    names = [*_over_links.contestants(), *_over_links.TORCH]
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only {name!r} is none of: {'; '.join(names)}")
        if name in _over_links.TORCH and not args.show and not _has_torch(args.task):
            parser.error(
                f"--only {name!r} needs PyTorch (pip install torch), and a task among "
                f"{', '.join(_IN_TORCH)}"
            )
    try:
        args.neighbours = {_over_links.neighbour(each)[0]: each for each in args.options}
    except ValueError as error:
        parser.error(f"--options: {error}")
    if args.batch % args.workers:
        parser.error(f"--batch {args.batch} can't be dealt out to {args.workers} workers")
    if args.show and args.runs is None:
        parser.error("--show needs --runs FILE")
    return args


@options.program
def main(argv: list[str] | None = None) -> int:
    """Trains what is missing, and prints all of it."""
    args = parse(argv)
    store = Store(args.runs, NEEDED)
    try:
        if not args.show:
            interrupt_when_told()
            reason = namespaces.unusable()
            if reason is not None:
                raise options.InputError(reason)
            run_all(store, args)
    except (namespaces.NetworkError, WorkerError) as error:
        print(f"time: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("time: interrupted", file=sys.stderr)
        return 130
    show(store, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
