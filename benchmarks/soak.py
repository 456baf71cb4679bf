"""Thousands of steps over several processes, with everything that is hard on a sparse allreduce.

    python benchmarks/soak.py [--steps 10000] [--processes 4] [--restarts 1] [--json FILE]

The processes train over jax.distributed and Gloo on one machine. Their gradients change every few
steps: even, all mass in one layer, on one worker or in one region, ties, zeros, tiny numbers, one
entry; four of a hundred steps have entries that are not finite, which skip the step, or, in a fifth
of the steps, are left out. The state is saved now and then, and the processes start again from a
checkpoint. All of it is checked:

- conservation, at every step: what was accumulated is what was delivered or kept. The largest
  difference at any entry is in units of a float32 rounding of that entry, at most 2P + 4 of them.
- replicas: the parameters have the same bits in every process, and are finite.
- counts: steps taken and skipped and entries dropped are those that the gradients ask for.
- memory: once a start has compiled both steps and written a checkpoint, the resident memory grows
  by no more than 16 MiB until the next start, and the pieces of memory that are mapped by no more
  than 64: the medians of the first and the last tenth of at least twenty reports.

Exit status 1 where one of them does not hold.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_FAULTS = Path(__file__).parent / "faults"
sys.path.insert(0, str(_FAULTS))

from _processes import Process, end_with_blocks, free_port, started  # noqa: E402

MORE_MEMORY, MORE_MAPS = 16.0, 64
# Of a single step; the first one compiles and has more.
DEADLINE = 120


def main() -> int:
    """Runs the soak and prints what it found."""
    args = _arguments()
    end_with_blocks()
    begin = time.monotonic()
    bounds = [round(args.steps * i / (args.restarts + 1)) for i in range(args.restarts + 2)]
    expected = {"count": 0, "skipped": 0, "dropped": 0}
    segments = []
    with tempfile.TemporaryDirectory() as folder:
        for first, last in zip(bounds, bounds[1:]):
            segments.append(_segment(args, Path(folder), first, last, expected))
            expected = segments[-1][0][-1]["expected"]
    summary = _summary(segments, args)
    summary["seconds"] = round(time.monotonic() - begin, 1)
    _print(summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1))
    return 0 if not summary["violations"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=1, help="from a checkpoint")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--report-every", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in ("steps", "processes", "save_every", "report_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.restarts < args.steps:
        parser.error(f"--restarts must be between 0 and --steps - 1, got {args.restarts}")
    return args


def _segment(
    args: argparse.Namespace, folder: Path, first: int, last: int, expected: dict[str, int]
) -> list[list[dict[str, Any]]]:
    """The reports of each process, from its start at step ``first`` to its end at ``last``."""
    place = f"127.0.0.1:{free_port()}"
    commands = []
    for index in range(args.processes):
        settings = {
            "coordinator": place,
            "processes": args.processes,
            "index": index,
            "folder": str(folder / "checkpoints"),
            "first": first,
            "last": last,
            "save_every": args.save_every,
            "report_every": args.report_every,
            "deadline": DEADLINE,
            "expected": expected,
        }
        command = [sys.executable, str(_FAULTS / "_soak_worker.py"), json.dumps(settings)]
        commands.append(command)
    path = os.pathsep.join(filter(None, (str(_FAULTS.parents[1]), os.environ.get("PYTHONPATH"))))
    with started(commands, {"PYTHONPATH": path}) as group:
        # Each process watches its own steps, so there is no deadline for all of them.
        for process in group:
            process.wait_for("finished", seconds=1e6)
        return [_reports(process) for process in group]


def _reports(process: Process) -> list[dict[str, Any]]:
    return [event for event in process.events if event["event"] == "report"]


def _summary(segments: list[list[list[dict[str, Any]]]], args: argparse.Namespace) -> dict:
    violations = []
    lines = [line for segment in segments for process in segment for line in process]
    worst = 0.0
    limit = 2 * args.processes + 4
    for line in lines:
        # Written so that a NaN is a violation too.
        if not line["worst"] <= limit:
            violations.append(f"step {line['step']}: {line['worst']:.1f} roundings lost")
        worst = line["worst"] if not line["worst"] <= worst else worst
        if not line["finite"]:
            violations.append(f"step {line['step']}: parameters that are not finite")
        if line["found"] != line["expected"]:
            violations.append(
                f"step {line['step']}: counts {line['found']}, not {line['expected']}"
            )
    growth: dict[str, float] = {}
    for segment in segments:
        for same_step in zip(*segment):
            if len({line["params"] for line in same_step}) > 1:
                violations.append(f"step {same_step[0]['step']}: replicas differ")
        for index, process in enumerate(segment):
            for name, most in (("rss", MORE_MEMORY), ("maps", MORE_MAPS)):
                more = _growth([line[name] for line in process if line["settled"]])
                if more is not None:
                    growth[name] = max(growth.get(name, more), more)
                    if more > most:
                        violations.append(f"process {index}: {name} grew by {more:.1f}")
    last = segments[-1][0][-1]
    return {
        "steps": args.steps,
        "processes": args.processes,
        "starts": len(segments),
        "reports": len(lines),
        "counts": last["found"],
        "worst_roundings": worst,
        "most_roundings": limit,
        "rss_mib": round(max(line["rss"] for line in lines), 1),
        "maps": max(line["maps"] for line in lines),
        "rss_growth_mib": growth.get("rss"),
        "maps_growth": growth.get("maps"),
        "violations": violations,
    }


def _growth(samples: list[float]) -> float | None:
    """From the median of the first tenth to that of the last; None where there are few."""
    if len(samples) < 20:
        return None
    tenth = len(samples) // 10
    return round(statistics.median(samples[-tenth:]) - statistics.median(samples[:tenth]), 1)


def _or_few(growth: float | None) -> str:
    return "(too few reports to say)" if growth is None else f"{growth:g}"


def _print(summary: dict[str, Any]) -> None:
    counts = summary["counts"]
    more_memory, more_maps = map(_or_few, (summary["rss_growth_mib"], summary["maps_growth"]))
    rows = (
        ("steps", f"{summary['steps']} on {summary['processes']} processes"),
        ("starts", f"{summary['starts']}, all but the first from a checkpoint"),
        ("taken, skipped", f"{counts['count']}, {counts['skipped']}"),
        ("entries dropped", f"{counts['dropped']}"),
        ("lost at an entry", f"{summary['worst_roundings']:.2f} roundings at most"),
        ("", f"({summary['most_roundings']} allowed)"),
        ("resident memory", f"{summary['rss_mib']} MiB, grew by {more_memory}"),
        ("mapped pieces", f"{summary['maps']}, grew by {more_maps}"),
        ("time", f"{summary['seconds']:.0f} s"),
        ("violations", f"{len(summary['violations'])}"),
    )
    for name, value in rows:
        print(f"{name:18}{value}")
    for text in summary["violations"][:20]:
        print(f"  {text}")


if __name__ == "__main__":
    sys.exit(main())
