"""What a step costs on one machine: compile time, time, memory."""

import statistics
from typing import Any

from ._data import DATA, interval, read
from ._pages import Rows

# The columns of the table of first steps.
LEAVES = (1, 150, 300)


def first_steps() -> Rows:
    """Processor seconds and memory of the first step, by contestant and number of leaves."""
    found = read("compile_time.json")["rows"]
    names = list(dict.fromkeys(row["contestant"] for row in found))
    at = {(row["contestant"], row["leaves"]): row for row in found}

    def cell(name: str, leaves: int) -> str:
        row = at[name, leaves]
        seconds, mib = (statistics.median(row[key]) for key in ("cpu_seconds", "peak_mib"))
        return f"{seconds:.1f} s, {mib / 1024:.1f} GiB"

    return [
        [
            name if name.startswith("dense") else f"`{name}`",
            *(cell(name, leaves) if (name, leaves) in at else "" for leaves in LEAVES),
        ]
        for name in names
    ]


def steps() -> Rows:
    """A whole step of one worker, as a share of `lax.top_k`; of all runs that were kept."""
    names = {
        "jnp.nonzero(abs(acc) >= t, size=k) alone": "`jnp.nonzero(abs(acc) >= t, size=k)` alone",
        "ok_topk": "`ok_topk`, the whole step",
        "ok_topk, threshold_reuse": "`ok_topk` with `threshold_reuse`, the whole step",
        "dense (psum)": "dense, the whole step (one worker: a copy)",
    }
    runs = [read(path)["times"] for path in sorted(DATA.glob("step_cost*.json"))]

    def ratios(name: str) -> list[float]:
        return [row["ratio"] for run in runs for row in run if row["contestant"] == name]

    return [[shown, interval(ratios(name), 2)] for name, shown in names.items()]


def memory() -> Rows:
    """Bytes for each parameter, of the state and while a step runs."""
    found: list[dict[str, Any]] = read("state_memory.json")
    return [[row["option"], f"{row['state']:.2f}", f"{row['temporary']:.1f}"] for row in found]
