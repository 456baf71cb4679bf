"""Steps and epochs on one machine and over links, and programs that are compiled for a GPU."""

from typing import Any

from benchmarks._common.timing import over
from sparse_collectives import select

from ._data import (
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
LEAVES = (102, 1002)
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


def table_memory() -> Rows:
    """Bytes for each parameter, of the state and while a step runs."""
    found = by(read("state_memory.json"), "option")
    return [
        [shown, f"{round(found[name]['state'], 2):g}", f"{found[name]['temporary']:.1f}"]
        for name, shown in LABELS["memory"].items()
    ]


def table_sites() -> Rows:
    """Steps of sites that shard their parameters."""
    found, rows = by(read("sites.json")["rows"], "layout", "link", "method"), []
    for layout, shown in LABELS["sites"].items():
        for link, said in LINKS.items():
            dense = found[layout, link, "dense"]
            sparse = [found[layout, link, method] for method in ("ok_topk", "sparse_adamw")]
            gains = [middle(over(dense["seconds"], row["seconds"]), 1) for row in sparse]
            rows.append([shown, said, median(dense["seconds"], 2), *gains])
    return blank_repeats(rows)


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
        if "ok_topk" not in row["reduction"]
    ]


# What the planner takes for a launch, and for the memory: see docs/planner.md.
_LAUNCH_MS, _BYTES_PER_MS = 4e-3, 2e9


def table_gpu_timings() -> Rows:
    """Times of selections and steps on a GPU, and what the planner computes for them."""
    moved = {row["program"]: row["moved_bytes"][0] for row in _compiled("programs.json")}
    rows = []
    # One worker reduces nothing, so its dense step is left out.
    left_out = {"dense", "random_k", "adtopk_interleaved", "bucketed", "partitioned_topk_few"}
    left_out |= {"ok_topk_reuse"}
    rows_of = read("gpu_timings.json")["rows"]
    found = [row for row in rows_of if row["contestant"] not in left_out]
    for row in sorted(found, key=lambda row: row["part"]):
        part, name = row["part"], row["contestant"]
        key = f"select.{name}" if part == "selection" else name
        if part in ("selection", "step, P = 1") and (key in moved or name == "lax.top_k"):
            low, high = row["quartiles_ms"]
            shown = name if key not in moved else key
            if part == "selection" and hasattr(select.published, name):
                shown = f"select.published.{name}"
            line = [f"`{shown}`", str(row["launches"])]
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
    found = [x for x in read("gpu_kernels.json")["programs"] if x["program"] != "ok_topk_reuse"]
    for row in found:
        low, high = row["ms_range"]
        line = [f"`{row['program']}`", around(low, row["ms"], high, 2), f"{row['kernels_ms']:.2f}"]
        rows.append([*line, f"{row['launched']:,.0f}"])
    return rows
