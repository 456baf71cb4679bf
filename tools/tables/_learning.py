"""Loss after the same steps, and after the same seconds: `benchmarks.learning`."""

import json
import statistics
from typing import Any

from ._data import DATA, blank_repeats, listed, read
from ._files import Rows

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
SHORT = ("sparse_adamw", "powersgd(4) before AdamW", "PyTorch: float16", "PyTorch: PowerSGD(4)")
# Contestants of the same steps, and the workers that they were run with.
STEPS = {
    "sparse_adamw": ("`sparse_adamw`", (4, 8, 16, 32)),
    "sparse_adamw limit=1000": ("without a limit", (4, 8)),
    "sparse_adamw density=0.01": ("`density=0.01`", (8,)),
    "sparse_adamw, ok_topk": ("`density=0.01, allreduce=ok_topk(density=0.01)`", (8,)),
    "sparse_adamw, complete ok_topk": ("the same, `complete(ok_topk(...))`", (8,)),
}
TEXT = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02}
IMAGES = {"task": "images-adamw", "steps": 600, "rate": 0.004}
# The rate at which one seed was run later; the others are the better of two for three seeds.
LATER, LARGER = 0.0015, 0.006


def _of(method: str, link: str, *, later: bool = False) -> dict[str, Any] | None:
    rows = [
        row
        for row in read("learning_links.json")["rows"]
        if (row["method"], row["link"]) == (method, link) and (row["rate"] == LATER) == later
    ]
    return rows[0] if rows else None


def table_loss_after_seconds() -> Rows:
    """The mean over the seeds at the better of the two rates."""
    found = {name: [_of(name, link) for link in LINKS] for name in (*SHORT, "dense")}
    return [
        [NAMES[name], *(f"{statistics.mean(row['losses']):.2f}" if row else "" for row in rows)]
        for name, rows in found.items()
    ]


def table_loss_over_links() -> Rows:
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


def runs(**wanted: Any) -> list[dict[str, Any]]:
    """Runs of `benchmarks.learning.steps`, by their seed."""
    lines = (DATA / "learning_steps.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    fitting = [run for run in found if all(run[key] == value for key, value in wanted.items())]
    return sorted(fitting, key=lambda run: run["seed"])


def above_dense(contestant: str, workers: int) -> list[float]:
    """How far the loss of each seed is above that of dense, in percent, at 2,000 steps of text."""
    dense = runs(contestant="dense", **TEXT)
    found = runs(contestant=contestant, workers=workers, **TEXT)
    assert [run["seed"] for run in found] == [run["seed"] for run in dense], contestant
    return [100 * (a["value"] / b["value"] - 1) for a, b in zip(found, dense, strict=True)]


def _words(run: dict[str, Any]) -> str:
    """Words of a step, as a multiple of k (P-1)/P for k = 1 % of n."""
    unit = 0.01 * run["curve"]["size"] * (run["workers"] - 1) / run["workers"]
    return f"{run['words'] / unit:.2f}"


def table_loss_after_steps() -> Rows:
    """Loss after the same steps, beside dense."""

    def loss(found: list[dict[str, Any]]) -> str:
        values = [run["value"] for run in found]
        return f"{statistics.mean(values):.3f} ({statistics.stdev(values):.3f})"

    rows = [["dense AdamW", "any", "", loss(runs(contestant="dense", **TEXT)), "", ""]]
    for contestant, (shown, counts) in STEPS.items():
        for workers in counts:
            found = runs(contestant=contestant, workers=workers, **TEXT)
            above = above_dense(contestant, workers)
            cells = [shown, str(workers), _words(found[0]), loss(found)]
            # A mean of -0.04 is 0.0.
            mean = round(statistics.mean(above), 1) + 0.0
            rows.append([*cells, f"{mean:.1f} %", listed(above, 1)])
    return blank_repeats(rows)


def table_limit() -> Rows:
    """What is beyond the limit, held back as a whole and in part: of each seed."""
    text = TEXT | {"share": 1.0}
    cases = [(f"text, 5 %, P = {p}", text, p, "sparse_adamw") for p in (4, 8, 16, 32)]
    cases.append(("text, 1 %, P = 8", text, 8, "sparse_adamw density=0.01"))
    cases.append(("images, 0.5 %, P = 4", IMAGES | {"share": 0.1}, 4, "sparse_adamw"))
    rows = []
    for shown, setting, workers, name in cases:
        dense = {key: value for key, value in setting.items() if key != "share"}
        found = [
            runs(contestant=f"{name}, hard limit", workers=workers, **setting),
            runs(contestant=name, workers=workers, **setting),
            runs(contestant="dense", **dense),
        ]
        if setting is text:
            values = [listed([run["value"] for run in each], 3) for each in found]
            rows.append([f"{shown}: loss", *values])
        else:
            values = [listed([100 * run["value"] for run in each], 2) for each in found]
            rows.append([f"{shown}: accuracy", *(f"{each} %" for each in values)])
    return rows
