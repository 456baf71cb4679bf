"""Steps and epochs on one machine and over links, and programs that are compiled for a GPU."""

import json
import statistics
from functools import partial
from typing import Any

from benchmarks.gpu.programs import cells as program_cells

from ._data import DATA, cells, code, interval, median, middle, ratios, read
from ._files import ROOT, Rows

# The columns of the table of first steps.
LEAVES = (1, 150, 300)
STEPS = {
    "jnp.nonzero(abs(acc) >= t, size=k) alone": "`jnp.nonzero(abs(acc) >= t, size=k)` alone",
    "ok_topk": "`ok_topk`, the whole step",
    "ok_topk, threshold_reuse": "`ok_topk` with `threshold_reuse`, the whole step",
    "dense (psum)": "dense, the whole step (one worker: a copy)",
}
EXCHANGES = ("dense", "ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
CACHES = {
    "records in a dictionary": "records in a dictionary, as the system caches files",
    "samples in a dictionary": "samples in a dictionary, without a disk level",
}
LAYOUTS = {"fsdp": "FSDP", "tensor": "tensor parallel"}
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
PROGRAMS = [
    *(f"select.{x}" for x in ("topk", "threshold_reuse", "dgc", "mstopk", "bucketed", "adtopk")),
    *("dense", "ok_topk", "ok_topk_reuse", "topk_a", "agreed", "agreed_few"),
    *("sparse_adamw", "sparse_sgd", "spardl", "gtopk", "dsar_split_allgather", "powersgd"),
]


def table_first_steps() -> Rows:
    """Processor seconds and memory of the first step, by contestant and number of leaves."""
    found = read("compile_time.json")["rows"]
    at = {(row["contestant"], row["leaves"]): row for row in found}

    def cell(row: dict[str, Any]) -> str:
        return f"{median(row['cpu_seconds'], 1)} s, {median(row['peak_mib'], 1, 1 / 1024)} GiB"

    return [
        [
            name if name.startswith("dense") else f"`{name}`",
            *(cell(at[name, x]) if (name, x) in at else "" for x in LEAVES),
        ]
        for name in dict.fromkeys(row["contestant"] for row in found)
    ]


def table_step_cost() -> Rows:
    """A whole step of one worker, as a share of `lax.top_k`; of all runs that were kept."""
    rows = [row for path in DATA.glob("step_cost*.json") for row in read(path)["times"]]
    return [
        [shown, interval((row["ratio"] for row in rows if row["contestant"] == name), 2)]
        for name, shown in STEPS.items()
    ]


def table_memory() -> Rows:
    """Bytes for each parameter, of the state and while a step runs."""
    rows = read("state_memory.json")
    return [cells(row, "{option}", "{state:.2f}", "{temporary:.1f}") for row in rows]


def table_sites() -> Rows:
    """Steps of sites that shard their parameters."""
    found = {(row["layout"], row["link"], row["method"]): row for row in read("sites.json")["rows"]}
    rows = []
    for layout, shown in LAYOUTS.items():
        for link, said in LINKS.items():
            dense = found[layout, link, "dense"]
            sparse = [found[layout, link, method] for method in ("ok_topk", "sparse_adamw")]
            words = ", ".join(f"1/{dense['words'] / row['words']:.0f}" for row in sparse)
            gains = [middle(ratios(dense, row), 1) for row in sparse]
            rows.append([shown, said, median(dense["seconds"], 2), *gains, words])
    return rows


def _linear(model: str) -> Rows:
    """Epochs of linear models over links: `benchmarks.network.linear_models`."""
    found = {r["exchange"]: r for r in read("linear_url.json")["rows"] if r["model"] == model}
    base, keys, rows = found["dense"], ("epoch_seconds", "exchange_seconds"), []
    for name in (*EXCHANGES, "topk_a"):
        row = found[name]
        line = [f"`{name}`" + (" (an allgather)" if name == "topk_a" else "")]
        line += [median(row[key], 2 if statistics.median(row[key]) < 20 else 0) for key in keys]
        for gains in (ratios(base, row, key) for key in keys):
            line.append("1" if row is base else middle(gains, 1 if min(gains) >= 1 else 2))
        if model == "logistic":
            share = base["words"][0] / row["words"][0]
            less = f"1/{share:,.0f}" if share > 100 else f"1/{share:.1f}"
            line += [f"{row['words'][0]:,.0f}", less if share > 1 else f"{1 / share:.0f}"]
        worst = max(abs(x - 1) for x in ratios(row, base, "objectives"))
        differs = f"{worst:.0e}".replace("e-0", "e-") if worst else "0"
        rows.append([*line, "" if row is base else differs])
    return rows


table_linear_url_logistic = partial(_linear, "logistic")
table_linear_url_svm = partial(_linear, "svm")


def table_partitioned_norms() -> Rows:
    """A worker's step with partitioned norms, as a ratio to optax."""
    times = read("partitioned_norms.json")["times"]
    found = {(row["of"], row["contestant"]): row for row in times}
    text = "{ratio:.2f} ({ratio_quartiles[0]:.2f} to {ratio_quartiles[1]:.2f})"
    return [
        [
            *(name, "1", *(cells(found[name, f"P = {p}"], text)[0] for p in (1, 8, 64))),
            *cells(found[name, "no norms"], "{ratio:.2f}"),
        ]
        for name in ("lamb", "lars")
    ]


def table_data_cache() -> Rows:
    """Samples for a second from a slow source, as ratios to no cache."""
    rows = []
    for row in read("data_cache.json")["rows"]:
        line = [CACHES.get(row["contestant"], row["contestant"])]
        for values in (row[f"epoch {number}"] for number in (1, 2, 3, 4)):
            value, low, high = (f"{x:.{0 if values[0] >= 10 else 1}f}" for x in values)
            line.append(f"{value} ({low} to {high})")
        if row["contestant"] == "no cache":
            line[1] = "1"
        megabytes = row["added_memory"][0] / 1e6, row["disk"] / 1e6
        rows.append([*line, *(f"{x:.0f}" if x else "" for x in megabytes)])
    return rows


def table_selector_times() -> Rows:
    """The time of each selector over that of `lax.top_k`."""
    rows = {row["contestant"]: row for row in read("select_speed.json")["rows"]}
    return [
        [code(name.removeprefix("select.")), *cells(row, "{ratio:.2f}")]
        for name, row in rows.items()
        if name.startswith("select.")
    ]


def _compiled(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "gpu" / name
    return json.loads(path.read_text(encoding="utf-8"))["programs"]


def table_gpu_programs() -> Rows:
    """Launches and bytes of selections and steps."""
    found = {row["program"]: program_cells(row)[1:-1] for row in _compiled("programs.json")}
    return [[f"`{name}`", *found[name]] for name in PROGRAMS]


def table_gpu_overlaps() -> Rows:
    """Products beside each collective."""
    return [
        [f"`{row['reduction']}`", ", ".join(str(each["products"]) for each in row["beside"])]
        for row in _compiled("overlap.json")
    ]
