"""Tables of a Markdown page: found, and given other rows."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
Rows = list[list[str]]


class Found(NamedTuple):
    """A table of a page.

    Attributes:
      page: the path from the root of the repository.
      head: its first line, without what stands before it.
      rows: the cells of its body.
      first: the number of the body's first line, from 0.
      indent: what stands before each line.
    """

    page: str
    head: str
    rows: Rows
    first: int
    indent: str


def pages() -> list[str]:
    """The README, and every page of the manual."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in docs)]


def tables(page: str) -> list[Found]:
    """The tables of a page, in their order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found, fenced = [], False
    for i, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and i and re.fullmatch(r"\s*\|[-:| ]*-[-:| ]*\|", line):
            body = []
            for row in lines[i + 1 :]:
                if not row.lstrip().startswith("|"):
                    break
                body.append(cells(row))
            above = lines[i - 1]
            indent = above[: len(above) - len(above.lstrip())]
            found.append(Found(page, above.strip(), body, i + 1, indent))
    return found


def cells(line: str) -> list[str]:
    """The cells of a line; a bar behind a backslash is part of one."""
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inside)]


def write(table: Found, rows: Rows) -> None:
    """Gives a table other rows."""
    path = ROOT / table.page
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    body = [f"{table.indent}{line_of(row)}\n" for row in rows]
    lines[table.first : table.first + len(table.rows)] = body
    path.write_text("".join(lines), encoding="utf-8")


def line_of(row: list[str]) -> str:
    """A row as a page has it."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)
