"""The files in docs/data, numbers as cells have them, and the places of the tables."""

import json
import re
import statistics
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks._common.processes import ROOT
from benchmarks._common.timing import quartiles

DOCS = ROOT / "docs"
DATA = DOCS / "data"
# labels.toml explains these.
LABELS = tomllib.loads(Path(__file__).with_name("labels.toml").read_text(encoding="utf-8"))
# The page in which each of these is edited. Other pages have copies.
BY_HAND = {"recommendations": "choosing.md"}
_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- table: (?P<name>\w+) -->\n\n(?P<body>.*?)\n\n *<!-- end of table -->$",
    re.MULTILINE | re.DOTALL,
)

Rows = list[list[str]]
# A fragment has one table, or several with an empty line between them.
Tables = Rows | tuple[Rows, ...]


def read(name: Any) -> Any:
    """The contents of a file in docs/data, or of another one by its path."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def by(rows: Iterable[dict[str, Any]], *keys: str) -> dict[Any, Any]:
    """Rows by their values of some keys."""
    return {itemgetter(*keys)(row): row for row in rows}


def cells(row: dict[str, Any], *texts: str) -> list[str]:
    """The texts with the numbers of a row, in the formats of Python."""
    return [text.format_map(row).replace("%", " %") for text in texts]


def percent(value: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * value:.{digits}f} %"


def number(value: float, digits: int | None = None) -> str:
    """A number with so many digits after the point, or by default three digits in all."""
    if value == 1:
        # A baseline of ratios.
        return "1"
    if digits is None:
        digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def interval(values: Iterable[float], digits: int | None = None) -> str:
    """The least and the most of some numbers, or one number if they are alike."""
    ordered = sorted(values)
    return "-".join(dict.fromkeys(number(x, digits) for x in (ordered[0], ordered[-1])))


def around(low: float, value: float, high: float, digits: int | None = None) -> str:
    """A value, and in brackets the numbers below and above it."""
    if digits is None:
        digits = len(number(value).partition(".")[2])
    shown, spread = number(value, digits), interval((low, high), digits)
    if spread == shown:
        return "1" if re.fullmatch(r"1\.0+", shown) else shown
    return f"{shown} ({spread})"


def middle(values: Sequence[float], digits: int | None = None) -> str:
    """The median, and in brackets the quartiles."""
    low, median, high = quartiles(values)
    return around(low, median, high, digits)


def median(values: Sequence[float], digits: int | None = 0, scale: float = 1) -> str:
    """The median."""
    return number(scale * statistics.median(values), digits)


def listed(values: Iterable[float], digits: int) -> str:
    """All of them."""
    return ", ".join(f"{x:.{digits}f}" for x in values)


def code(name: str) -> str:
    """A benchmark's name for something, with the name of the program as code."""
    first, comma, rest = name.partition(", ")
    return f"`{first}`{comma}{rest}"


def blank_repeats(rows: Rows, columns: int = 1) -> Rows:
    """Leaves out cells of the first columns that repeat the line above."""
    shown = []
    for above, row in zip([[], *rows], rows, strict=False):
        same = 0
        while same < columns and row[: same + 1] == above[: same + 1]:
            same += 1
        shown.append([""] * same + row[same:])
    return shown


def written(tables: Mapping[str, Callable[[], Tables]]) -> dict[Path, str]:
    """The text that each page has to hold: the head of a table stays as it is there.

    Raises:
      ValueError: a page has a table that nothing makes, no page has one that is made, or a row has
        another length than its head.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    copied = {name: _bodies(pages[DOCS / page])[name] for name, page in BY_HAND.items()}
    found = {name for text in pages.values() for name in _bodies(text)}
    if found != {*tables, *copied}:
        raise ValueError(f"in a page or made alone: {found ^ {*tables, *copied}}")

    def made(match: re.Match[str]) -> str:
        indent, name, body = match["indent"], match["name"], textwrap.dedent(match["body"])
        text = copied[name] if name in copied else with_rows(body, tables[name]())
        return match[0].replace(match["body"], textwrap.indent(text, indent))

    return {path: _BLOCK.sub(made, text) for path, text in pages.items()}


def table_of(page: str, name: str) -> str:
    """The table of that name in a page."""
    return _bodies((DOCS / page).read_text(encoding="utf-8"))[name]


def _bodies(text: str) -> dict[str, str]:
    return {match["name"]: textwrap.dedent(match["body"]) for match in _BLOCK.finditer(text)}


def with_rows(text: str, made: Tables) -> str:
    """The tables of a block with other rows."""
    tables = made if isinstance(made, tuple) else (made,)
    heads = [table.splitlines()[:2] for table in text.strip().split("\n\n")]
    return "\n".join(_table(*each) for each in zip(heads, tables, strict=True)).rstrip()


def _table(head: list[str], rows: Rows) -> str:
    columns = head[1].count("|") - 1
    wrong = [row for row in rows if len(row) != columns]
    if wrong:
        raise ValueError(f"{head[0]} has {columns} columns, and a row of it is {wrong[0]}")
    body = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "".join(f"{line}\n" for line in (*head, *body))
