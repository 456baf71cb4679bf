"""Weak scaling from 16 to 1024 workers, predicted: local cost, words, and the alpha-beta model.

    python -m benchmarks.network.scaling --plot scaling.png
    python -m benchmarks.network.scaling --params 133M --local step_cost.json --compute 300ms
    python -m benchmarks.network.scaling --validate network.json

The exchange is `sparse_collectives.cost_model`'s, as in the planner; its words are compared with
those of the lowered programs at each P. The work of a worker stays the same, so that a perfect
network would keep the time of a step. `--validate` compares the model with a measurement of
`benchmarks.network.run --json FILE`. docs/network.md says what each part of a step is.
"""

import argparse
import itertools
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
    rows = []
    for (name, latency, bandwidth), network in networks.items():
        here = [
            predict(algorithm, Workload(size, k, p), network, args.codec, local, rest)
            | {"network": name}
            for algorithm in ALGORITHMS
            for p in args.workers
        ]
        dense = {row["workers"]: row["step"] for row in here if row["algorithm"] == "dense"}
        title = f"{name}: {latency}, {bandwidth}. ms a step (dense / this)"

        def cell(row: dict[str, Any], dense=dense) -> str:
            return f"{1e3 * row['step']:,.1f} ({dense[row['workers']] / row['step']:.2f})"

        display.show_crossed(title, here, "algorithm", "workers", cell)
        rows += here
    found = {"params": size, "density": args.density, "codec": args.codec, "rest": rest}
    found |= {"local": local._asdict(), "local_source": source, "rows": rows}
    if not args.no_programs:
        found["program_words"] = compare_words(size, args.density, args.workers)
    return found


def compare_words(size: int, density: float, workers: list[int]) -> list[dict[str, Any]]:
    """The model's expected words (exact pairs) beside those of the lowered programs."""
    rows = []
    for (name, own), p in itertools.product(ALGORITHMS.items(), workers):
        program = _volumes.of_algorithm(own, size, density, p)
        model = cost_model.predict(own, Workload(size, program["k"], p)).expected.words
        row = {"algorithm": name, "workers": p, "model": model}
        rows.append(row | {case: program[case] for case in ("best", "worst")})

    def fits(row: dict[str, Any]) -> bool:
        return 0.999 * row["best"] <= row["model"] <= 1.001 * row["worst"]

    def cell(row: dict[str, Any]) -> str:
        span = dict.fromkeys(f"{row[case] / 1e6:.3g}" for case in ("best", "worst"))
        return f"{row['model'] / 1e6:.3g}/{'-'.join(span)}M{'' if fits(row) else ' !'}"

    title = "words received, exact pairs: model / program (best to worst step)"
    display.show_crossed(title, rows, "algorithm", "workers", cell)
    print(f"{sum(map(fits, rows))} of {len(rows)} within the program's best and worst step")
    return rows


def draw(file: Path, found: dict[str, Any]) -> None:
    """The step of each algorithm over P, a panel for each network."""
    given = {"xlabel": "workers P", "ylabel": "predicted seconds a step", "workers": True}
    panels = [
        {"title": name, "lines": display.lines_of(rows, "algorithm", "workers", "step"), **given}
        for name, rows in display.grouped(found["rows"], "network").items()
    ]
    title = f"n = {found['params']:,}, density {found['density']:g}"
    display.draw(file, panels, title=title)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Predicts or validates, prints, and writes the files that are asked for."""
    usual = {"density": 0.01, "workers": WORKERS}
    usual |= {"codec": ("raw", None, ("raw", "bf16", "narrow16", "narrow8"))}
    usual |= {"no_programs": (False, "don't compare the words with programs")}
    parser = options.parser_of(__doc__, "json", "plot", **usual)
    add = parser.add_argument
    add("--params", default="14.7M", metavar="N")
    add("--compute", default="0s", metavar="T", help="forward and backward pass of a worker")
    add("--local", default="cpu", metavar="cpu|FILE", help="of step_cost --json; cpu: planned")
    network = ("NAME", "LATENCY", "BANDWIDTH")
    add("--network", nargs=3, action="append", metavar=network, help="in place of the three")
    add("--validate", type=Path, metavar="FILE", help="of benchmarks.network.run --json")
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
    raise SystemExit(main())
