"""Tables of older runs whose transcribed cells are arranged in another way."""

from ._data import Rows, printed


def table_faults() -> Rows:
    """Faults, and how the processes that are left end; seconds without their unit."""
    rows = []
    for fault, said, ended, bound, step, result in printed("faults"):
        seconds, finished, _ = ended.partition(" s, finished")
        shown = f"{seconds} (finished)" if finished else seconds.removesuffix(" s")
        rows.append([fault, said, shown, bound.removesuffix(" s"), step, result])
    return rows
