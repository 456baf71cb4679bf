"""Claims that were measured with root, over real links, or for long: read from docs/data.

The files are written by the benchmarks that a setting names. Those in `printed` hold the cells of a
table as they were printed.
"""

import json
import re
import statistics
from typing import Any

from ._claims import Bound, Claim
from ._code import DATA

OK_TOPK, SPARCML = "Ok-Topk", "SparCML"
LINEAR = "printed/linear_models.json"
NORMS = "printed/partitioned_norms.json"
NETWORK = "printed/network.json"
URL = "linear_url.json"
SPLIT = "ssar_split_allgather"
LINKS = (
    "four processes of one machine, 1,000 rows of each in a batch, generated rows with as many "
    "features and nonzeros as the set (`benchmarks.network.linear_models`); the paper has 8 nodes"
)
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


def _url(_seed: int, _quick: bool) -> dict[str, float]:
    """The rounds of logistic regression: dense beside the paper's algorithm, and the best one."""
    rows = [row for row in read(URL)["rows"] if row["model"] == "logistic"]
    (dense,) = [row for row in rows if row["exchange"] == "dense"]

    def gain(row: dict[str, Any], key: str) -> float:
        return statistics.median(a / b for a, b in zip(dense[key], row[key], strict=True))

    (split,) = [row for row in rows if row["exchange"] == SPLIT]
    return {
        "epoch, dense / split": gain(split, "epoch_seconds"),
        "exchange, dense / split": gain(split, "exchange_seconds"),
        "epoch, dense / the fastest": max(gain(row, "epoch_seconds") for row in rows),
    }


def _webspam(_seed: int, _quick: bool) -> dict[str, float]:
    fastest = max(
        cell(LINEAR, f"| {model} | epoch, s | exchange, s | epoch ratio", f"`{name}`", 3)[0]
        for model in ("logistic", "svm")
        for name in ("ssar_recursive_double", SPLIT, "dsar_split_allgather", "topk_a")
    )
    head, row = "| logistic | epoch, s | exchange, s | epoch ratio", f"`{SPLIT}`"
    return {
        "epoch, dense / split": cell(LINEAR, head, row, 3)[0],
        "exchange, dense / split": cell(LINEAR, head, row, 4)[0],
        "epoch, dense / the fastest, SVM included": fastest,
    }


def _coordinates(_seed: int, _quick: bool) -> dict[str, float]:
    tables = [t for t in read(LINEAR)["tables"] if "words of a step | of the first" in t["head"]]
    head, row = tables[0]["head"], "`sparse_allgather`"
    return {
        "exchange, dense / sparse": cell(LINEAR, head, row, 4)[0],
        "epoch, dense / sparse": cell(LINEAR, head, row, 3)[0],
        "relative difference of the loss": cell(LINEAR, head, row, 7)[0],
    }


def _overlapped(_seed: int, _quick: bool) -> dict[str, float]:
    """The lower quartile of the best number of buckets."""
    found = {}
    for link, column in (("100 Mbit/s", 2), ("1 Gbit/s", 5)):
        every = [
            cell(NETWORK, "| | 100 Mbit/s: ms |", f"`dense(buckets={count})`", column)
            for count in (2, 4, 8)
        ]
        median, low, _ = max(every)
        found |= {f"{link}: times as fast": median, f"{link}: lower quartile": low}
    return found


def _norms(_seed: int, _quick: bool) -> dict[str, float]:
    found = {}
    for column, link in enumerate(("100 Mbit/s", "1 Gbit/s"), 1):
        median, low, _ = cell(
            NORMS, "| | 100 Mbit/s |", "whole layers dealt out (`optax_ext.partition`)", column
        )
        found |= {f"{link}: times as fast": median, f"{link}: lower quartile": low}
    return found


_FASTER = tuple(Bound(f"{link}: lower quartile", least=1) for link in ("100 Mbit/s", "1 Gbit/s"))

CLAIMS = (
    Claim(
        "sparcml/url-ethernet",
        "Over Gigabit Ethernet an epoch of logistic regression on URL is 12.65 times as fast.",
        f"{SPARCML}, section 8.2, Table 2",
        "12.65, its exchange 23.81",
        f"1 Gbit/s, {LINKS}",
        (Bound("epoch, dense / split", least=12.65), Bound("exchange, dense / split", least=23.81)),
        _url,
        exact=True,
        data=(URL,),
    ),
    Claim(
        "sparcml/webspam-ethernet",
        "On Webspam it is 20.26 times as fast.",
        f"{SPARCML}, section 8.2, Table 2",
        "20.26, its exchange 25.75",
        f"1 Gbit/s, {LINKS}",
        (Bound("epoch, dense / split", least=20.26), Bound("exchange, dense / split", least=25.75)),
        _webspam,
        exact=True,
        data=(LINEAR,),
    ),
    Claim(
        "sparcml/coordinate-descent",
        "Coordinate descent communicates 5.3 times faster by a sparse allgather, and an epoch is "
        "1.8 times as fast.",
        f"{SPARCML}, section 8.2",
        "5.3 and 1.8",
        "generated rows like those of URL, 100 coordinates of each worker in a step, four "
        "processes over 1 Gbit/s (`benchmarks.network.linear_models --method scd`); the paper has "
        "8 nodes of a fast network, on which a dense allgather takes less",
        (
            Bound("exchange, dense / sparse", least=5.3),
            Bound("epoch, dense / sparse", least=1.8),
            Bound("relative difference of the loss", most=1e-5),
        ),
        _coordinates,
        exact=True,
        data=(LINEAR,),
    ),
    Claim(
        "ok-topk/dense-overlap",
        "DenseOvlp, which exchanges buckets during the backward pass, is faster than Dense.",
        f"{OK_TOPK}, section 5.4.1, Figure 8",
        "above 1",
        "steps of AdamW with their backward pass, a transformer of 1.08M, four processes, real "
        "links: the best of `dense(buckets=2)`, 4 and 8 beside one allreduce "
        "(`benchmarks.learning.step_times --group buckets`)",
        _FASTER,
        _overlapped,
        exact=True,
        data=(NETWORK,),
    ),
    Claim(
        "mstopk/pto",
        "Sharing out the norms of LARS, their All-Gather included, halves the time that they take.",
        "MSTopK, sections 4.2 and 5.4",
        "11 to 7 ms and 30 to 14 ms",
        "whole steps of LAMB, a transformer of 1.08M in 30 leaves, four processes, real links "
        "(`benchmarks.learning.step_times --group norms`): whether a step gains anything at all",
        _FASTER,
        _norms,
        exact=True,
        data=(NORMS,),
    ),
)
