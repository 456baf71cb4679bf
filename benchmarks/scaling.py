"""Weak scaling from 16 to 1024 workers, predicted: local cost, words, and the alpha-beta model.

    python benchmarks/scaling.py --plot scaling.png
    python benchmarks/scaling.py --params 133M --local step_cost.json --compute 300ms
    python benchmarks/scaling.py --validate network.json

The exchange is `sparse_collectives.cost_model`'s, as in the planner; its words are compared with
those of the traced programs at each P. The local cost is that of `benchmarks/step_cost.py
--json FILE`, or the planner's. Weak scaling: the work of a worker stays the same, so that a
perfect network would keep the time of a step.

`--validate` compares the model with a measurement of `benchmarks/network/run.py --json FILE`:
the latency is the one fitted there, the bandwidth the limit of the link, the local step the
measured one of the same method with the same number of processes on the machine.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import _volumes

from sparse_collectives import cost_model
from sparse_collectives.cost_model import Network, Workload
from sparse_collectives.planner import _planner, _units
from sparse_collectives.planner._planner import LocalCost

WORKERS = [16, 32, 64, 128, 256, 512, 1024]
# The names of `_volumes` and of `cost_model.predict`, by those of the papers.
ALGORITHMS = {
    "dense": "dense",
    "topk_a": "topk_a",
    "gtopk": "gtopk",
    "topk_dsa": "dsar_split_allgather",
    "ok_topk": "ok_topk",
}
NETWORKS = (
    ("Aries-like", "1.3us", "10GB/s"),
    ("25 Gbit Ethernet", "25us", "25Gbit"),
    ("100 Mbit internet", "15ms", "100Mbit"),
)
COLOURS = ("black", "tab:blue", "tab:green", "tab:purple", "tab:red")


def local_cost(choice: str) -> tuple[LocalCost, float, str]:
    """What a sparse step costs beyond a dense one, the dense one per parameter, and a name.

    Raises:
      ValueError: the file is not one of benchmarks/step_cost.py.
    """
    if choice in ("cpu", "gpu"):
        return {"cpu": _planner.CPU, "gpu": _planner.GPU}[choice], 0.0, f"the planner's {choice}"
    try:
        report = json.loads(Path(choice).read_text())
        times = {row["contestant"]: row["median_ms"] / 1e3 for row in report["times"]}
        dense = times["dense (psum)"] / report["size"]
        select = times["ok_topk"] / report["size"] - dense
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--local {choice}: not a file of benchmarks/step_cost.py --json ({error!r})"
        ) from None
    return LocalCost(select, _planner.CPU.merge), dense, choice


def predict(
    algorithm: str, load: Workload, network: Network, codec: str, local: LocalCost, rest: float
) -> dict[str, Any]:
    """Seconds of a step and of its parts; ``rest`` is what every step takes, in seconds."""
    dense = algorithm == "dense"
    cost = cost_model.predict(ALGORITHMS[algorithm], load, "raw" if dense else codec).expected
    sparsify = 0.0 if dense else local.select * load.size
    merge = 0.0 if dense else local.merge * cost.pairs
    exchange = cost.seconds(network)
    return {
        "algorithm": algorithm,
        "workers": load.workers,
        "words": cost.words,
        "exchange": exchange,
        "sparsify": sparsify,
        "merge": merge,
        "step": rest + sparsify + merge + exchange,
    }


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Predicts every algorithm for every network and P, and prints the tables."""
    size, compute = _units.count("--params", args.params), _units.seconds("--compute", args.compute)
    local, per_parameter, source = local_cost(args.local)
    k, rest = max(1, round(args.density * size)), compute + per_parameter * size
    print(
        f"n = {size:,}, density {args.density:g}, codec {args.codec}; local cost: {source}, "
        f"{1e3 * local.select * size:.3g} ms a step, {1e9 * local.merge:.3g} ns a received pair; "
        f"{1e3 * rest:.3g} ms of every step: computation and update"
    )
    rows = []
    for name, latency, bandwidth in args.network or NETWORKS:
        network = cost_model.network(latency, bandwidth)
        table = {
            (algorithm, workers): predict(
                algorithm, Workload(size, k, workers), network, args.codec, local, rest
            )
            for algorithm in ALGORITHMS
            for workers in args.workers
        }
        rows += [row | {"network": name} for row in table.values()]
        print(f"\n{name}: {latency}, {bandwidth}. ms a step (dense / this)")
        print(f"{'':10}" + "".join(f"{f'P = {p}':>17}" for p in args.workers))
        for algorithm in ALGORITHMS:
            cells = []
            for workers in args.workers:
                step = table[algorithm, workers]["step"]
                ratio = table["dense", workers]["step"] / step
                cells.append(f"{f'{1e3 * step:,.1f} ({ratio:.2f})':>17}")
            print(f"{algorithm:10}" + "".join(cells))
    found = {"params": size, "density": args.density, "codec": args.codec, "rest": rest}
    found |= {"local": local._asdict(), "local_source": source, "rows": rows}
    if not args.no_programs:
        found["program_words"] = compare_words(size, args.density, args.workers)
    return found


def compare_words(size: int, density: float, workers: list[int]) -> list[dict[str, Any]]:
    """The model's expected words (exact pairs) beside those of the traced programs."""
    print("\nwords received, exact pairs: model / program (best to worst step)")
    print(f"{'':10}" + "".join(f"{f'P = {p}':>19}" for p in workers))
    rows = []
    for name, own in ALGORITHMS.items():
        cells = []
        for p in workers:
            program = _volumes.of_algorithm(own, size, density, p)
            model = cost_model.predict(own, Workload(size, program["k"], p)).expected.words
            best, worst = program["best"], program["worst"]
            inside = 0.999 * best <= model <= 1.001 * worst
            rows.append(
                {"algorithm": name, "workers": p, "model": model, "best": best, "worst": worst}
            )
            span = f"{best / 1e6:.3g}" if best == worst else f"{best / 1e6:.3g}-{worst / 1e6:.3g}"
            cells.append(f"{f'{model / 1e6:.3g}/{span}M' + ('' if inside else ' !'):>19}")
        print(f"{name:10}" + "".join(cells))
    off = [r for r in rows if not 0.999 * r["best"] <= r["model"] <= 1.001 * r["worst"]]
    print(f"{len(rows) - len(off)} of {len(rows)} within the program's best and worst step")
    return rows


def _of_method(method: str) -> tuple[str, str] | None:
    """The algorithm and codec of a method of benchmarks/network, if the model has it."""
    name, *options = method.split("/")
    if name not in ALGORITHMS or set(options) & {"leaves", "global32"}:
        return None
    codecs = [option for option in options if option in cost_model.CODECS]
    return name, codecs[0] if codecs else "raw"


def validate(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The model's step beside each measured one: one row for each that both know.

    The processes share the cores, so merging takes longer than on cores of one's own by
    their number over that of the cores; the measured local steps have that in them.

    Raises:
      ValueError: the report lacks the latency, or the steps without exchange.
    """
    local = {
        (row["workers"], row["params"], row["method"]): statistics.median(row["seconds"])
        for row in report["local"]
    }
    fitted = {(row["workers"], row["params"], row["link"]): row for row in report["links"]}
    settings, rows = report["settings"], []
    for point in report["points"]:
        known, where = _of_method(point["method"]), (point["workers"], point["params"])
        if known is None or point["link"] == "none" or (*where, point["method"]) not in local:
            continue
        load = Workload(where[1], max(1, round(settings["density"] * where[1])), where[0])
        # `tc` writes 1gbit, the library 1Gbit.
        bandwidth = point["link"].replace("g", "G").replace("m", "M")
        network = cost_model.network(fitted[(*where, point["link"])]["latency"], bandwidth)
        crowding = max(1.0, where[0] / settings["cores"])
        merge = LocalCost(0.0, _planner.CPU.merge * crowding)
        own = local[(*where, point["method"])]
        model = predict(known[0], load, network, known[1], merge, own)
        step = statistics.median(point["seconds"])
        rows.append(
            {key: point[key] for key in ("workers", "params", "link", "method")}
            | {"measured": step, "model": model["step"], "error": model["step"] / step - 1}
            | {"local": own, "exchange": model["exchange"], "latency": network.latency}
        )
    if not rows:
        raise ValueError("nothing to compare: run it without --no-breakdown, over a limited link")
    return rows


def show_validation(rows: list[dict[str, Any]]) -> None:
    """The table, and the error over each link."""
    print(
        f"{'method':24}{'P':>4}{'n':>12}{'link':>9}{'alpha us':>9}{'local ms':>10}"
        f"{'exchange':>10}{'model ms':>10}{'measured':>10}{'error':>8}"
    )
    for row in rows:
        print(
            f"{row['method']:24}{row['workers']:>4}{row['params']:>12,}{row['link']:>9}"
            f"{1e6 * row['latency']:>9.0f}{1e3 * row['local']:>10.1f}{1e3 * row['exchange']:>10.1f}"
            f"{1e3 * row['model']:>10.1f}{1e3 * row['measured']:>10.1f}{row['error']:>+8.0%}"
        )
    for link in dict.fromkeys(row["link"] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["link"] == link]
        print(f"{link}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def plot(file: Path, found: dict[str, Any]) -> None:
    """The step of each algorithm over P, a panel for each network."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    names = list(dict.fromkeys(row["network"] for row in found["rows"]))
    figure = Figure(figsize=(4.2 * len(names), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for algorithm, colour in zip(ALGORITHMS, COLOURS, strict=True):
            points = [
                (row["workers"], 1e3 * row["step"])
                for row in found["rows"]
                if (row["network"], row["algorithm"]) == (name, algorithm)
            ]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=algorithm, markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("workers P")
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=7)
    figure.supylabel("predicted ms a step", fontsize=9)
    figure.suptitle(f"n = {found['params']:,}, density {found['density']:g}", fontsize=10)
    figure.savefig(file)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}\n")
    add = made.add_argument
    add("--params", default="14.7M", metavar="N")
    add("--density", type=float, default=0.01)
    add("--workers", type=int, nargs="+", default=WORKERS, metavar="P")
    add("--codec", choices=("raw", "bf16", "narrow16", "narrow8"), default="raw")
    add("--compute", default="0s", metavar="T", help="forward and backward pass of a worker")
    add("--local", default="cpu", metavar="cpu|gpu|FILE", help="gpu: the cpu's over 100, a guess")
    network = ("NAME", "LATENCY", "BANDWIDTH")
    add("--network", nargs=3, action="append", metavar=network, help="in place of the three")
    add("--no-programs", action="store_true", help="don't compare the words with programs")
    add("--validate", type=Path, metavar="FILE", help="of benchmarks/network/run.py --json")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="a PNG")
    return made


def main(argv: list[str] | None = None) -> int:
    """Predicts or validates, prints, and writes the files that are asked for."""
    options = parser()
    args = options.parse_args(argv)
    if min(args.workers) < 1 or not 0 < args.density <= 1:
        options.error("--workers: at least 1, and --density: in (0, 1]")
    if args.validate and args.plot:
        options.error("--plot draws predictions; leave out --validate")
    try:
        if args.validate:
            found: Any = validate(json.loads(args.validate.read_text()))
            show_validation(found)
        else:
            found = scaling(args)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        if args.plot:
            plot(args.plot, found)
    except (ValueError, OSError, KeyError) as error:
        options.error(str(error) if not isinstance(error, KeyError) else f"no {error} in the file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
