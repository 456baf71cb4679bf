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
from typing import Any

from .._common import display, namespaces, options
from .._common.processes import interrupt_when_told
from ..network._workers import Workers, groups, mean, slowest
from . import _arguments, _clock, _over_links, _plot, _times
from ._contestants import DENSE
from ._neighbours import Option
from ._store import Store
from ._tasks import ADAMW, KINDS

# What a run has: what tells it from others, and what it came to.
_CASE = ("task", "width", "contestant", "link", "workers", "batch", "seconds")
NEEDED = (*_CASE, "rate", "seed", "value", "curve")
# With these widths a model has over a million parameters, and with this batch a step of the
# transformer is not all gradient.
WIDTHS = {"words": 128, "text": 208, "lstm": 480}
_USUAL = {
    "words": {"rates": (0.005, 0.01, 0.02)},
    "text": {"rates": (0.002, 0.005, 0.01), "batch": 8},
}
# The tasks of `_torch_models`, which can't be imported without PyTorch.
_IN_TORCH = ("words", "text")
# Steps that tell how long one takes, about.
_WARM_UP = 3


def run_all(store: Store, args: argparse.Namespace) -> None:
    """All runs that are not in the store."""

    def missing(name: str, link: str) -> Iterator[tuple[float, int]]:
        large = KINDS[args.task].large
        return store.missing(args.rates, args.seeds, large, **case_of(name, link, args))

    cases = [
        case
        for case in itertools.product(chosen(args), args.link)
        if next(missing(*case), None) is not None
    ]
    if not cases:
        return
    with namespaces.network(args.workers) as made, started(made, args) as group_of:
        for name, link in cases:
            made.limit(link)
            for rate, seed in missing(name, link):
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


@contextlib.contextmanager
def started(made: namespaces.Hosts, args: argparse.Namespace) -> Iterator[Callable[[str], Workers]]:
    """Gives the processes for a contestant, which start when they are first asked for."""
    config = {name: getattr(args, name) for name in ("task", "width", "batch")}
    for name in ("text", "images"):
        path = getattr(args, name)
        config[name] = str(path.resolve()) if path else None
    with groups(made, config, pin=not args.no_pin, seconds=args.timeout) as group:

        def group_of(contestant: str) -> Workers:
            module = "_torch_trainer" if contestant in _over_links.TORCH else "_trainer"
            return group(f"{__package__}.{module}:Trainer")

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
        answers = group.ask("take", rates=[_clock.rate_at(rate, share) for share in shares])
        received.append(len(shares) * mean(answers))
        parts.append((len(shares), slowest(answers)))
        return len(shares) * slowest(answers)

    def measure() -> float:
        value = group.ask("evaluate")[0]["value"]
        options.say(f"{label}: {value:.4f}")
        return value

    curve = _clock.spend(args.seconds, args.points, slowest(begun), take, measure)
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
        runs = store.best(KINDS[args.task].large, **case_of(name, link, args))
        if runs:
            yield _plot.Line(name, link, runs)


def show(store: Store, args: argparse.Namespace) -> None:
    """A table for each link, and the figure that is asked for."""
    large, lines = KINDS[args.task].large, list(kept(store, args))
    head = ("", "rate", "seeds", "end", "deviation", "worse by", "time")
    head += ("ms", "quartiles", "MB", "steps")
    unit = "points" if large else "% of the loss"
    note = f"worse by {unit}; time until dense's end is reached; ms and MB of a step"
    for link in args.link:
        here = [line for line in lines if line.group == link]
        if not here:
            continue
        dense = next((line for line in here if line.name == DENSE), None)
        size = here[0].runs[0]["curve"]["size"]
        title = f"{args.task}, n = {size:,}, P = {args.workers}, {link}, {args.seconds:g} s"
        display.show(f"{title}; {note}", head, [_times.cells(line, dense, large) for line in here])
    if args.plot:
        measure = "accuracy" if large else "validation loss"
        title = f"{args.task}, P = {args.workers}; best rate of each"
        _plot.draw_links(args.plot, title, measure, lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    tasks = [name for name, kind in KINDS.items() if kind.optimizer == ADAMW]
    parser = _arguments.parser_of(__doc__, tasks, "words")
    add = parser.add_argument
    add("--link", type=options.link, nargs="+", default=["100mbit", "1gbit"], metavar="RATE")
    add("--workers", type=options.several, default=4, metavar="P")
    add("--seconds", type=options.positive, default=60.0, help="of training")
    add("--points", type=options.at_least_one, default=12, help="of a curve")
    add("--seeds", type=options.at_least_one, default=1)
    add("--no-pin", action="store_true", help="let processes use all cores")
    add("--timeout", type=options.positive, default=900, help="seconds for one answer")
    args = parser.parse_args(argv)
    usual = {"width": WIDTHS.get(args.task)} | _USUAL.get(args.task, {})
    names = [*_over_links.contestants(), *_over_links.TORCH]

    def neighbour(given: Sequence[Option]) -> tuple[str, Sequence[Option]]:
        return _over_links.neighbour(given)[0], given

    _arguments.complete(parser, args, names, neighbour, usual)
    for name in args.only or ():
        if name in _over_links.TORCH and not args.show and not _has_torch(args.task):
            parser.error(
                f"--only {name!r} needs PyTorch (pip install torch), and a task among "
                f"{', '.join(_IN_TORCH)}"
            )
    return args


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains what is missing, and prints all of it."""
    args = parse(argv)
    store = Store(args.runs, NEEDED)
    if not args.show:
        interrupt_when_told()
        options.require_network()
        run_all(store, args)
    show(store, args)


if __name__ == "__main__":
    sys.exit(main())
