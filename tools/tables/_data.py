"""The files in docs/data, and numbers as cells have them."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common.timing import quartiles

from ._files import ROOT, Rows

DATA = ROOT / "docs" / "data"
EVIDENCE = ROOT / "docs" / "evidence"


def read(name: str | Path) -> Any:
    """What a file in docs/data holds."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def printed(file: str, which: int) -> Rows:
    """A table of a run of which only what was printed is kept, transcribed by hand.

    They are older than the benchmarks' option ``--json``, or of programs that were not kept. A file
    in docs/data/printed says where its tables are from.
    """
    return read(f"printed/{file}.json")["tables"][which]["rows"]


def interval(values: Sequence[float], digits: int) -> str:
    """The least and the most of some numbers; one number if they are alike."""
    low, high = (f"{x:.{digits}f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def middle(values: Sequence[float], digits: int) -> str:
    """The median, and in brackets the quartiles."""
    low, median, high = (f"{x:.{digits}f}" for x in quartiles(values))
    return f"{median} ({low} to {high})"


def listed(values: Sequence[float], digits: int) -> str:
    """All of them."""
    return ", ".join(f"{x:.{digits}f}" for x in values)


def percent(value: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * value:.{digits}f} %"


def code(name: str) -> str:
    """What a benchmark calls something, with the name of the program as code."""
    first, *rest = name.split(", ", 1)
    return ", ".join([f"`{first}`", *rest])


def median(values: Sequence[float], digits: int = 0, scale: float = 1) -> str:
    """The median."""
    return f"{scale * statistics.median(values):.{digits}f}"


def blank_repeats(rows: Rows, columns: int = 1) -> Rows:
    """Leaves out what the line above has in the first columns, too."""
    above: list[str] = []
    shown = []
    for row in rows:
        same = 0
        while same < columns and row[: same + 1] == above[: same + 1]:
            same += 1
        shown.append([""] * same + row[same:])
        above = row
    return shown
