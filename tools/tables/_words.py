"""Words of a step, read from the traced programs: `benchmarks.network.traffic`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ._data import LABELS, Rows, blank_repeats, by, read

ALGORITHMS = ("dense", *LABELS["words"], "ssar_recursive_double", "ssar_split_allgather")
ALGORITHMS += ("dsar_split_allgather", "ring_sparse", "gtopk", "spardl", "ok_topk")
ALGORITHMS += ("full_sums(ok_topk)",)
COUNTS = {"even": "even", "spread": "uneven, a surplus redistributed", "worst": "worst"}
SHORT = ("dense", "topk_a", "ok_topk", "partitioned_topk", "partitioned_topk, few bits")
SHORT += ("partitioned_topk, few bits both ways",)


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


table_words = partial(_multiples, ALGORITHMS, (2, 3, 6, 16, 48, 100, 384, 1024))
table_words_in_short = partial(_multiples, SHORT, (2, 6, 16, 48, 384))


def table_words_by_codec() -> Rows:
    """Ok-Topk at n = 1e8, by encoding: even counts, a surplus dealt out, the worst."""
    found = by(read("traffic.json")["flatness"], "codec", "case")
    rows = []
    for codec, shown in LABELS["words_by_codec"].items():
        for case, said in COUNTS.items():
            # The data are for 16, 64, 256 and 1,024 workers.
            of_k = (found[codec, case]["of_k"][i] for i in (0, 1, 3))
            rows.append([shown, said, *(f"{x:.2f}" for x in of_k)])
    return blank_repeats(rows)


def table_where_the_bound_holds() -> Rows:
    """Ok-Topk over n and P, by what has to be balanced; bold is what exceeds the bound."""
    cases = ("rounds", "neighbours", "spread", "worst")

    def multiple(value: float) -> str:
        return f"**{value:.2f}**" if value > 6 else f"{value:.2f}"

    rows = []
    for row in read("traffic.json")["bound"]:
        # Without windows all steps go by rounds.
        at_once = multiple(row["even"]) if row["even"] < row["rounds"] else ""
        setting = [f"1e{len(str(row['params'])) - 1}", f"{row['workers']:,}"]
        setting.append(f"{row['of_a_worker']:,.0f}")
        rows.append([*setting, at_once, *(multiple(row[case]) for case in cases)])
    return blank_repeats(rows)
