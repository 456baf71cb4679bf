"""What a step costs on one machine: compile time, time, memory."""

from ._data import DATA, interval, median, read
from ._files import Rows

# The columns of the table of first steps.
LEAVES = (1, 150, 300)
STEPS = {
    "jnp.nonzero(abs(acc) >= t, size=k) alone": "`jnp.nonzero(abs(acc) >= t, size=k)` alone",
    "ok_topk": "`ok_topk`, the whole step",
    "ok_topk, threshold_reuse": "`ok_topk` with `threshold_reuse`, the whole step",
    "dense (psum)": "dense, the whole step (one worker: a copy)",
}


def first_steps() -> Rows:
    """Processor seconds and memory of the first step, by contestant and number of leaves."""
    found = read("compile_time.json")["rows"]
    at = {(row["contestant"], row["leaves"]): row for row in found}

    def cell(name: str, leaves: int) -> str:
        if (name, leaves) not in at:
            return ""
        row = at[name, leaves]
        return f"{median(row['cpu_seconds'], 1)} s, {median(row['peak_mib'], 1, 1 / 1024)} GiB"

    return [
        [name if name.startswith("dense") else f"`{name}`", *(cell(name, x) for x in LEAVES)]
        for name in dict.fromkeys(row["contestant"] for row in found)
    ]


def steps() -> Rows:
    """A whole step of one worker, as a share of `lax.top_k`; of all runs that were kept."""
    rows = [row for path in sorted(DATA.glob("step_cost*.json")) for row in read(path)["times"]]

    def ratios(name: str) -> list[float]:
        return [row["ratio"] for row in rows if row["contestant"] == name]

    return [[shown, interval(ratios(name), 2)] for name, shown in STEPS.items()]


def memory() -> Rows:
    """Bytes for each parameter, of the state and while a step runs."""
    rows = read("state_memory.json")
    return [[row["option"], f"{row['state']:.2f}", f"{row['temporary']:.1f}"] for row in rows]
