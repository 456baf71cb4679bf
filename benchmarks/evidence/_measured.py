"""Claims that were measured with root, over real links, or for long: read from docs/data.

The files are written by the benchmarks that a setting names. Those in `printed` hold the cells of a
table as they were printed.
"""

import json
import re
import statistics
from typing import Any

from ._code import DATA

LINEAR = "printed/linear_models.json"
URL = "linear_url.json"
SPLIT = "ssar_split_allgather"
_NUMBER = r"-?\d+(?:\.\d+)?"


def read(name: str) -> Any:
    """What a file in docs/data holds."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def cell(name: str, head: str, row: str, column: int) -> list[float]:
    """The numbers of a cell: a median, and where they are known the quartiles.

    Args:
      name: of a file in docs/data/printed.
      head: what the first line of the table begins with.
      row: the first cell of the line.
      column: from 0.
    """
    tables = [table for table in read(name)["tables"] if table["head"].startswith(head)]
    (cells,) = [cells for cells in tables[0]["rows"] if cells[0] == row]
    return [float(number) for number in re.findall(_NUMBER, cells[column].replace(",", ""))]


def _url() -> dict[str, float]:
    """The rounds of logistic regression: dense beside the paper's algorithm, and the best one."""
    rows = [row for row in read(URL)["rows"] if row["model"] == "logistic"]
    (dense,), (split,) = (
        [row for row in rows if row["exchange"] == name] for name in ("dense", SPLIT)
    )

    def gain(row: dict[str, Any], key: str) -> float:
        return statistics.median(a / b for a, b in zip(dense[key], row[key], strict=True))

    return {
        "epoch, dense / split": gain(split, "epoch_seconds"),
        "exchange, dense / split": gain(split, "exchange_seconds"),
        "epoch, dense / the fastest": max(gain(row, "epoch_seconds") for row in rows),
    }


def _webspam() -> dict[str, float]:
    head = "| {} | epoch, s | exchange, s | epoch ratio"
    fastest = max(
        cell(LINEAR, head.format(model), f"`{name}`", 3)[0]
        for model in ("logistic", "svm")
        for name in ("ssar_recursive_double", SPLIT, "dsar_split_allgather", "topk_a")
    )
    epoch, exchange = (
        cell(LINEAR, head.format("logistic"), f"`{SPLIT}`", column)[0] for column in (3, 4)
    )
    return {
        "epoch, dense / split": epoch,
        "exchange, dense / split": exchange,
        "epoch, dense / the fastest, SVM included": fastest,
    }


def _coordinates() -> dict[str, float]:
    heads = (table["head"] for table in read(LINEAR)["tables"])
    head = next(head for head in heads if "words of a step | of the first" in head)
    epoch, exchange, loss = (
        cell(LINEAR, head, "`sparse_allgather`", column)[0] for column in (3, 4, 7)
    )
    return {
        "exchange, dense / sparse": exchange,
        "epoch, dense / sparse": epoch,
        "relative difference of the loss": loss,
    }


def _over_links(name: str, head: str, rows: list[str], columns: list[int]):
    """By link the median and the lower quartile of the best of some rows."""
    found = {}
    for link, column in zip(("100 Mbit/s", "1 Gbit/s"), columns, strict=True):
        median, low, _ = max(cell(name, head, row, column) for row in rows)
        found |= {f"{link}: times as fast": median, f"{link}: lower quartile": low}
    return found
