"""Steps over real links with a limited bandwidth: `benchmarks.network.run`."""

import statistics
from typing import Any

from benchmarks._common.timing import over
from benchmarks.network._report import breakdown

from ._data import DATA, LABELS, Rows, blank_repeats, by, interval, median, middle, number, read

PARTS = ("sparsification", "communication", "of_it_unlimited")
POINTS = ((4, 14_700_000, "100mbit"), (4, 14_700_000, "1gbit"), (8, 1_000_000, "1gbit"))


def _gains(point: dict[str, Any]) -> list[float]:
    """How many times as fast as dense, in each round."""
    return over(point["baseline_seconds"], point["seconds"])


def _kept(*setting: Any) -> list[dict[str, Any]]:
    """Every method of every run that was kept, of some workers, parameters and link."""
    points = [p for path in sorted(DATA.glob("network*.json")) for p in read(path)["points"]]
    return [p for p in points if (p["workers"], p["params"], p["link"]) == setting]


def table_direct_messages() -> Rows:
    """How many times as fast as a ring sums and gathers by direct messages are, by their size."""
    found = by(read("direct_messages.json")["rows"], "link", "collective", "size")
    sizes = sorted({size for _, _, size in found})
    rows = []
    for link, said in LABELS["direct_messages"].items():
        for name in dict.fromkeys(key[1] for key in found if key[0] == link):
            each = (found[link, name, size] for size in sizes)
            ratios = [middle(over(row["ring"], row["direct"]), 2) for row in each]
            rows.append([said, f"`{name}`", *ratios])
    return blank_repeats(rows)


def speedups(workers: int, params: int, link: str) -> dict[str, list[float]]:
    """How many times as fast as dense: the medians of all runs, by method."""
    found: dict[str, list[float]] = {}
    for point in _kept(workers, params, link):
        found.setdefault(point["method"], []).append(statistics.median(_gains(point)))
    return found


def table_network() -> Rows:
    """The step of the newest run with four workers, and the least and the most of all medians.

    Processor time and bytes are of the faster link and of the slower one.
    """
    columns = [speedups(*point) for point in POINTS]
    slow, fast = (
        {x["method"]: x for x in read("network_4_third.json")["points"] if x["link"] == link}
        for link in ("100mbit", "1gbit")
    )
    rows = []
    for name, shown in LABELS["network"].items():
        gains = [interval(column[name], 1) if name in column else "" for column in columns]
        row = [shown]
        for gain, of in zip(gains, (slow, fast), strict=False):
            row += [gain, median(of[name]["seconds"], scale=1e3) if name in of else ""]
        processor = median(fast[name]["cpu_seconds"], scale=1e3) if name in fast else ""
        megabytes = number(statistics.mean(slow[name]["received"]) / 1e6)
        rows.append([*row, gains[2], processor, megabytes])
    return rows


def table_network_parts() -> Rows:
    """Where the time of a step goes, at 1 Gbit/s; and without a limit."""
    found, rows = read("breakdown_4.json"), []
    at = by(found["points"], "method", "link")
    for method in (x for x in dict.fromkeys(x for x, _ in at) if x != "ok_topk/reuse"):
        point, seconds = at[method, "1gbit"], breakdown(at[method, "1gbit"], found)
        assert seconds is not None
        line = [f"`{method}`", median(point["seconds"], scale=1e3)]
        line += [f"{1e3 * seconds[part]:.0f}" for part in PARTS]
        line.append(median(_gains(at[method, "none"]), None))
        rows.append(line)
    return rows
