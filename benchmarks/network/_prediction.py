"""The time of a step by the alpha-beta model, and how well it predicts measured ones."""

import statistics
from pathlib import Path
from typing import Any

from sparse_collectives import cost_model
from sparse_collectives.cost_model import Workload
from sparse_collectives.cost_model._types import Network
from sparse_collectives.planner import _planner
from sparse_collectives.planner._planner import LocalCost

from .._common import display, reports
from .._common.namespaces import rate
from .._common.options import InputError

# The names of `_volumes` and of `cost_model.predict`, by those of the papers.
ALGORITHMS = {name: name for name in ("dense", "topk_a", "gtopk")}
ALGORITHMS |= {"topk_dsa": "dsar_split_allgather", "ok_topk": "ok_topk"}
_WHERE = {"workers": reports.whole(2), "params": reports.whole(1)}
_SECONDS = [reports.number(1e-9, 1e9)]
# What `benchmarks.network.run --json` writes, as far as it is used here.
MEASURED = {
    "settings": {"density": reports.number(1e-12, 1), "cores": reports.whole(1)},
    "local": ({**_WHERE, "method": reports.text(), "seconds": _SECONDS},),
    "links": [{**_WHERE, "link": reports.text(), "latency": reports.number(0, 1e6)}],
    "points": [{**_WHERE, "link": reports.text(), "method": reports.text(), "seconds": _SECONDS}],
}
# And what `benchmarks.local.step_cost --json` does.
LOCAL = {
    "size": reports.whole(1, 2**53),
    "times": [{"contestant": reports.text(), "median_ms": reports.number(0, 1e9)}],
}


def local_cost(choice: str) -> tuple[LocalCost, float, str]:
    """What a sparse step costs beyond a dense one, the dense one per parameter, and a name."""
    if choice == "cpu":
        return _planner.CPU, 0.0, "the planner's cpu"
    report = reports.read(Path(choice), LOCAL, "benchmarks.local.step_cost --json")
    times = {row["contestant"]: row["median_ms"] / 1e3 for row in report["times"]}
    for name in ("dense (psum)", "ok_topk"):
        if name not in times:
            raise InputError(f"{choice} has no time of {name!r}: measure it with step_cost --json")
    dense = times["dense (psum)"] / report["size"]
    select = times["ok_topk"] / report["size"] - dense
    return LocalCost(select, _planner.CPU.merge), dense, choice


def predict(
    algorithm: str, load: Workload, network: Network, codec: str, local: LocalCost, rest: float
) -> dict[str, Any]:
    """Seconds of a step and of its parts; ``rest`` is what every step takes, in seconds."""
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
    """The model's step beside each measured one of a file: one row for each that both know.

    The processes share the cores, so merging takes longer than on cores of one's own by
    their number over that of the cores; the measured local steps have that in them.
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
        if (workers, size, link) not in latency:
            raise InputError(f"{path} has no latency of {link} for P, n = {workers, size}")
        try:
            network = cost_model.network(latency[workers, size, link], rate(link))
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
        load = Workload(size, max(1, round(settings["density"] * size)), workers)
        crowding = max(1.0, workers / settings["cores"])
        merge = LocalCost(0.0, _planner.CPU.merge * crowding)
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
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and the error over each link."""
    display.show_rows("steps, measured and by the model, in seconds", rows, digits=4)
    for link, here in display.grouped(rows, "link").items():
        errors = [abs(row["error"]) for row in here]
        print(f"{link}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
