"""Checks what five papers claim, and what this library claims of itself, one by one.

    python -m benchmarks.evidence [--quick] [--only ID ...] [--seeds N] [--list]

Each claim has a check, which measures, and a rule, which decides; a page is made of the results,
with figures, like docs/evidence/index.md. A result is kept as soon as it is there, so a run that
was stopped goes on where it was. With --quick trainings are shorter and have one seed. --only takes
ids, or their beginnings, such as sparcml or figures/xi. What is older than the code is measured
again; --page measures nothing, and writes the page of what there is, which says what is older.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax

from .._common import options
from . import _figures
from ._catalogue import CLAIMS
from ._claims import VERDICTS, Claim, verdict
from ._curves import Curve, Curves
from ._figures import CURVES
from ._page import page
from ._store import Store

KEPT = Path("docs/evidence")
FOLDER = Path(".cache/evidence")
_SEEDS = 3
# Of what was never measured, in seconds: a claim, and a line of a figure.
_GUESS, _GUESS_LINE = 20.0, 5.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="shorter trainings, and one seed")
    add("--only", nargs="+", metavar="ID", help="these claims, by id or by how it begins")
    seeds = "of what is drawn (3; where chance decides, more)"
    add("--seeds", type=options.at_least_one, help=seeds)
    add("--list", action="store_true", help="print what there is, and measure nothing")
    add("--page", action="store_true", help="write the page of what there is, and measure nothing")
    add("--again", action="store_true", help="also what there is a result of")
    add("--folder", type=Path, default=FOLDER, help=f"of results and page ({FOLDER})")
    args = parser.parse_args(argv)
    for wanted in args.only or ():
        if not any(_name(one).startswith(wanted) for one in (*CLAIMS, *CURVES)):
            parser.error(f"--only {wanted!r} is the beginning of no claim or figure: see --list")
    return args


def _name(one: Claim | Curve) -> str:
    return one.id if isinstance(one, Claim) else f"{_figures.FOLDER}/{one.figure}"


def _is_chosen(args: argparse.Namespace, one: Claim | Curve) -> bool:
    return any(_name(one).startswith(wanted) for wanted in args.only or [""])


class Task(NamedTuple):
    """A claim, or a line of a figure, that is left to measure with a seed."""

    one: Claim | Curve
    seed: int
    kept: Store | Curves
    # Seconds that it took when it was measured before.
    cost: float


def open_tasks(args: argparse.Namespace, store: Store, curves: Curves) -> list[Task]:
    """What is left to do. Seed by seed, as claims and figures look at the same trainings."""
    known = Store(KEPT) if KEPT.is_dir() and args.folder != KEPT else store
    chosen = [one for one in (*CLAIMS, *CURVES) if _is_chosen(args, one)]
    tasks = []
    for seed in range(args.seeds or max([_SEEDS, *(claim.seeds for claim in CLAIMS)])):
        for one in chosen:
            kept = store if isinstance(one, Claim) else curves
            few = one.exact or (args.quick and args.seeds is None)
            seeds = 1 if few else args.seeds or max(_SEEDS, getattr(one, "seeds", 0))
            checked = not isinstance(one, Claim) or one.check
            done = not args.again and kept.has(one, seed, args.quick)
            if checked and seed < seeds and not done:
                tasks.append(Task(one, seed, kept, _expected(one, seed, args.quick, known)))
    return tasks


def _expected(one: Claim | Curve, seed: int, quick: bool, known: Store) -> float:
    """Seconds that a check took when it was measured before."""
    if isinstance(one, Curve):
        return _GUESS_LINE
    found = known.of(one, quick) or known.of(one)
    same = [result for result in found if result["seed"] == seed] or found
    return max(0.1, same[0]["seconds"]) if same else _GUESS


def _run(task: Task, quick: bool) -> str:
    """Measures, keeps the result, and says what came out."""
    one, start = task.one, time.perf_counter()
    if isinstance(one, Curve):
        task.kept.add(one, task.seed, quick, one.measure(task.seed, quick))
        return one.line
    numbers = one.check(task.seed, quick)
    task.kept.add(one, task.seed, quick, numbers, time.perf_counter() - start)
    return verdict(one, [numbers])[0]


def measure(tasks: list[Task], quick: bool) -> list[tuple[str, Exception]]:
    """Does what is left; returns what failed to measure anything."""
    failed: list[tuple[str, Exception]] = []
    left = sum(task.cost for task in tasks)
    for done, task in enumerate(tasks, 1):
        name, start = _name(task.one), time.perf_counter()
        try:
            found = _run(task, quick)
        except Exception as error:  # the others are still to be measured
            failed.append((name, error))
            found = type(error).__name__
        left -= task.cost
        options.say(
            f"{done} of {len(tasks)}, about {left / 60:.0f} min left: {name}: {found}, "
            f"seed {task.seed}, {time.perf_counter() - start:.1f} s"
        )
    return failed


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures what is missing, writes the page, and prints the count; 1 where a check broke."""
    args = parse(argv)
    if args.list:
        for one in (one for one in (*CLAIMS, *CURVES) if _is_chosen(args, one)):
            source, text = (one.source, one.text) if isinstance(one, Claim) else ("", one.line)
            print(f"{_name(one):32} {source:48} {text}")
        return 0
    store = Store(args.folder)
    curves = Curves(args.folder / _figures.FOLDER / "curves.json")
    tasks = [] if args.page else open_tasks(args, store, curves)
    failed = measure(tasks, args.quick)
    store.forget_all_but(CLAIMS)
    args.folder.mkdir(parents=True, exist_ok=True)
    file, figures = args.folder / "index.md", args.folder / _figures.FOLDER
    drawn = figures.glob("*.png") if args.page else _figures.draw(figures, curves)
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
    for claim in (claim for claim in CLAIMS if _is_chosen(args, claim)):
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
