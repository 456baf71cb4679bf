"""Weak scaling from 16 to 1,024 workers, predicted: local cost, words, and the alpha-beta model.

    python -m benchmarks.network.scaling --plot scaling.png
    python -m benchmarks.network.scaling --params 133M --local step_cost.json --compute 300ms
    python -m benchmarks.network.scaling --validate network.json

The exchange is predicted by `sparse_collectives.cost_model`, as in the planner. Its words are
compared with the words of the lowered programs at each P. The work of a worker stays the same, so
that a perfect network would keep the time of a step. `--validate` compares the model with a
measurement of `benchmarks.network.run --json FILE`. docs/network.md explains the parts of a step.
"""

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from sparse_collectives import _units, cost_model
from sparse_collectives.cost_model import Workload
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.planner._ways import CPU, LocalCost

from .._common import display, options, reports
from .._common.namespaces import rate
from .._common.options import InputError
from . import _volumes

WORKERS = [2**i for i in range(4, 11)]
NETWORKS = (
    ("Aries-like", "1.3us", "10GB/s"),
    ("25 Gbit Ethernet", "25us", "25Gbit"),
    ("100 Mbit internet", "15ms", "100Mbit"),
)


# The names in `_volumes` and in `cost_model.predict`, by the papers' names.
ALGORITHMS = {name: name for name in ("dense", "topk_a", "gtopk")}
ALGORITHMS |= {"topk_dsa": "dsar_split_allgather", "ok_topk": "ok_topk"}
_WHERE = {"workers": reports.whole(2), "params": reports.whole(1)}
_SECONDS = [reports.number(1e-9, 1e9)]
# The fields of `benchmarks.network.run --json` that are used here,
MEASURED = {
    "settings": {"density": reports.number(1e-12, 1), "cores": reports.whole(1)},
    "local": ({**_WHERE, "method": reports.text(), "seconds": _SECONDS},),
    "links": [{**_WHERE, "link": reports.text(), "latency": reports.number(0, 1e6)}],
    "points": [{**_WHERE, "link": reports.text(), "method": reports.text(), "seconds": _SECONDS}],
}
# and of `benchmarks.local.step_cost --json`.
LOCAL = {
    "size": reports.whole(1, 2**53),
    "times": [{"contestant": reports.text(), "median_ms": reports.number(0, 1e9)}],
}


def local_cost(choice: str) -> tuple[LocalCost, float, str]:
    """The cost of a sparse step beyond a dense one, the dense one per parameter, and a name."""
    if choice == "cpu":
        return CPU, 0.0, "the planner's cpu"
    report = reports.read(Path(choice), LOCAL, "benchmarks.local.step_cost --json")
    each = {row["contestant"]: row["median_ms"] / 1e3 / report["size"] for row in report["times"]}
    try:
        dense, sparse = each["dense (psum)"], each["ok_topk"]
    except KeyError as error:
        raise InputError(f"{choice} has no time of {error}") from error
    return LocalCost(sparse - dense, CPU.merge), dense, choice


def predict(
    algorithm: str, load: Workload, network: Network, codec: str, local: LocalCost, rest: float
) -> dict[str, Any]:
    """Seconds of a step and of its parts; ``rest`` is common to all steps, in seconds."""
    dense = algorithm == "dense"
    cost = cost_model.predict(ALGORITHMS[algorithm], load, "raw" if dense else codec).expected
    parts = {
        "exchange": cost.seconds(network),
        "sparsify": 0.0 if dense else local.select * load.size,
        "merge": 0.0 if dense else local.merge * cost.pairs,
    }
    row = {"algorithm": algorithm, "workers": load.workers, "words": cost.words}
    return row | parts | {"step": rest + sum(parts.values())}


def _of_method(method: str) -> tuple[str, str] | None:
    """The algorithm and codec of a method of benchmarks.network.run, if the model has it."""
    name, *options = method.split("/")
    if name not in ALGORITHMS or set(options) & {"leaves", "global32"}:
        return None
    codecs = [option for option in options if option in cost_model._codecs.CODECS]
    return name, codecs[0] if codecs else "raw"


def validate(path: Path) -> list[dict[str, Any]]:
    """Prints the model's step next to each measured one in a file, if the model has its method.

    The processes share the cores, so merging takes longer than with a core for each process, by the
    ratio of processes to cores. The measured local steps already include that.
    """
    report = reports.read(path, MEASURED, "benchmarks.network.run --json")
    local = {
        (row["workers"], row["params"], row["method"]): statistics.median(row["seconds"])
        for row in report["local"]
    }
    latency = {(r["workers"], r["params"], r["link"]): r["latency"] for r in report["links"]}
    settings, rows = report["settings"], []
    for point in report["points"]:
        workers, size, link, method = (point[x] for x in ("workers", "params", "link", "method"))
        known, own = _of_method(method), local.get((workers, size, method))
        if known is None or link == "none" or own is None:
            continue
        try:
            network = cost_model.network(latency[workers, size, link], rate(link))
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}, latency and rate of a link: {error}") from error
        load = Workload(size, max(1, round(settings["density"] * size)), workers)
        crowding = max(1.0, workers / settings["cores"])
        merge = LocalCost(0.0, CPU.merge * crowding)
        model = predict(known[0], load, network, known[1], merge, own)
        step = statistics.median(point["seconds"])
        rows.append(
            {"workers": workers, "params": size, "link": link, "method": method}
            | {"measured": step, "model": model["step"], "error": model["step"] / step - 1}
            | {"local": own, "exchange": model["exchange"], "latency": network.latency}
        )
    if not rows:
        raise InputError(
            f"nothing to compare in {path}: run it without --no-breakdown, over a limited link"
        )
    display.show_rows("steps, measured and by the model, in seconds", rows)
    for link, here in display.grouped(rows, "link").items():
        errors = [abs(row["error"]) for row in here]
        print(f"{link}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    return rows


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
        raise InputError(str(error)) from error
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
    """The model's expected words (exact pairs) compared with the words of the lowered programs."""
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
    """Draws the step of each algorithm over P, a panel for each network."""
    given = {"xlabel": "workers P", "ylabel": "predicted seconds a step", "workers": True}
    panels = [
        {"title": name, "lines": display.lines_of(rows, "algorithm", "workers", "step"), **given}
        for name, rows in display.grouped(found["rows"], "network").items()
    ]
    title = f"n = {found['params']:,}, density {found['density']:g}"
    display.draw(file, panels, title=title)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Predicts or validates, prints, and writes the requested files."""
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
    found: Any = validate(args.validate) if args.validate else scaling(args)
    reports.write(args.json, found)
    if args.plot:
        draw(args.plot, found)


if __name__ == "__main__":
    raise SystemExit(main())
