"""Steps over real links with a limited bandwidth: `benchmarks.network.run`."""

import statistics
from functools import partial
from typing import Any

from benchmarks._common.timing import over
from benchmarks.network._report import breakdown

from ._data import DATA, LABELS, Rows, blank_repeats, by, interval, median, middle, number, read

PARTS = ("rest", "sparsification", "communication", "of_it_unlimited")
POINTS = ((4, 14_700_000, "100mbit"), (4, 14_700_000, "1gbit"), (8, 1_000_000, "1gbit"))


def _gains(point: dict[str, Any]) -> list[float]:
    """How many times as fast as dense, in each round."""
    return over(point["baseline_seconds"], point["seconds"])


def _kept(*setting: Any) -> list[dict[str, Any]]:
    """Every method of every run that was kept, of some workers, parameters and link."""
    points = [p for path in sorted(DATA.glob("network*.json")) for p in read(path)["points"]]
    return [p for p in points if (p["workers"], p["params"], p["link"]) == setting]


def _of_run(file: str, link: str) -> Rows:
    """One run and one link: step, speed-up, processor time and bytes of each method."""
    return [
        [
            f"`{point['method']}`",
            middle([1e3 * x for x in point["seconds"]], 0),
            middle(_gains(point)),
            median(point["cpu_seconds"], scale=1e3),
            number(statistics.mean(point["received"]) / 1e6),
        ]
        for point in read(file)["points"]
        if point["link"] == link
    ]


table_network_4_100mbit = partial(_of_run, "network_4_third.json", "100mbit")
table_network_4_1gbit = partial(_of_run, "network_4_third.json", "1gbit")
table_network_8 = partial(_of_run, "network_8.json", "1gbit")


def table_direct_messages() -> Rows:
    """Sums and gathers over links: medians of a ring and of direct messages, and the ratio."""
    found = by(read("direct_messages.json")["rows"], "link", "collective", "size")
    rows = []
    for link, said in LABELS["direct_messages"].items():
        for name, size in (key[1:] for key in found if key[0] == link):
            row = found[link, name, size]
            both = (median(row[way], None, 1e3) for way in ("ring", "direct"))
            ratio = middle(over(row["ring"], row["direct"]), 2)
            rows.append([said, f"`{name}`", f"{size:,}", *both, ratio])
    return blank_repeats(rows, 2)


def speedups(workers: int, params: int, link: str) -> dict[str, list[float]]:
    """How many times as fast as dense: the medians of all runs, by method."""
    found: dict[str, list[float]] = {}
    for point in _kept(workers, params, link):
        found.setdefault(point["method"], []).append(statistics.median(_gains(point)))
    return found


def table_speedups() -> Rows:
    """The least and the most of the medians of all runs."""
    columns = [speedups(*point) for point in POINTS]
    return [
        [shown, *(interval(column[name], 1) if name in column else "" for column in columns)]
        for name, shown in LABELS["speedups"].items()
    ]


def table_network_4_runs() -> Rows:
    """How many times as fast as dense in each run of four workers at 1 Gbit/s."""
    found = speedups(*POINTS[1])
    most = max(map(len, found.values()))
    whole = {name: values for name, values in found.items() if len(values) == most}
    return [[f"`{name}`", *(interval([x]) for x in values)] for name, values in whole.items()]


def table_network_parts() -> Rows:
    """Where the time of a step goes, at 1 Gbit/s; and without a limit."""
    found, rows = read("breakdown_4.json"), []
    at = by(found["points"], "method", "link")
    for method in dict.fromkeys(method for method, _ in at):
        point, seconds = at[method, "1gbit"], breakdown(at[method, "1gbit"], found)
        assert seconds is not None
        line = [f"`{method}`", median(point["seconds"], scale=1e3), middle(_gains(point))]
        line += [f"{1e3 * seconds[part]:.0f}" for part in PARTS]
        line += [median(_gains(at[method, "none"]), None), median(point["cpu_seconds"], scale=1e3)]
        rows.append(line)
    return rows
