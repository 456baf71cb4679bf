"""The files in docs/data, numbers as cells have them, and where the tables stand."""

import json
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks._common.processes import ROOT
from benchmarks._common.timing import quartiles

DATA, FOLDER = ROOT / "docs" / "data", ROOT / "docs" / "tables"
# Of each table; labels.toml says what they are.
LABELS = tomllib.loads(Path(__file__).with_name("labels.toml").read_text(encoding="utf-8"))

Rows = list[list[str]]


def read(name: Any) -> Any:
    """What a file in docs/data holds, or another one by its path."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def by(rows: Iterable[dict[str, Any]], *keys: str) -> dict[Any, Any]:
    """Rows by what they have under some keys."""
    return {itemgetter(*keys)(row): row for row in rows}


def printed(file: str, which: int) -> Rows:
    """A table of a run of which only what was printed is kept, transcribed by hand.

    They are older than the benchmarks' option ``--json``, or of programs that were not kept. A file
    in docs/data/printed says where its tables are from.
    """
    return read(f"printed/{file}.json")["tables"][which]["rows"]


def cells(row: dict[str, Any], *texts: str) -> list[str]:
    """The texts with the numbers of a row; the formats are those of Python."""
    return [text.format_map(row).replace("%", " %") for text in texts]


def percent(value: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * value:.{digits}f} %"


def interval(values: Iterable[float], digits: int) -> str:
    """The least and the most of some numbers; one number if they are alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{x:.{digits}f}" for x in (ordered[0], ordered[-1])))


def middle(values: Sequence[float], digits: int) -> str:
    """The median, and in brackets the quartiles."""
    low, median, high = (f"{x:.{digits}f}" for x in quartiles(values))
    return f"{median} ({low} to {high})"


def median(values: Sequence[float], digits: int = 0, scale: float = 1) -> str:
    """The median."""
    return f"{scale * statistics.median(values):.{digits}f}"


def listed(values: Iterable[float], digits: int) -> str:
    """All of them."""
    return ", ".join(f"{x:.{digits}f}" for x in values)


def code(name: str) -> str:
    """What a benchmark calls something, with the name of the program as code."""
    first, comma, rest = name.partition(", ")
    return f"`{first}`{comma}{rest}"


def blank_repeats(rows: Rows, columns: int = 1) -> Rows:
    """Leaves out what the line above has in the first columns, too."""
    shown = []
    for above, row in zip([[], *rows], rows, strict=False):
        same = 0
        while same < columns and row[: same + 1] == above[: same + 1]:
            same += 1
        shown.append([""] * same + row[same:])
    return shown


def written(tables: Mapping[str, Callable[[], Rows]]) -> dict[Path, str]:
    """What each file has to hold, by its path: the head of a table stays as it is there.

    Raises:
      ValueError: there is a fragment that nothing makes, or a row of another length than its head.
    """
    found = {path.stem: path for path in FOLDER.glob("*.md")}
    if set(found) != set(tables):
        raise ValueError(f"there or made alone: {set(found) ^ set(tables)}")
    return {
        path: with_rows(path.read_text(encoding="utf-8"), tables[name]())
        for name, path in found.items()
    }


def with_rows(text: str, rows: Rows) -> str:
    """A table with other rows."""
    head = text.splitlines()[:2]
    columns = head[1].count("|") - 1
    wrong = [row for row in rows if len(row) != columns]
    if wrong:
        raise ValueError(f"{head[0]} has {columns} columns, and a row of it is {wrong[0]}")
    body = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "".join(f"{line}\n" for line in (*head, *body))
