"""Weak scaling as the cost model has it: `benchmarks.network.scaling`."""

from ._data import blank_repeats, read
from ._pages import Rows

SHOWN = (
    ("Aries-like", (16, 1024)),
    ("25 Gbit Ethernet", (16, 1024)),
    ("100 Mbit internet", (16, 128, 1024)),
)
METHODS = ("topk_a", "gtopk", "topk_dsa", "ok_topk")


def scaling() -> Rows:
    """The time of the dense exchange over that of the method."""
    found = {
        (row["network"], row["workers"], row["algorithm"]): row["step"]
        for row in read("scaling.json")["rows"]
    }

    def cell(network: str, workers: int, method: str) -> str:
        ratio = found[network, workers, "dense"] / found[network, workers, method]
        return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"

    return blank_repeats(
        [
            [network, str(workers), *(cell(network, workers, method) for method in METHODS)]
            for network, counts in SHOWN
            for workers in counts
        ]
    )
