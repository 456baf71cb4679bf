"""Steps and epochs on one machine and over links, and programs that are compiled for a GPU."""

import statistics
from functools import partial
from typing import Any

from benchmarks._common.timing import over

from ._data import (
    DATA,
    LABELS,
    ROOT,
    Rows,
    around,
    blank_repeats,
    by,
    cells,
    code,
    interval,
    median,
    middle,
    read,
)

# The columns of the table of first steps.
LEAVES = (1, 102, 300, 1002)
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def table_first_steps() -> Rows:
    """Processor seconds and memory of the first step, by contestant and number of leaves."""
    at = by(read("compile_time.json")["rows"], "contestant", "leaves")

    def both(row: dict[str, Any] | None) -> tuple[str, str]:
        if row is None:
            return "", ""
        return median(row["cpu_seconds"], 1), median(row["peak_mib"], 1, 1 / 1024)

    names = {name: name if name.startswith("dense") else f"`{name}`" for name, _ in at}
    return [
        [said, *(cell for x in LEAVES for cell in both(at.get((name, x))))]
        for name, said in names.items()
    ]


def table_step_cost() -> Rows:
    """A whole step of one worker, as a share of `lax.top_k`; of all runs that were kept."""
    rows = [row for path in DATA.glob("step_cost*.json") for row in read(path)["times"]]
    return [
        [shown, interval((row["ratio"] for row in rows if row["contestant"] == name), 2)]
        for name, shown in LABELS["step_cost"].items()
    ]


def table_memory() -> Rows:
    """Bytes for each parameter, of the state and while a step runs."""
    rows = read("state_memory.json")
    return [
        [
            LABELS["memory"].get(row["option"], code(row["option"])),
            f"{round(row['state'], 2):g}",
            f"{row['temporary']:.1f}",
        ]
        for row in rows
    ]


def table_sites() -> Rows:
    """Steps of sites that shard their parameters."""
    found, rows = by(read("sites.json")["rows"], "layout", "link", "method"), []
    for layout, shown in LABELS["sites"].items():
        for link, said in LINKS.items():
            dense = found[layout, link, "dense"]
            sparse = [found[layout, link, method] for method in ("ok_topk", "sparse_adamw")]
            words = [f"1/{dense['words'] / row['words']:.0f}" for row in sparse]
            gains = [middle(over(dense["seconds"], row["seconds"]), 1) for row in sparse]
            rows.append([shown, said, median(dense["seconds"], 2), *gains, *words])
    return blank_repeats(rows)


def _linear(model: str) -> Rows:
    """Epochs of linear models over links: `benchmarks.network.linear_models`."""
    found, rows = by(read("linear_url.json")["rows"], "model", "exchange"), []
    base, keys = found[model, "dense"], ("epoch_seconds", "exchange_seconds")
    for name, shown in LABELS["linear_url"].items():
        row, line = found[model, name], [shown]
        line += [median(row[key], 2 if statistics.median(row[key]) < 20 else 0) for key in keys]
        for gains in (over(base[key], row[key]) for key in keys):
            line.append("1" if row is base else middle(gains, 1 if min(gains) >= 1 else 2))
        if model == "logistic":
            share = base["words"][0] / row["words"][0]
            less = f"1/{share:,.0f}" if share > 100 else f"1/{share:.1f}"
            line += [f"{row['words'][0]:,.0f}", less if share > 1 else f"{1 / share:.0f}"]
        worst = max(abs(x - 1) for x in over(base["objectives"], row["objectives"]))
        differs = f"{worst:.0e}".replace("e-0", "e-") if worst else "0"
        rows.append([*line, "" if row is base else differs])
    return rows


table_linear_url_logistic = partial(_linear, "logistic")
table_linear_url_svm = partial(_linear, "svm")


def table_partitioned_norms() -> Rows:
    """A worker's step with partitioned norms, as a ratio to optax."""
    found, rows = by(read("partitioned_norms.json")["times"], "of", "contestant"), []
    for name in ("lamb", "lars"):
        line = [f"`{name}`", "1"]
        for row in (found[name, f"P = {p}"] for p in (1, 8, 64)):
            low, high = row["ratio_quartiles"]
            line.append(around(low, row["ratio"], high, 2))
        rows.append([*line, *cells(found[name, "no norms"], "{ratio:.2f}")])
    return rows


def table_data_cache() -> Rows:
    """Samples for a second from a slow source, as ratios to no cache."""
    rows = []
    for row in read("data_cache.json")["rows"]:
        line = [LABELS["data_cache"].get(row["contestant"], row["contestant"])]
        for values in (row[f"epoch {number}"] for number in (1, 2, 3, 4)):
            value, low, high = values
            line.append(around(low, value, high, 0 if value >= 10 else 1))
        if row["contestant"] == "no cache":
            line[1] = "1"
        megabytes = row["added_memory"][0] / 1e6, row["disk"] / 1e6
        rows.append([*line, *(f"{x:.0f}" if x else "" for x in megabytes)])
    return rows


def table_selector_times() -> Rows:
    """The time of each selector over the time of `lax.top_k`."""
    rows = [row for row in read("select_speed.json")["rows"] if "select." in row["contestant"]]
    names = [code(row["contestant"].removeprefix("select.")) for row in rows]
    return [[name, *cells(row, "{ratio:.2f}")] for name, row in zip(names, rows, strict=True)]


def _compiled(name: str) -> list[dict[str, Any]]:
    return read(ROOT / "benchmarks" / "gpu" / name)["programs"]


def table_gpu_programs() -> Rows:
    """Launches and bytes of selections and steps."""
    found, rows = by(_compiled("programs.json"), "program"), []
    for row in (found[name] for name in LABELS["gpu_programs"]["shown"]):
        line = [f"`{row['program']}`", interval(row["launches"], 0)]
        line.append(interval([x / 1e9 for x in row["moved_bytes"]], 2))
        line += [f"{row['temporary_bytes'] / 1e6:,.0f}", str(row["waits"])]
        rows.append(
            [*line, "{} of {}".format(*row["collectives"]) if row["collectives"][1] else ""]
        )
    return rows


def table_gpu_overlaps() -> Rows:
    """Products during each collective."""
    return [
        [f"`{row['reduction']}`", ", ".join(str(each["products"]) for each in row["beside"])]
        for row in _compiled("overlap.json")
    ]


# What the planner takes for a launch, and for the memory: see docs/planner.md.
_LAUNCH_MS, _BYTES_PER_MS = 4e-3, 2e9


def table_gpu_timings() -> Rows:
    """Times of selections and steps on a GPU, and what the planner computes for them."""
    moved = {row["program"]: row["moved_bytes"][0] for row in _compiled("programs.json")}
    rows = []
    # One worker reduces nothing, so its dense step is left out.
    left_out = {"dense", "random_k", "adtopk_interleaved", "bucketed", "partitioned_topk_few"}
    rows_of = read("gpu_timings.json")["rows"]
    found = [row for row in rows_of if row["contestant"] not in left_out]
    for row in sorted(found, key=lambda row: row["part"]):
        part, name = row["part"], row["contestant"]
        key = f"select.{name}" if part == "selection" else name
        if part in ("selection", "step, P = 1") and (key in moved or name == "lax.top_k"):
            low, high = row["quartiles_ms"]
            line = [f"`{name if key not in moved else key}`", str(row["launches"])]
            line.append(around(low, row["median_ms"], high, 2))
            computed = ""
            if key in moved:
                ms = row["launches"] * _LAUNCH_MS + moved[key] / _BYTES_PER_MS
                computed = f"{ms:.2f}"
            rows.append([*line, computed])
    return rows


def table_gpu_train_step() -> Rows:
    """A training step of a GPT on a GPU."""
    rows = read("gpu_train_step.json")["rows"]
    alone = rows[0]["median_ms"]
    return [
        [
            LABELS["gpu_train_step"][row["contestant"]],
            f"{row['median_ms']:.1f}",
            around(row["ratio_quartiles"][0], row["ratio"], row["ratio_quartiles"][1], 2),
            f"{row['median_ms'] - alone:.1f}" if row is not rows[0] else "",
            f"{row['state_bytes_per_parameter']:.0f}",
        ]
        for row in rows
    ]


def table_gpu_kernels() -> Rows:
    """Programs profiled by kernel on a GPU."""
    rows = []
    for row in read("gpu_kernels.json")["programs"]:
        low, high = row["ms_range"]
        line = [f"`{row['program']}`", around(low, row["ms"], high, 2), f"{row['kernels_ms']:.2f}"]
        rows.append([*line, f"{row['launched']:,.0f}"])
    return rows
