"""Checks what five papers claim, and what this library claims of itself, one by one.

    python -m benchmarks.evidence [--quick] [--only ID ...]

Each claim has a check, which measures, and a rule, which decides. The results become a page with
figures, as in docs/evidence. Each result is kept at once, so an interrupted run continues
from there. With --quick trainings are shorter and have one seed. --only takes ids, or their
beginnings, such as sparcml or figures/xi. Results that are older than the code are measured again;
--page measures nothing, and writes the page from the results at hand, with the older ones marked.
"""

import sys
import time
from collections import Counter
from pathlib import Path

import jax

from .._common import options
from . import _figures
from ._claims import CLAIMS, VERDICTS, Claim, verdict
from ._figures import CURVES, Curve
from ._page import pages
from ._store import Store

FOLDER = Path(".cache/evidence")


def measure(
    tasks: list[tuple[Claim | Curve, int]], store: Store, quick: bool
) -> list[tuple[str, Exception]]:
    """Measures the tasks, and keeps the results; returns the failed ones with their errors."""
    failed: list[tuple[str, Exception]] = []
    for done, (one, seed) in enumerate(tasks, 1):
        start = time.perf_counter()
        try:
            found = one.check(seed, quick)
            store.add(one, seed, quick, found)
            said = verdict(one, [found])[0] if isinstance(one, Claim) else one.line
        except Exception as error:  # the others are still to be measured
            failed.append((one.name, error))
            said = type(error).__name__
        took = time.perf_counter() - start
        options.say(f"{done} of {len(tasks)}: {one.name}: {said}, seed {seed}, {took:.1f} s")
    return failed


def draw(folder: Path, store: Store) -> None:
    """Draws the figures that have results."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _figures.FIGURES:
        lines = {one.line: store.best(one) for one in CURVES if one.figure == name}
        if measured := {line: series for line, series in lines.items() if series}:
            _figures.draw(name, measured, folder / f"{name}.png")


def report(claims: list[Claim], store: Store) -> None:
    """Prints the claims that do not hold, and how many claims have which verdict."""
    found = [verdict(one, [result["numbers"] for result in store.best(one)]) for one in claims]
    for claim, (decided, note) in zip(claims, found, strict=True):
        if decided in VERDICTS[:2]:
            print(f"{decided}: {claim.name}{f', {note}' if note else ''}")
    counts = Counter(decided for decided, _ in found)
    print("; ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]))


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures the missing results, writes the page, prints counts; returns 1 if a check failed."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="shorter trainings, and one seed")
    add("--only", nargs="+", metavar="ID", default=[""], help="by id or by how it begins")
    add("--page", action="store_true", help="write the page of what there is, and measure nothing")
    add("--folder", type=Path, default=FOLDER, help=f"of results and page ({FOLDER})")
    args = parser.parse_args(argv)
    everything = (*CLAIMS, *CURVES)
    for wanted in args.only:
        if not any(one.name.startswith(wanted) for one in everything):
            parser.error(f"--only {wanted!r} is the beginning of no claim or figure")
    chosen = [one for one in everything if one.name.startswith(tuple(args.only))]
    store = Store(args.folder)
    # Seed by seed, since claims and figures share trainings.
    tasks = [
        (one, seed)
        for seed in range(max(one.seeds for one in chosen))
        for one in chosen
        if one.check and not args.page and not store.has(one, seed, args.quick)
        if seed < (1 if args.quick or getattr(one.check, "exact", False) else one.seeds)
    ]
    failed = measure(tasks, store, args.quick)
    store.forget_all_but(everything)
    if not args.page:
        draw(args.folder / _figures.FOLDER, store)
    for name, text in pages(store, CLAIMS).items():
        (args.folder / name).write_text(text, encoding="utf-8")
    report([one for one in chosen if isinstance(one, Claim)], store)
    print(f"{len(tasks) - len(failed)} measured now; {args.folder / 'index.md'}")
    for name, error in failed:
        print(f"{name} could not be measured: {error!r}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
