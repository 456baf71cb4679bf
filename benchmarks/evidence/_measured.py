"""Claims whose measurements need root, real links or hours: they are read from docs/data.

The benchmarks that a setting names write these files. The files in `printed` hold the cells of a
table as they were printed.
"""

import json
import re
import statistics
from typing import Any

from ._code import DATA


def read(name: str) -> Any:
    """The content of a file in docs/data."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def cell(name: str, head: str, row: str, column: int) -> list[float]:
    """The numbers of a cell: a median, and the slowest and the fastest round if they are known.

    Args:
      name: of a file in docs/data/printed.
      head: a text in the head of this table, and of no other in the file.
      row: the first cell of the line.
      column: from 0.
    """
    (table,) = [table for table in read(name)["tables"] if head in table["head"]]
    (cells,) = [cells for cells in table["rows"] if cells[0] == row]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", cells[column].replace(",", ""))
    return [float(number) for number in numbers]


def _cells(name: str, head: str, row: str, columns: dict[str, int]) -> dict[str, float]:
    """The medians of some cells of a line."""
    return {number: cell(name, head, row, column)[0] for number, column in columns.items()}


def _over_links(name: str, head: str, rows: list[str], columns: list[int]) -> dict[str, float]:
    """For each link the median and the slowest round of the best of some rows."""
    found = {}
    for link, column in zip(("100 Mbit/s", "1 Gbit/s"), columns, strict=True):
        median, low, _ = max(cell(name, head, row, column) for row in rows)
        found |= {f"{link}: times as fast": median, f"{link}: slowest round": low}
    return found


def _url() -> dict[str, float]:
    """Logistic regression: dense compared with the paper's algorithm and with the fastest."""
    rows = [row for row in read("linear_url.json")["rows"] if row["model"] == "logistic"]
    at = {row["exchange"]: row for row in rows}
    dense, split = at["dense"], at["ssar_split_allgather"]

    def gain(row: dict[str, Any], key: str) -> float:
        return statistics.median(a / b for a, b in zip(dense[key], row[key], strict=True))

    return {
        "epoch, dense / split": gain(split, "epoch_seconds"),
        "exchange, dense / split": gain(split, "exchange_seconds"),
        "epoch, dense / the fastest": max(gain(row, "epoch_seconds") for row in rows),
    }


def _on_a_gpu(contestant: str) -> dict[str, float]:
    """The time of a selection on a GPU, over the time of an exact top-k there."""
    rows = {row["contestant"]: row for row in read("gpu_timings.json")["rows"]}
    times = [rows[name]["median_ms"] for name in (contestant, "lax.top_k")]
    return {"time / lax.top_k": times[0] / times[1]}
