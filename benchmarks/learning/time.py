"""Loss against seconds: real training over links with a limited bandwidth.

    sudo python -m benchmarks.learning.time --link 100mbit 1gbit --seconds 60 --runs FILE [options]
    python -m benchmarks.learning.time --show --runs FILE --plot FILE

Every worker is a process on a host of its own, a network namespace, and takes real gradients of a
real model. Each contestant trains for the same number of seconds, and its learning rate reaches its
end exactly then, whatever a step takes; compiling and measuring take none of them. It trains with
every learning rate of ``--rates``, and with the best of them from the other seeds. If PyTorch is
installed, its DistributedDataParallel and hooks are also contestants, with the same parameters and
batches. ``--runs`` and ``--options`` are as in ``benchmarks.learning.steps``. Over links with a
delay, such as 100mbit+50ms, the contestants of JAX use direct messages.

Linux only, with root and iproute2 (ip, tc); ``--show`` needs none of it.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._common import display, namespaces, options
from .._common.options import require_network
from .._common.timing import quartiles
from ..network._workers import Workers, groups, mean, slowest
from . import _clock, _lines
from ._contestants import DENSE, TORCH, Option, neighbour_over_links, over_links
from ._lines import Line, Store, worse
from ._tasks import ADAMW, KINDS

# The keys of a run: those that identify it, and its results.
NEEDED = ("task", "width", "contestant", "link", "workers", "batch", "seconds")
NEEDED += ("rate", "seed", "value", "curve")
# With these widths a model has over a million parameters, and with this batch the gradient is not
# the whole step of the transformer.
WIDTHS = {"words": 128, "text": 208, "lstm": 480}
_USUAL: dict[str, dict[str, Any]] = {"words": {"rates": (0.005, 0.01, 0.02)}}
_USUAL |= {"text": {"rates": (0.002, 0.005, 0.01), "batch": 8}}
# The tasks of `_torch_trainer`, which can't be imported without PyTorch.
_IN_TORCH = ("words", "text")
NAMES = [*over_links()["time"], *TORCH]
# Steps for a rough estimate of the time of one.
_WARM_UP = 3


def run_all(store: Store, args: argparse.Namespace) -> None:
    """Makes all runs that are not in the store."""
    known = [name for name in NAMES if name not in TORCH or _has_torch(args.task)]
    names = _lines.chosen(args, known)
    cases = [case_of(args, *case) for case in itertools.product(names, args.link)]
    cases = [case for case in cases if [*store.missing(args.rates, args.seeds, **case)]]
    if not cases:
        return
    with namespaces.network(args.workers) as made, started(made, args) as group_of:
        for case in cases:
            made.limit(case["link"])
            group = group_of(case["contestant"])
            _lines.run_missing(store, args, case, functools.partial(_train, group, args, case))


def _has_torch(task: str) -> bool:
    return importlib.util.find_spec("torch") is not None and task in _IN_TORCH


def case_of(args: argparse.Namespace, name: str, link: str) -> dict[str, Any]:
    """The keys that the runs of a contestant over a link share."""
    case = {key: getattr(args, key) for key in ("task", "width", "workers", "batch", "seconds")}
    return case | {"contestant": name, "link": link}


@contextlib.contextmanager
def started(made: namespaces.Hosts, args: argparse.Namespace) -> Iterator[Callable[[str], Workers]]:
    """Yields a function that gives the processes for a contestant, and starts them if needed."""
    config = {name: getattr(args, name) for name in ("task", "width", "batch")}
    paths = {name: getattr(args, name) for name in ("text", "images")}
    config |= {name: str(path.resolve()) if path else None for name, path in paths.items()}
    config["direct"] = _are_late(args.link)
    with groups(made, config, pin=not args.no_pin, seconds=args.timeout) as group:

        def group_of(contestant: str) -> Workers:
            in_rounds = any(name == "beside" for name, _ in args.neighbours.get(contestant, ()))
            module = "_round_trainer" if in_rounds else "_trainer"
            module = "_torch_trainer" if contestant in TORCH else module
            return group(f"{__package__}.{module}:Trainer")

        yield group_of


def _are_late(links: Sequence[str]) -> bool:
    """Whether messages over these links are delayed, such as 100mbit+50ms."""
    return any("+" in link for link in links)


def _train(
    group: Workers, args: argparse.Namespace, case: dict[str, Any], rate: float, seed: int
) -> dict[str, Any]:
    """One run."""
    name = case["contestant"]
    label = f"{args.task}, {name} at {rate:g}, {case['link']}, seed {seed}"
    options.say(f"{label}: compiling")
    asked = {"contestant": name, "options": args.neighbours.get(name), "seed": seed}
    begun = group.ask("begin", **asked, warmup=_WARM_UP)
    # The number of steps in each part, and the seconds and bytes of one.
    parts: list[tuple[int, float, float]] = []

    def take(shares: list[float]) -> float:
        answers = group.ask("take", rates=_clock.rates_at(rate, shares))
        parts.append((len(shares), slowest(answers), mean(answers)))
        return len(shares) * slowest(answers)

    def measure() -> float:
        value = group.ask("evaluate")[0]["value"]
        options.say(f"{label}: {value:.4f}")
        return value

    curve = _clock.spend(args.seconds, args.points, slowest(begun), take, measure)
    return {
        "value": curve.values[-1],
        "steps": curve.steps[-1],
        "received": sum(steps * each for steps, _, each in parts) / curve.steps[-1],
        "curve": {**curve._asdict(), "size": begun[0]["size"], "parts": parts},
    }


def show(store: Store, args: argparse.Namespace) -> None:
    """Prints a table for each link, and draws the figure if asked to, each with its best runs."""
    large, case = KINDS[args.task].large, functools.partial(case_of, args)
    lines = _lines.lines_of(store, [*NAMES, *args.neighbours], lambda name: args.link, case)
    unit = "points" if large else "% of the loss"
    note = f"worse by {unit}; time until dense's end is reached; ms and MB of a step"
    for link in args.link:
        here = [line for line in lines if line.group == link]
        if here:
            dense = next((line for line in here if line.name == DENSE), None)
            size = here[0].runs[0]["curve"]["size"]
            title = f"{args.task}, n = {size:,}, P = {args.workers}, {link}, {args.seconds:g} s"
            rows = [row_of(line, dense, large) for line in here]
            display.show_rows(f"{title}; {note}", rows)
    _lines.draw(args.plot, lines, args.link, "seconds", f"{args.task}, P = {args.workers}")


def row_of(line: Line, dense: Line | None, large: bool) -> dict[str, Any]:
    """A row of the table: a contestant over a link, compared with the dense one if there is one."""
    runs, by, reached = line.runs, None, None
    if dense is not None:
        own, other = (float(np.mean([run["value"] for run in x.runs])) for x in (line, dense))
        by = worse(own, other, large)
        reached = _when(line.mean("seconds"), line.mean("values"), other, large)
    # Wide quartiles are a sign of other work on the machine, which the run has paid for.
    each = [1e3 * part[1] for run in runs for part in run["curve"]["parts"] for _ in range(part[0])]
    received, steps = (np.mean([run[what] for run in runs]) for what in ("received", "steps"))
    row = {"": line.name, **line.ends(large), "worse by": by, "time, s": reached}
    return row | {"ms, quartiles": quartiles(each), "MB": received / 1e6, "steps": steps}


def _when(seconds: np.ndarray, values: np.ndarray, wanted: float, large: bool) -> float | None:
    """When a curve first reaches ``wanted``, interpolated between its points; None if never."""
    good = values >= wanted if large else values <= wanted
    if not good.any():
        return None
    i = int(np.argmax(good))
    if i == 0:
        return float(seconds[0])
    part = (wanted - values[i - 1]) / (values[i] - values[i - 1])
    return float(seconds[i - 1] + part * (seconds[i] - seconds[i - 1]))


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains the missing runs, and prints all of them."""
    tasks = [name for name, kind in KINDS.items() if kind.optimizer == ADAMW]
    usual = {"seconds": (60.0, "of training"), "points": 12, "seeds": 1, "timeout": 900}
    parser = _lines.parser_of(__doc__, tasks, "words", **usual, **options.LINKS)
    args = parser.parse_args(argv)

    def neighbour(given: Sequence[Option]) -> tuple[str, Sequence[Option]]:
        return neighbour_over_links(given)[0], given

    if _are_late(args.link) and not all("+" in link for link in args.link):
        parser.error("--link: what has a delay and what has none are runs of their own")
    usual = {"width": WIDTHS.get(args.task)} | _USUAL.get(args.task, {})
    _lines.complete(parser, args, NAMES, neighbour, **usual)
    if not args.show and not _has_torch(args.task) and set(args.only or ()) & set(TORCH):
        tasks = ", ".join(_IN_TORCH)
        parser.error(f"--only: this needs PyTorch (pip install torch), and a task among {tasks}")
    store = Store(args.runs, NEEDED, KINDS[args.task].large)
    if not args.show:
        require_network()
        run_all(store, args)
    show(store, args)


if __name__ == "__main__":
    raise SystemExit(main())
