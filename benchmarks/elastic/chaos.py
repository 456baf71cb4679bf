"""Compares the loss of a training whose workers are killed at random with undisturbed ones.

    sudo python -m benchmarks.elastic.chaos --minutes 30 --out chaos.json

Trains a transformer on characters three times, with four workers over a link of 100 Mbit/s. In the
first training, single workers are killed and come back. The second one is undisturbed. In the
third, each of the same deaths stops all workers, which start again from the newest checkpoint, as
with a restart script. Linux only, with root and iproute2 (ip, tc).

    sudo python -m benchmarks.elastic.chaos --modes "killed one by one" --at-once 2 --every 20 \
        --away 3 --save-every 2 --minutes 17 --out storm.json

kills up to two workers at once, while they save and while they return.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from optax_ext.elastic import _files

from .._common import namespaces, options, reports
from .cluster import Cluster, cluster

WORKER = "benchmarks.elastic._worker"
MODES = ("killed one by one", "undisturbed", "all started again")


def run(mode: str, hosts: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One training: points of time, step and loss, and what each death cost."""
    seconds = 60.0 * args.minutes
    alone = mode == "killed one by one"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "width": args.width,
            "text": str(args.text) if args.text else None,
            "examples": args.examples,
            "rate": args.rate,
            "seed": args.seed,
            "heartbeat": args.heartbeat,
            "collective": args.heartbeat,
            "steps": args.steps or 10**9,
            "evaluate_every": args.evaluate_every,
            "folder": folder,
            "save_every": args.save_every,
            "min_workers": 1 if alone else args.workers,
        }
        with cluster(WORKER, args.workers, hosts, **settings) as of:
            of.wait_for_step(1)
            began = time.time()
            checked: list[bool] = []
            deaths = []
            if mode != "undisturbed":
                deaths = _disturb(
                    of, alone, began, seconds, args, lambda: checked.extend(_whole(folder))
                )
            if mode == "undisturbed":
                of.wait_for("the end", lambda: not of.living, seconds=max(seconds, 60))
            checked += _whole(folder)
            parts = {"read": len(checked), "damaged": checked.count(False)}
            return {"mode": mode, "seed": args.seed, "parts": parts, **_report(of, began, deaths)}


def _disturb(
    of: Cluster,
    alone: bool,
    began: float,
    seconds: float,
    args: argparse.Namespace,
    check: Callable[[], None],
) -> list[dict[str, Any]]:
    """Kills workers every so often and starts them again, until the time is over."""
    rng = np.random.default_rng(args.seed)
    deaths = []
    at = began
    while True:
        # At a random point of a step.
        at += args.every * rng.uniform(0.75, 1.25)
        numbers = [*map(int, rng.permutation(of.size)[: rng.integers(1, args.at_once + 1)])]
        if at + args.away > began + seconds:
            break
        time.sleep(max(0.0, at - time.time()))
        steps = [of.step_of(x) for x in range(of.size)]
        if all(steps[x] < 0 for x in range(of.size) if x not in numbers):
            # One that has the state stays, so that no step is taken from a checkpoint.
            numbers = [x for x in numbers if x != int(np.argmax(steps))]
        died = {"time": time.time(), "step": max(steps), "at once": len(numbers)}
        now = [{**died, "number": x, "returning": steps[x] < 0} for x in numbers]
        deaths += now
        for x in numbers if alone else range(of.size):
            of.kill(x)
        time.sleep(args.away)
        check()
        for death in now:
            death["back"] = time.time()
        if not alone:
            of.restart_coordinator()
        for x in range(of.size):
            # A launcher also starts one that has ended without a signal.
            if x in numbers or not alone or of.lives[x][-1].ended_at is not None:
                of.start(x)
    time.sleep(max(0.0, began + seconds - time.time()))
    return deaths


def _whole(folder: str) -> Iterator[bool]:
    """Whether each part of a checkpoint in the folder is as it was written."""
    for part in Path(folder).glob("*/*/*"):
        # Others are being written, or were when their process was killed.
        if part.name.isdigit():
            # Checkpoints that are too old are removed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                try:
                    yield bool(_files.read(part))
                except ValueError:
                    yield False


def _report(of: Cluster, began: float, deaths: list[dict[str, Any]]) -> dict[str, Any]:
    steps = sorted(of.events("step"), key=lambda event: event["time"])
    values = sorted(of.events("value"), key=lambda event: event["time"])
    for death in deaths:
        after = [x for x in steps if x["time"] > death["time"] and x["number"] != death["number"]]
        death["until a step"] = next(
            (
                x["time"] - death["time"]
                for x in after
                if death["number"] not in x["members"] or x["time"] > death["back"]
            ),
            None,
        )
        death["until it takes part"] = next(
            (
                x["time"] - death["back"]
                for x in steps
                if x["time"] > death["back"] and x["number"] == death["number"]
            ),
            None,
        )
        death["time"] -= began
        del death["back"]
    # By step and workers, since other workers may take a step again; so may the same, of whom one
    # has come back meanwhile, and the last time counts.
    digests: dict[tuple[int, ...], dict[int, str]] = {}
    for event in steps:
        key = event["step"], *event["members"]
        digests.setdefault(key, {})[event["number"]] = event["digest"]
    taken = {step for step, *_ in digests}
    last = [x for x in steps if x["step"] == max(taken)]
    lost = max((event["lost"] for event in steps if np.isfinite(event["lost"])), default=0.0)
    return {
        "steps": max(taken),
        "missing": max(taken) - min(taken) + 1 - len(taken),
        "differ": sum(len({*found.values()}) > 1 for found in digests.values()),
        "members": len({x["number"] for x in last}),
        "lost": lost,
        "points": [[x["time"] - began, x["step"], x["value"]] for x in values],
        "deaths": deaths,
        # Workers that failed without being killed.
        "failed": [
            life.errors[-2000:] for lives in of.lives for life in lives if (life.status or 0) > 0
        ],
    }


def line(row: dict[str, Any]) -> dict[str, Any]:
    """A run in a few numbers."""
    found = {"mode": row["mode"], "steps": row["steps"], "deaths": len(row["deaths"])}
    found |= {name: row[name] for name in ("missing", "differ", "parts")}
    found["of process 0"] = sum(x["number"] == 0 for x in row["deaths"])
    found["two at once"] = sum(x["at once"] > 1 for x in row["deaths"])
    found["returning"] = sum(x["returning"] for x in row["deaths"])
    found["loss"] = row["points"][-1][2] if row["points"] else None
    for name in ("until a step", "until it takes part"):
        values = sorted(x[name] for x in row["deaths"] if x[name] is not None)
        if values:
            found[f"{name}, s"] = statistics.median(values)
            found[f"{name}, worst"] = values[-1]
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the losses over time, with the deaths, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    curves = [
        (row, color, *map(np.array, zip(*row["points"], strict=True)))
        for row, color in zip(rows, ("#0b5cad", "#555555", "#c2410c"), strict=False)
        if row["points"]
    ]
    low = min(values.min() for *_, values in curves)
    # The figure starts after the steep beginning, which is the same for all.
    high = low + 0.3 * (max(values.max() for *_, values in curves) - low)
    place = high
    for row, color, seconds, _, values in sorted(curves, key=lambda curve: -curve[-1][-1]):
        axes.plot(seconds / 60, values, color=color, linewidth=1.6)
        place = min(place - 0.07 * (high - low), values[-1])
        axes.annotate(
            f"{row['mode']},\n{row['steps']:,} steps",
            (seconds[-1] / 60, values[-1]),
            xytext=(1.03 * max(x[2][-1] for x in curves) / 60, place),
            color=color,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4},
        )
        place -= 0.04 * (high - low)
    axes.set_ylim(low - 0.2 * (high - low), high)
    first = rows[0]
    for death in first["deaths"]:
        axes.axvline(death["time"] / 60, color="#0b5cad", alpha=0.15, linewidth=1)
    axes.set(xlabel="minutes", ylabel="loss on data held back")
    axes.spines[["top", "right"]].set_visible(False)
    right = max(point[0] for row in rows for point in row["points"]) / 60
    axes.set_xlim(0, 1.4 * right)
    figure.savefig(path, dpi=150)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs the trainings, and prints a line for each."""
    numbers: dict[str, tuple[float, str]] = {
        "workers": (4, "how many"),
        "minutes": (10.0, "of the trainings with deaths"),
        "at-once": (1, "how many workers may be killed at once"),
        "every": (60.0, "seconds from one death to the next, more or less"),
        "away": (20.0, "seconds until a worker is started again"),
        "heartbeat": (6, "seconds without one after which a worker is taken for dead"),
        "width": (32, "of the model"),
        "examples": (8, "of a worker in a step"),
        "rate": (0.01, "of learning"),
        "seed": (0, "of the model, its data and the deaths"),
        "evaluate-every": (50, "steps"),
        "save-every": (100, "steps"),
    }
    parser = options.parser_of(__doc__)
    for name, (default, text) in numbers.items():
        kind = type(default)
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--link", type=options.link, default="100mbit", help="of each worker")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--text", type=Path, help="a text; by default one that is made up")
    parser.add_argument("--plot", type=Path, help="a PNG to draw")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args(argv)
    args.steps = 0
    options.require_network()
    rows = []
    with namespaces.network(args.workers + 1) as hosts:
        hosts.limit(args.link)
        for mode in args.modes:
            if mode == "undisturbed" and rows:
                # The undisturbed training takes as many steps, however long they take.
                args.steps = rows[0]["steps"]
            rows.append(run(mode, hosts, args))
            args.steps = 0
            print(line(rows[-1]), flush=True)
            if args.out:
                reports.write(args.out, rows)
    if args.plot:
        with contextlib.suppress(ImportError):
            draw(rows, args.plot)


if __name__ == "__main__":
    raise SystemExit(main())
