"""What happens to a training of several processes when something breaks, and how it goes on.

    python benchmarks/faults/run.py [--rows killed,hangs] [--json FILE]

Three processes train over jax.distributed and Gloo, with a checkpoint after every third step. Each
row breaks something in step 8, or in the checkpoint after it. Every process that is left must end
with an error that says why, within the bound: nobody hangs, and no result is wrong. Then the last
whole checkpoint is looked for, and the training goes on from it: with three processes to the same
bits as one that was never disturbed, and with two with the same sum of the residuals.

"seconds" is the time from the fault until the last of them has ended. Rows that need root are left
out without it, and said to be.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import _rows
import _training
from _processes import end_with_blocks

ROWS = {
    "killed": _rows.killed,
    "stopped": _rows.stopped,
    "stopped_with_patience": _rows.stopped_with_patience,
    "hangs": _rows.hangs,
    "coordinator_killed": _rows.coordinator_killed,
    "link_down": _rows.link_down,
    "cannot_write": _rows.cannot_write,
    "disk_full": _rows.disk_full,
    "cut_in_half": _rows.cut_in_half,
    "flipped_bit": _rows.flipped_bit,
}
NEED_ROOT = {"link_down", "disk_full"}


def main() -> int:
    """Runs the rows and prints a table of them; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas in between")
    parser.add_argument("--stop", type=float, default=60, help="seconds a worker is stopped for")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    end_with_blocks()
    names = args.rows.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if args.stop <= 0:
        parser.error(f"--stop must be positive, got {args.stop}")
    logging.getLogger("absl").addFilter(_is_news)
    left_out = []
    if os.geteuid() != 0 or shutil.which("ip") is None:
        left_out = [name for name in names if name in NEED_ROOT]
    outcomes = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "undisturbed").mkdir()
        expected = _training.reference(folder / "undisturbed")
        for name in names:
            if name in left_out:
                continue
            own = folder / name
            own.mkdir()
            start = time.monotonic()
            outcomes[name] = ROWS[name](_rows.Setup(own, expected, args.stop))
            if sys.stderr.isatty():
                print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            _print_row(name, outcomes[name])
    for name in left_out:
        print(f"\n{name}: LEFT OUT, needs root and `ip`")
    if args.json:
        args.json.write_text(json.dumps({k: o._asdict() for k, o in outcomes.items()}, indent=1))
    failed = [name for name, outcome in outcomes.items() if not outcome.ok]
    print(
        f"\n{len(outcomes)} rows, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}"
    )
    return 1 if failed else 0


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax warns that the arrays are not read when only the metadata is asked for.
    return "could not be restored" not in record.getMessage()


def _print_row(name: str, outcome: _rows.Outcome) -> None:
    summary = (ROWS[name].__doc__ or "").splitlines()[0]
    seconds = "NOT ended" if outcome.seconds is None else f"ended after {outcome.seconds:.1f} s"
    origin = "never stopped" if outcome.step < 0 else f"resumed from step {outcome.step}"
    print(f"\n{name}: {summary} {'ok' if outcome.ok else 'FAIL'}")
    print(f"  {seconds} (bound {outcome.bound:g} s); {origin}; {outcome.check}")
    for index, text in sorted(outcome.reports.items()):
        print(f"  process {index}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
