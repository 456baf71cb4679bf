"""Steps and epochs that take turns, as ratios of the same round."""

import statistics
from collections.abc import Callable
from typing import Any

from ._data import middle, read
from ._pages import Rows, tables

EXCHANGES = {
    "dense": "`dense`",
    "ssar_recursive_double": "`ssar_recursive_double`",
    "ssar_split_allgather": "`ssar_split_allgather`",
    "dsar_split_allgather": "`dsar_split_allgather`",
    "topk_a": "`topk_a` (an allgather)",
}
CACHES = {
    "records in a dictionary": "records in a dictionary, as the system caches files",
    "samples in a dictionary": "samples in a dictionary, without a disk level",
}
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def _ratios(row: dict[str, Any], base: dict[str, Any], key: str = "seconds") -> list[float]:
    return [a / b for a, b in zip(base[key], row[key], strict=True)]


def sites() -> Rows:
    """Steps of sites that shard their parameters."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read("sites.json")["rows"]:
        found.setdefault((row["layout"], row["link"]), {})[row["method"]] = row
    names = {"fsdp": "FSDP", "tensor": "tensor parallel"}
    rows = []
    for layout, shown in names.items():
        for link, said in LINKS.items():
            of = found[layout, link]
            dense = of["dense"]
            sparse = [of[method] for method in ("ok_topk", "sparse_adamw")]
            words = ", ".join(f"1/{dense['words'] / row['words']:.0f}" for row in sparse)
            seconds = f"{statistics.median(dense['seconds']):.2f}"
            ratios = [middle(_ratios(row, dense), 1) for row in sparse]
            rows.append([shown, said, seconds, *ratios, words])
    return rows


def linear(file: str, model: str, names: dict[str, str], *, words: bool) -> Callable[[], Rows]:
    """Epochs of linear models over links: `benchmarks.network.linear_models`."""

    def rows() -> Rows:
        found = {r["exchange"]: r for r in read(file)["rows"] if r["model"] == model}
        base = found[next(iter(names))]
        lines = []
        for name, shown in names.items():
            row = found[name]
            cells = [shown]
            for key in ("epoch_seconds", "exchange_seconds"):
                seconds = statistics.median(row[key])
                cells.append(f"{seconds:.2f}" if seconds < 20 else f"{seconds:.0f}")
            for key in ("epoch_seconds", "exchange_seconds"):
                ratios = _ratios(row, base, key)
                cells.append("1" if row is base else middle(ratios, 1 if min(ratios) >= 1 else 2))
            if words:
                share = base["words"][0] / row["words"][0]
                text = f"1/{share:,.0f}" if share > 100 else f"1/{share:.1f}"
                cells.append(f"{row['words'][0]:,.0f}")
                cells.append("1" if row is base else f"{1 / share:.0f}" if share <= 1 else text)
            pairs = zip(row["objectives"], base["objectives"], strict=True)
            worst = max(abs(a / b - 1) for a, b in pairs)
            exact = "0" if not worst else f"{worst:.0e}".replace("e-0", "e-")
            lines.append([*cells, "" if row is base else exact])
        return lines

    return rows


def norms() -> Rows:
    """A worker's step with partitioned norms, as a ratio to optax."""
    times = read("partitioned_norms.json")["times"]
    found = {(row["of"], row["contestant"]): row for row in times}

    def cell(name: str, contestant: str) -> str:
        row = found[name, contestant]
        low, high = row["ratio_quartiles"]
        return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"

    return [
        [
            name,
            "1",
            *(cell(name, f"P = {p}") for p in (1, 8, 64)),
            f"{found[name, 'no norms']['ratio']:.2f}",
        ]
        for name in ("lamb", "lars")
    ]


def cache() -> Rows:
    """Samples for a second from a slow source, as ratios to no cache."""
    rows = []
    for row in read("data_cache.json")["rows"]:
        cells = [CACHES.get(row["contestant"], row["contestant"])]
        for number in (1, 2, 3, 4):
            value, low, high = row[f"epoch {number}"]
            if number == 1 and value == low == high == 1:
                cells.append("1")
                continue
            digits = 0 if value >= 10 else 1
            cells.append(f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})")
        added, disk = row["added_memory"][0] / 1e6, row["disk"] / 1e6
        rows.append([*cells, f"{added:.0f}" if added else "", f"{disk:.0f}" if disk else ""])
    return rows


def selectors() -> Rows:
    """The table of selectors as it is, with the time of each over that of `lax.top_k`."""
    rows = read("select_speed.json")["rows"]
    times = {row["contestant"].removeprefix("select."): row["ratio"] for row in rows}
    page = next(
        t for t in tables("docs/selectors.md") if t.head.startswith("| selector | selected")
    )
    return [[*row[:3], f"{times[row[0].strip('`')]:.2f}", *row[4:]] for row in page.rows]
