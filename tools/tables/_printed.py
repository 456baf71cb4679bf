"""Tables of older runs whose transcribed cells are arranged in another way."""

from ._data import Rows, blank_repeats, printed


def table_network_older() -> Rows:
    """Many sizes: the time of `dense`, and speeds as multiples of it."""
    rows = [
        [f"{link}, {n}", workers, dense.removesuffix(" ms"), *speeds]
        for link, n, workers, dense, *speeds in printed("network_older")
    ]
    return blank_repeats(rows)


def table_network_codecs() -> Rows:
    """Encodings: each median with its quartiles in the same cell."""

    def joined(median: str, spread: str) -> str:
        return f"{median} ({spread})" if spread else median

    return [
        [method, joined(*fast), joined(*slow), *rest]
        for method, *cells in printed("network_codecs")
        for fast, slow, rest in [(cells[:2], cells[2:4], cells[4:])]
    ]
