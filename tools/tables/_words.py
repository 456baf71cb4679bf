"""Words of a step, read from the traced programs: `benchmarks.network.traffic`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ._data import EVIDENCE, blank_repeats, read
from ._pages import Rows

WORKERS = (2, 3, 6, 16, 48, 100, 384, 1024)
ALGORITHMS = {
    "`dense`": "dense",
    "`agreed(density=)`": "agreed",
    '`agreed(density=, bits="few")`': "agreed, few bits",
    "`topk_a`, `sparse_allgather`": "topk_a",
    "`ssar_recursive_double`": "ssar_recursive_double",
    "`ssar_split_allgather`": "ssar_split_allgather",
    "`dsar_split_allgather`": "dsar_split_allgather",
    "`ring_sparse`": "ring_sparse",
    "`gtopk`": "gtopk",
    "`spardl`": "spardl",
    "`ok_topk`": "ok_topk",
    "`complete(ok_topk)`": "complete(ok_topk)",
}
SHORT_WORKERS = (2, 6, 16, 48, 384)
SHORT = {
    "`dense`": "dense",
    "`topk_a`, the allgather of all selections": "topk_a",
    "`ok_topk`, best and worst step": "ok_topk",
    "`agreed`": "agreed",
    "`agreed`, few bits": "agreed, few bits",
}


def multiples(names: dict[str, str], workers: Sequence[int]) -> Callable[[], Rows]:
    """Words as multiples of k; the best and the worst step where they differ."""

    def rows() -> Rows:
        found = read("traffic.json")["algorithms"]
        at = {(row["algorithm"], row["workers"]): row for row in found}

        def cell(name: str, p: int) -> str:
            row = at.get((name, p))
            if row is None:
                return ""
            best, worst = (_short(row[case] / row["k"]) for case in ("best", "worst"))
            return best if best == worst else f"{best}, {worst}"

        return [[shown, *(cell(name, p) for p in workers)] for shown, name in names.items()]

    return rows


def _short(multiple: float) -> str:
    """One digit after the point, and none of large numbers."""
    if multiple >= 25:
        return f"{multiple:,.0f}"
    return f"{multiple:.1f}"


def shares_of_the_bound() -> Rows:
    """Shares of the paper's bound 6k (P-1)/P, of the evidence's curves."""
    path = EVIDENCE / "figures" / "curves.json"
    series: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["series"]
    lines = {
        "Ok-Topk, entries evenly spread": "Ok-Topk, even step",
        "Ok-Topk, worst case": "Ok-Topk, worst step",
        "TopkA, an allgather of all selections": "TopkA",
        "dense allreduce": "dense",
    }
    found = {
        one["line"]: dict(zip(one["x"], one["y"], strict=True))
        for one in series
        if one["figure"] == "words"
    }

    def cell(line: str, p: int) -> str:
        share = found[line][p] / (6 * (p - 1) / p)
        return f"{share:.3g}" if share >= 10 else f"{share:.2f}"

    counts = (2, 4, 8, 16, 64, 256)
    return [[shown, *(cell(line, p) for p in counts)] for shown, line in lines.items()]


def by_codec() -> Rows:
    """Ok-Topk at n = 1e8, by encoding: even counts, a surplus dealt out, the worst."""
    codecs = {
        "`raw()`": "raw",
        "`bf16()`": "bf16",
        "`narrow16()`": "narrow16",
        "`narrow8()`": "narrow8",
        "`qsgd(bits=8)`": "qsgd8",
        "`qsgd(bits=4)`": "qsgd4",
    }
    found = {(row["codec"], row["case"]): row["of_k"] for row in read("traffic.json")["flatness"]}

    def cell(codec: str, i: int) -> str:
        even, spread, worst = (found[codec, case][i] for case in ("even", "spread", "worst"))
        return f"{even:.2f} ({spread:.2f}, {worst:.2f})"

    # Of 16, 64, 256 and 1024 workers.
    return [[shown, *(cell(codec, i) for i in (0, 1, 3))] for shown, codec in codecs.items()]


def where_the_bound_holds() -> Rows:
    """Ok-Topk over n and P, by what has to be balanced; bold is what exceeds the bound."""
    rows = []
    for row in read("traffic.json")["bound"]:

        def cell(case: str, row: dict[str, Any] = row) -> str:
            text = f"{row[case]:.2f}"
            return f"**{text}**" if row[case] > 6 else text

        # Without windows all steps go by rounds.
        at_once = cell("even") if row["even"] < row["rounds"] else ""
        rows.append(
            [
                f"1e{len(str(row['params'])) - 1}",
                f"{row['workers']:,}",
                f"{row['of_a_worker']:,.0f}",
                at_once,
                *(cell(case) for case in ("rounds", "neighbours", "spread", "worst", "sizes")),
            ]
        )
    return blank_repeats(rows)
