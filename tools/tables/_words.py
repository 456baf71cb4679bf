"""Words of a step, read from the traced programs: `benchmarks.network.traffic`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ._data import LABELS, Rows, by, read

ALGORITHMS = ("dense", *LABELS["words"], "spardl", "ok_topk")


def _multiples(names: Iterable[str], workers: Sequence[int]) -> Rows:
    """Words as multiples of k; the best and the worst step if they differ."""
    at = by(read("traffic.json")["algorithms"], "algorithm", "workers")

    def cell(*setting: Any) -> str:
        row = at.get(setting)
        multiples = [row[case] / row["k"] for case in ("best", "worst")] if row else []
        # One digit after the point, and none of large numbers.
        return "-".join(dict.fromkeys(f"{x:,.{0 if x >= 25 else 1}f}" for x in multiples))

    return [
        [LABELS["words"].get(name, f"`{name}`"), *(cell(name, p) for p in workers)]
        for name in names
    ]


table_words = partial(_multiples, ALGORITHMS, (2, 6, 16, 48, 384))


def table_where_the_bound_holds() -> Rows:
    """Ok-Topk with n = 10^6, by what has to be balanced; bold is what exceeds the bound."""

    def multiple(value: float) -> str:
        return f"**{value:.2f}**" if value > 6 else f"{value:.2f}"

    return [
        [
            f"{row['workers']:,}",
            f"{row['of_a_worker']:,.0f}",
            *(multiple(row[case]) for case in ("even", "spread", "worst")),
        ]
        for row in read("traffic.json")["bound"]
        if row["params"] == 10**6
    ]
