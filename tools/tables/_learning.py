"""Loss after the same steps, and after the same seconds: `benchmarks.learning`."""

import json
import statistics
from typing import Any

from ._data import DATA, blank_repeats, listed, mean, read
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
# Contestants of the same steps, and the workers that they were run with.
STEPS = {
    "sparse_adamw": ("`sparse_adamw`", (4, 8, 16, 32)),
    "sparse_adamw limit=1000": ("without a limit", (4, 8)),
    "sparse_adamw density=0.01": ("`density=0.01`", (8,)),
    "sparse_adamw, ok_topk": ("`density=0.01, exchange=ok_topk(density=0.01)`", (8,)),
    "sparse_adamw, complete ok_topk": ("the same, `complete(ok_topk(...))`", (8,)),
}
LIMITED = (4, 8, 16, 32)
RATES = {"text": 0.02, "images-adamw": 0.004}
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


def runs(**wanted: Any) -> list[dict[str, Any]]:
    """Runs of `benchmarks.learning.steps`, by their seed."""
    lines = (DATA / "learning_steps.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    fitting = [run for run in found if all(run[key] == value for key, value in wanted.items())]
    return sorted(fitting, key=lambda run: run["seed"])


def above_dense(contestant: str, workers: int) -> list[float]:
    """How far the loss of each seed is above that of dense, in percent, at 2,000 steps of text."""
    same = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02}
    dense = runs(contestant="dense", **same)
    found = runs(contestant=contestant, workers=workers, **same)
    assert [run["seed"] for run in found] == [run["seed"] for run in dense], contestant
    return [100 * (a["value"] / b["value"] - 1) for a, b in zip(found, dense, strict=True)]


def steps() -> Rows:
    """Loss after the same steps, beside dense."""
    same = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02}

    def loss(found: list[dict[str, Any]]) -> str:
        values = [run["value"] for run in found]
        return f"{statistics.mean(values):.3f} ({statistics.stdev(values):.3f})"

    rows = [["dense AdamW", "any", "", loss(runs(contestant="dense", **same)), "", ""]]
    for contestant, (shown, counts) in STEPS.items():
        for workers in counts:
            found = runs(contestant=contestant, workers=workers, **same)
            above = above_dense(contestant, workers)
            rows.append(
                [
                    shown,
                    str(workers),
                    words(found[0]),
                    loss(found),
                    f"{round(statistics.mean(above), 1) + 0.0:.1f} %",
                    listed(above, 1),
                ]
            )
    return blank_repeats(rows)


def words(run: dict[str, Any]) -> str:
    """Words of a step, as a multiple of k (P-1)/P for k = 1 % of n."""
    unit = 0.01 * run["curve"]["size"] * (run["workers"] - 1) / run["workers"]
    return f"{run['words'] / unit:.2f}"


def limits() -> Rows:
    """What is beyond the limit, held back as a whole and in part: of each seed."""
    cases = [(f"text, 5 %, P = {p}: loss", "text", 2000, p, "sparse_adamw", 1.0) for p in LIMITED]
    cases += [
        ("text, 1 %, P = 8: loss", "text", 2000, 8, "sparse_adamw density=0.01", 1.0),
        ("images, 0.5 %, P = 4: accuracy", "images-adamw", 600, 4, "sparse_adamw", 0.1),
    ]
    rows = []
    for shown, task, count, workers, name, share in cases:
        cells = [shown]
        for contestant in (f"{name}, hard limit", name, "dense"):
            found = runs(task=task, steps=count, contestant=contestant, rate=RATES[task])
            values = [
                run["value"]
                for run in found
                if contestant == "dense" or (run["workers"], run["share"]) == (workers, share)
            ]
            if task == "text":
                cells.append(listed(values, 3))
            else:
                cells.append(f"{listed([100 * value for value in values], 2)} %")
        rows.append(cells)
    return rows
