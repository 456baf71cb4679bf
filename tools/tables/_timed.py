"""Steps and epochs that take turns, as ratios of the same round."""

import statistics
from typing import Any

from ._data import median, middle, read
from ._files import Rows

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
    found = {(row["layout"], row["link"], row["method"]): row for row in read("sites.json")["rows"]}
    rows = []
    for layout, shown in {"fsdp": "FSDP", "tensor": "tensor parallel"}.items():
        for link, said in LINKS.items():
            dense = found[layout, link, "dense"]
            sparse = [found[layout, link, method] for method in ("ok_topk", "sparse_adamw")]
            words = ", ".join(f"1/{dense['words'] / row['words']:.0f}" for row in sparse)
            ratios = [middle(_ratios(row, dense), 1) for row in sparse]
            rows.append([shown, said, median(dense["seconds"], 2), *ratios, words])
    return rows


def linear(model: str) -> Rows:
    """Epochs of linear models over links: `benchmarks.network.linear_models`."""
    found = {r["exchange"]: r for r in read("linear_url.json")["rows"] if r["model"] == model}
    base = found["dense"]
    rows = []
    for name, shown in EXCHANGES.items():
        row, cells = found[name], [shown]
        for key in ("epoch_seconds", "exchange_seconds"):
            cells.append(median(row[key], 2 if statistics.median(row[key]) < 20 else 0))
        for key in ("epoch_seconds", "exchange_seconds"):
            ratios = _ratios(row, base, key)
            cells.append("1" if row is base else middle(ratios, 1 if min(ratios) >= 1 else 2))
        if model == "logistic":
            share = base["words"][0] / row["words"][0]
            less = f"1/{share:,.0f}" if share > 100 else f"1/{share:.1f}"
            more = f"{1 / share:.0f}"
            cells += [f"{row['words'][0]:,.0f}", less if share > 1 else more]
        pairs = zip(row["objectives"], base["objectives"], strict=True)
        worst = max(abs(a / b - 1) for a, b in pairs)
        differs = f"{worst:.0e}".replace("e-0", "e-") if worst else "0"
        rows.append([*cells, "" if row is base else differs])
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
            value, low, high = (
                f"{x:.{0 if row[f'epoch {number}'][0] >= 10 else 1}f}"
                for x in row[f"epoch {number}"]
            )
            base = number == 1 and row["contestant"] == "no cache"
            cells.append("1" if base else f"{value} ({low} to {high})")
        added, disk = row["added_memory"][0] / 1e6, row["disk"] / 1e6
        rows.append([*cells, f"{added:.0f}" if added else "", f"{disk:.0f}" if disk else ""])
    return rows


def selectors() -> Rows:
    """The time of each selector over that of `lax.top_k`."""
    rows = read("select_speed.json")["rows"]
    times = {row["contestant"]: row["ratio"] for row in rows}
    return [
        [f"`{name.removeprefix('select.')}`", f"{ratio:.2f}"]
        for name, ratio in times.items()
        if name.startswith("select.")
    ]
