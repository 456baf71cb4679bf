"""Loss after the same steps, and after the same seconds: `benchmarks.learning`."""

from typing import Any

from ._data import blank_repeats, listed, mean, read
from ._pages import Rows

LINKS = ("100mbit", "1gbit")
NAMES = {
    "dense": "dense",
    "dense, float16": "dense, float16",
    "sparse_adamw": "`sparse_adamw`",
    "powersgd(1) before AdamW": "`powersgd(1)` before AdamW",
    "powersgd(4) before AdamW": "`powersgd(4)` before AdamW",
    "PyTorch: float16": "PyTorch: float16",
    "PyTorch: PowerSGD(1)": "PyTorch: PowerSGD(1)",
    "PyTorch: PowerSGD(4)": "PyTorch: PowerSGD(4)",
}
# The rate at which one seed was run later; the others are the better of two for three seeds.
LATER, LARGER = 0.0015, 0.006


def _of(method: str, link: str, *, later: bool = False) -> dict[str, Any] | None:
    rows = [
        row
        for row in read("learning_links.json")["rows"]
        if (row["method"], row["link"]) == (method, link) and (row["rate"] == LATER) == later
    ]
    return rows[0] if rows else None


def over_links_short() -> Rows:
    """The mean over the seeds at the better of the two rates."""
    shown = ["sparse_adamw", "powersgd(4) before AdamW", "PyTorch: float16"]
    shown += ["PyTorch: PowerSGD(4)", "dense"]
    found = [[_of(name, link) for link in LINKS] for name in shown]
    return [
        [NAMES[name], *(mean(row["losses"], 2) if row else "" for row in rows)]
        for name, rows in zip(shown, found, strict=True)
    ]


def over_links() -> Rows:
    """Every seed, and the steps that were taken."""
    rows = []
    for method, shown in NAMES.items():
        bold = "**" if method == "sparse_adamw" else ""
        cells = [f"{bold}{shown}{bold}"]
        for link in LINKS:
            row = _of(method, link)
            assert row is not None
            star = " *" if row["rate"] == LARGER else ""
            cells += [f"{bold}{listed(row['losses'], 3)}{bold}{star}", str(row["steps"])]
        later = [_of(method, link, later=True) for link in LINKS]
        each = [f"{row['losses'][0]:.3f}" if row else "-" for row in later]
        rows.append([*cells, "; ".join(each) if any(later) else ""])
    return rows


def steps() -> Rows:
    """Loss after the same steps, beside dense."""
    rows = []
    for row in read("learning_steps.json")["rows"]:
        method = row["method"].replace("sparse_adamw", "`sparse_adamw`")
        loss = f"{row['loss']:.3f} ({row['deviation']:.3f})"
        if "workers" not in row:
            rows.append([method, "any", "", loss, "", ""])
            continue
        above = row["above_dense"]
        cells = [method, str(row["workers"]), f"{row['words']:.2f}", loss]
        # Of rounded numbers the mean is off by up to 0.05, so it is kept beside them.
        rows.append([*cells, f"{row['mean']:.1f} %", listed(above, 1)])
    return blank_repeats(rows)
