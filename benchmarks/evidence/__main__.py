"""Checks what five papers claim, and what this library claims of itself, one by one.

    python -m benchmarks.evidence [--quick] [--only ID ...] [--seeds N] [--list]

Each claim has a check, which measures, and a rule, which decides; a page is made of the results,
with figures, like docs/evidence/index.md. A result is kept as soon as it is there, so a run that
was stopped goes on where it was. With --quick trainings are shorter and have one seed. --only takes
ids, or their beginnings, such as sparcml or figures/xi. What is older than the code is measured
again; --page measures nothing, and writes the page of what there is, which says what is older.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .._common import options
from . import _figures
from ._catalogue import CLAIMS
from ._claims import VERDICTS, Claim, verdict
from ._curves import Curve, Curves
from ._lines import CURVES
from ._page import page
from ._store import Store

KEPT = Path("docs/evidence")
FOLDER = Path(".cache/evidence")
_SEEDS = 3
# Of a claim that was never measured, in seconds.
_GUESS = 20.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="shorter trainings, and one seed")
    add("--only", nargs="+", metavar="ID", help="these claims, by id or by how it begins")
    add(
        "--seeds",
        type=options.at_least_one,
        help="of what is drawn (3; where chance decides, more)",
    )
    add(
        "--list",
        action="store_true",
        help="print what there is, and measure nothing",
    )
    add("--page", action="store_true", help="write the page of what there is, and measure nothing")
    add("--again", action="store_true", help="also what there is a result of")
    add("--folder", type=Path, default=FOLDER, help=f"of results and page ({FOLDER})")
    args = parser.parse_args(argv)
    for wanted in args.only or ():
        names = [*(claim.id for claim in CLAIMS), *map(_name, CURVES)]
        if not any(name.startswith(wanted) for name in names):
            parser.error(f"--only {wanted!r} is the beginning of no claim or figure: see --list")
    return args


def chosen(args: argparse.Namespace) -> list[Claim]:
    """The claims that are asked for."""
    wanted = args.only or [""]
    return [claim for claim in CLAIMS if any(claim.id.startswith(x) for x in wanted)]


def chosen_curves(args: argparse.Namespace) -> list[Curve]:
    """The lines of figures that are asked for."""
    wanted = args.only or [""]
    return [curve for curve in CURVES if any(_name(curve).startswith(x) for x in wanted)]


def _name(curve: Curve) -> str:
    return f"{_figures.FOLDER}/{curve.figure}"


class Task(NamedTuple):
    """Something that is left to measure.

    Attributes:
      name: of a claim, or of a figure.
      seed: of what is drawn at random.
      cost: seconds that it took when it was measured before.
      run: measures, keeps the result, and says what came out.
    """

    name: str
    seed: int
    cost: float
    run: Callable[[], str]


def open_tasks(args: argparse.Namespace, store: Store, curves: Curves) -> list[Task]:
    """What is left to do. Seed by seed, as claims and figures look at the same trainings."""
    known = Store(KEPT) if KEPT.is_dir() and args.folder != KEPT else store
    tasks = []
    for seed in range(args.seeds or max([_SEEDS, *(claim.seeds for claim in CLAIMS)])):
        for claim in chosen(args):
            done = not args.again and store.has(claim, seed, args.quick)
            if claim.check and seed < _seeds(args, claim.seeds, exact=claim.exact) and not done:
                cost = expected(claim, seed, args.quick, known)
                run = functools.partial(_check, claim, seed, args.quick, store)
                tasks.append(Task(claim.id, seed, cost, run))
        for curve in chosen_curves(args):
            done = not args.again and curves.has(curve, seed, args.quick)
            if seed < _seeds(args, exact=curve.exact) and not done:
                run = functools.partial(_follow, curve, seed, args.quick, curves)
                tasks.append(Task(_name(curve), seed, _GUESS / 4, run))
    return tasks


def _seeds(args: argparse.Namespace, least: int = 0, *, exact: bool) -> int:
    """How many seeds something is measured with."""
    if exact or (args.quick and args.seeds is None):
        return 1
    return args.seeds or max(_SEEDS, least)


def _check(claim: Claim, seed: int, quick: bool, store: Store) -> str:
    assert claim.check is not None
    start = time.perf_counter()
    numbers = claim.check(seed, quick)
    store.add(claim, seed, quick, numbers, time.perf_counter() - start)
    return verdict(claim, [numbers])[0]


def _follow(curve: Curve, seed: int, quick: bool, curves: Curves) -> str:
    curves.add(curve, seed, quick, curve.measure(seed, quick))
    return curve.line


def expected(claim: Claim, seed: int, quick: bool, known: Store) -> float:
    """Seconds that a check took when it was measured before."""
    found = known.results(claim, quick) or known.results(claim)
    same = [result for result in found if result["seed"] == seed] or found
    return max(0.1, same[0]["seconds"]) if same else _GUESS


def measure(tasks: list[Task]) -> list[tuple[str, Exception]]:
    """Does what is left; returns what failed to measure anything."""
    failed: list[tuple[str, Exception]] = []
    with _bar(sum(task.cost for task in tasks), len(tasks)) as advance:
        for task in tasks:
            start = time.perf_counter()
            try:
                found = task.run()
            except Exception as error:  # the others are still to be measured
                failed.append((task.name, error))
                found = type(error).__name__
            seconds = time.perf_counter() - start
            advance(f"{task.name}: {found}, seed {task.seed}, {seconds:.1f} s", task.cost)
    return failed


@contextlib.contextmanager
def _bar(total: float, count: int) -> Iterator[Callable[[str, float], None]]:
    """A bar with the time left on a terminal, else a line for each result."""
    # As it is now: checks may redirect what they print.
    console = Console(file=sys.stderr)
    done = 0
    # Its unit is what a second was when the claims were measured before.
    columns = (TextColumn("{task.fields[count]}"), BarColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description:42.42}")
    quiet = not console.is_terminal
    with Progress(*columns, text, console=console, disable=quiet) as bar:
        task = bar.add_task("", total=total, count=f"0 of {count}")

        def advance(text: str, cost: float) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=text, advance=cost, count=f"{done} of {count}")
            if quiet:
                options.say(f"{done} of {count}: {text}")

        yield advance


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures what is missing, writes the page, and prints the count; 1 where a check broke."""
    args = parse(argv)
    if args.list:
        for claim in chosen(args):
            print(f"{claim.id:32} {claim.source:48} {claim.text}")
        for curve in chosen_curves(args):
            print(f"{_name(curve):32} {'':48} {curve.line}")
        return 0
    store = Store(args.folder)
    curves = Curves(args.folder / _figures.FOLDER / "curves.json")
    tasks = [] if args.page else open_tasks(args, store, curves)
    failed = measure(tasks)
    store.forget_all_but(CLAIMS)
    args.folder.mkdir(parents=True, exist_ok=True)
    figures = args.folder / _figures.FOLDER
    drawn = figures.glob("*.png") if args.page else _figures.draw(figures, curves)
    file = args.folder / "index.md"
    old = {curve.figure for curve in CURVES if curves.old(curve)}
    written = page(CLAIMS, store, [path.stem for path in drawn], sorted(old))
    file.write_text(written, encoding="utf-8")
    report(args, store)
    print(f"{len(tasks) - len(failed)} measured now; {file}")
    for name, error in failed:
        print(f"{name} could not be measured: {error!r}", file=sys.stderr)
    return 1 if failed else 0


def report(args: argparse.Namespace, store: Store) -> None:
    """Prints what does not hold, and how many claims have which verdict."""
    kept = Store(KEPT) if KEPT.is_dir() else store
    counts: dict[str, int] = dict.fromkeys(VERDICTS, 0)
    for claim in chosen(args):
        decided, note = verdict(claim, [r["numbers"] for r in store.best(claim)])
        counts[decided] += 1
        before, _ = verdict(claim, [r["numbers"] for r in kept.best(claim)])
        if decided in VERDICTS[:2] or decided != before:
            other = "" if before == decided else f" (in {KEPT}: {before})"
            print(f"{decided}: {claim.id}{f', {note}' if note else ''}{other}")
    print("; ".join(f"{count} {name}" for name, count in counts.items() if count))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
