"""Weak scaling from 16 to 1024 workers, predicted: local cost, words, and the alpha-beta model.

    python -m benchmarks.network.scaling --plot scaling.png
    python -m benchmarks.network.scaling --params 133M --local step_cost.json --compute 300ms
    python -m benchmarks.network.scaling --validate network.json

The exchange is `sparse_collectives.cost_model`'s, as in the planner; its words are compared with
those of the lowered programs at each P. The local cost is that of `benchmarks.local.step_cost
--json FILE`, or the planner's. Weak scaling: the work of a worker stays the same, so that a
perfect network would keep the time of a step.

`--validate` compares the model with a measurement of `benchmarks.network.run --json FILE`:
the latency is the one fitted there, the bandwidth the limit of the link, the local step the
measured one of the same method with the same number of processes on the machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from sparse_collectives import _units, cost_model
from sparse_collectives.cost_model import Workload

from .._common import display, options, reports
from . import _prediction, _volumes
from ._prediction import ALGORITHMS, local_cost, predict

WORKERS = [16, 32, 64, 128, 256, 512, 1024]
NETWORKS = (
    ("Aries-like", "1.3us", "10GB/s"),
    ("25 Gbit Ethernet", "25us", "25Gbit"),
    ("100 Mbit internet", "15ms", "100Mbit"),
)


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Predicts every algorithm for every network and P, and prints the tables."""
    try:
        size = _units.count("--params", args.params)
        compute = _units.seconds("--compute", args.compute)
        networks = {
            (name, latency, bandwidth): cost_model.network(latency, bandwidth)
            for name, latency, bandwidth in args.network or NETWORKS
        }
    except ValueError as error:
        raise options.InputError(str(error)) from error
    local, per_parameter, source = local_cost(args.local)
    k, rest = max(1, round(args.density * size)), compute + per_parameter * size
    print(
        f"n = {size:,}, density {args.density:g}, codec {args.codec}; local cost: {source}, "
        f"{1e3 * local.select * size:.3g} ms a step, {1e9 * local.merge:.3g} ns a received pair; "
        f"{1e3 * rest:.3g} ms of every step: computation and update"
    )
    rows, counts = [], args.workers
    for (name, latency, bandwidth), network in networks.items():
        found = {
            algorithm: [
                predict(algorithm, Workload(size, k, p), network, args.codec, local, rest)
                for p in counts
            ]
            for algorithm in ALGORITHMS
        }
        rows += [row | {"network": name} for each in found.values() for row in each]
        lines = []
        for algorithm, each in found.items():
            pairs = zip(each, found["dense"], strict=True)
            steps = [(1e3 * row["step"], dense["step"] / row["step"]) for row, dense in pairs]
            lines.append([algorithm, *(f"{step:,.1f} ({ratio:.2f})" for step, ratio in steps)])
        title = f"{name}: {latency}, {bandwidth}. ms a step (dense / this)"
        display.show(title, ("", *(f"P = {p}" for p in counts)), lines)
    found = {"params": size, "density": args.density, "codec": args.codec, "rest": rest}
    found |= {"local": local._asdict(), "local_source": source, "rows": rows}
    if not args.no_programs:
        found["program_words"] = compare_words(size, args.density, counts)
    return found


def compare_words(size: int, density: float, workers: list[int]) -> list[dict[str, Any]]:
    """The model's expected words (exact pairs) beside those of the lowered programs."""
    rows, lines, outside = [], [], 0
    for name, own in ALGORITHMS.items():
        lines.append([name])
        for p in workers:
            program = _volumes.of_algorithm(own, size, density, p)
            model = cost_model.predict(own, Workload(size, program["k"], p)).expected.words
            row = {"algorithm": name, "workers": p, "model": model}
            best, worst = program["best"], program["worst"]
            rows.append(row | {"best": best, "worst": worst})
            off = not 0.999 * best <= model <= 1.001 * worst
            outside += off
            span = f"{best / 1e6:.3g}" if best == worst else f"{best / 1e6:.3g}-{worst / 1e6:.3g}"
            lines[-1].append(f"{model / 1e6:.3g}/{span}M{' !' if off else ''}")
    title = "words received, exact pairs: model / program (best to worst step)"
    display.show(title, ("", *(f"P = {p}" for p in workers)), lines)
    print(f"{len(rows) - outside} of {len(rows)} within the program's best and worst step")
    return rows


def draw(file: Path, found: dict[str, Any]) -> None:
    """The step of each algorithm over P, a panel for each network."""
    panels = []
    for name in dict.fromkeys(row["network"] for row in found["rows"]):
        rows, lines = [row for row in found["rows"] if row["network"] == name], {}
        for algorithm in ALGORITHMS:
            own = [row for row in rows if row["algorithm"] == algorithm]
            steps = [1e3 * row["step"] for row in own]
            lines[algorithm] = [row["workers"] for row in own], steps
        given = {"xlabel": "workers P", "ylabel": "predicted ms a step", "workers": True}
        panels.append({"title": name, "lines": lines} | given)
    title = f"n = {found['params']:,}, density {found['density']:g}"
    display.draw(file, panels, title=title)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Predicts or validates, prints, and writes the files that are asked for."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    options.add_usual(parser, density=0.01, workers=WORKERS)
    add("--params", default="14.7M", metavar="N")
    add("--codec", choices=("raw", "bf16", "narrow16", "narrow8"), default="raw")
    add("--compute", default="0s", metavar="T", help="forward and backward pass of a worker")
    add("--local", default="cpu", metavar="cpu|FILE", help="of step_cost --json; cpu: planned")
    network = ("NAME", "LATENCY", "BANDWIDTH")
    add("--network", nargs=3, action="append", metavar=network, help="in place of the three")
    add("--no-programs", action="store_true", help="don't compare the words with programs")
    add("--validate", type=Path, metavar="FILE", help="of benchmarks.network.run --json")
    options.add_outputs(parser, plot=True)
    args = parser.parse_args(argv)
    if args.validate and args.plot:
        parser.error("--plot draws predictions; leave out --validate")
    if args.validate:
        found: Any = _prediction.validate(args.validate)
        _prediction.show(found)
    else:
        found = scaling(args)
    reports.write(args.json, found)
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    sys.exit(main())
