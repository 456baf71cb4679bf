"""Steps and epochs that take turns, as ratios of the same round."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ._data import middle, read
from ._pages import Rows, tables

LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def _ratios(row: dict[str, Any], base: dict[str, Any], key: str = "seconds") -> list[float]:
    return [a / b for a, b in zip(base[key], row[key], strict=True)]


def _times(values: Sequence[float]) -> str:
    """The least, the middle and the most of some ratios."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


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
    found = {row["contestant"]: row for row in read("partitioned_norms.json")["times"]}

    def cell(name: str) -> str:
        row = found[name]
        low, high = row["ratio_quartiles"]
        return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"

    return [
        [
            name,
            "1",
            *(cell(f"{name}, P = {p}") for p in (1, 8, 64)),
            f"{found[f'{name}, no norms']['ratio']:.2f}",
        ]
        for name in ("lamb", "lars")
    ]


def cache() -> Rows:
    """Samples for a second from a slow source, as ratios to no cache."""
    rows = []
    for row in read("data_cache.json")["rows"]:
        cells = [row["contestant"]]
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


def over_links(group: str, names: dict[str, str], *, ms: bool) -> Callable[[], Rows]:
    """Steps of a model over links: `benchmarks.learning.step_times`."""

    def rows() -> Rows:
        found = read(f"step_times_{group}.json")
        lines = []
        for name, shown in names.items():
            cells = [shown]
            for link in ("100mbit", "1gbit"):
                case = next(times for title, times in found.items() if title.endswith(link))
                first = case[next(iter(case))]
                ratios = [a / b for a, b in zip(first, case[name], strict=True)]
                if ms:
                    cells.append(f"{1000 * statistics.median(case[name]):.0f}")
                cells.append("1" if case[name] is first else _times(ratios))
            lines.append(cells)
        return lines

    return rows


def selectors() -> Rows:
    """The table of selectors as it is, with the time of each over that of `lax.top_k`."""
    rows = read("select_speed.json")["rows"]
    times = {row["contestant"].removeprefix("select."): row["ratio"] for row in rows}
    page = next(
        t for t in tables("docs/selectors.md") if t.head.startswith("| selector | selected")
    )
    return [[*row[:3], f"{times[row[0].strip('`')]:.2f}", *row[4:]] for row in page.rows]
