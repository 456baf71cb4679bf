"""What XLA compiles for a GPU: `benchmarks.gpu`."""

import json
from typing import Any

from benchmarks.gpu.programs import cells

from ._files import ROOT, Rows

SELECTORS = ("topk", "threshold_reuse", "dgc", "mstopk", "bucketed", "adtopk")
STEPS = (
    *("dense", "ok_topk", "ok_topk_reuse", "topk_a", "agreed", "agreed_few"),
    *("sparse_adamw", "sparse_sgd", "spardl", "gtopk", "dsar_split_allgather", "powersgd"),
)


def _recorded(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "gpu" / name
    return json.loads(path.read_text(encoding="utf-8"))["programs"]


def programs() -> Rows:
    """Launches and bytes of selections and steps."""
    found = {row["program"]: cells(row)[1:-1] for row in _recorded("programs.json")}
    names = [*(f"select.{name}" for name in SELECTORS), *STEPS]
    return [[f"`{name}`", *found[name]] for name in names]


def overlaps() -> Rows:
    """Products beside each collective."""
    return [
        [f"`{row['reduction']}`", ", ".join(str(each["products"]) for each in row["beside"])]
        for row in _recorded("overlap.json")
    ]
