"""The time of a step by the alpha-beta model, and how well it predicts measured ones."""

import statistics
from pathlib import Path
from typing import Any

from sparse_collectives import cost_model
from sparse_collectives.cost_model import Network, Workload
from sparse_collectives.planner import _planner
from sparse_collectives.planner._planner import LocalCost

from .._common import reports
from .._common.namespaces import rate
from .._common.options import InputError

# The names of `_volumes` and of `cost_model.predict`, by those of the papers.
ALGORITHMS = {
    "dense": "dense",
    "topk_a": "topk_a",
    "gtopk": "gtopk",
    "topk_dsa": "dsar_split_allgather",
    "ok_topk": "ok_topk",
}

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
    """What a sparse step costs beyond a dense one, the dense one per parameter, and a name.

    Raises:
      InputError: the file is not one of benchmarks.local.step_cost.
    """
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


def _of_method(method: str) -> tuple[str, str] | None:
    """The algorithm and codec of a method of benchmarks.network.run, if the model has it."""
    name, *options = method.split("/")
    if name not in ALGORITHMS or set(options) & {"leaves", "global32"}:
        return None
    codecs = [option for option in options if option in cost_model.CODECS]
    return name, codecs[0] if codecs else "raw"


def validate(path: Path) -> list[dict[str, Any]]:
    """The model's step beside each measured one of a file: one row for each that both know.

    The processes share the cores, so merging takes longer than on cores of one's own by
    their number over that of the cores; the measured local steps have that in them.

    Raises:
      InputError: the file is no report, or lacks a latency or the steps without exchange.
    """
    report = reports.read(path, MEASURED, "benchmarks.network.run --json")
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
        if (*where, point["link"]) not in fitted:
            raise InputError(f"{path} has no latency of {point['link']} for P, n = {where}")
        try:
            bandwidth = rate(point["link"])
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
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
        raise InputError(
            f"nothing to compare in {path}: run it without --no-breakdown, over a limited link"
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
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
