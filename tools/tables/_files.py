"""Where tables stand: fragments that pages include, and README, behind a comment."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tables"
README = ROOT / "README.md"

Rows = list[list[str]]
_IN_README = re.compile(r"(?<=<!-- table )(\w+) -->\n((?:\|.*\n)+)")


def written(tables: Mapping[str, Callable[[], Rows]]) -> dict[Path, str]:
    """What each file has to hold, by its path: the head of a table stays as it is there.

    Raises:
      ValueError: there is a fragment that nothing makes, or a row of another length than its head.
    """
    readme = README.read_text(encoding="utf-8")
    found = {path.stem: path for path in FOLDER.glob("*.md")}
    inside = {match[1] for match in _IN_README.finditer(readme)}
    if set(found) | inside != set(tables):
        raise ValueError(f"there or made alone: {(set(found) | inside) ^ set(tables)}")

    def in_readme(match: re.Match[str]) -> str:
        return f"{match[1]} -->\n{with_rows(match[2], tables[match[1]]())}"

    files = {README: _IN_README.sub(in_readme, readme)}
    for name, path in found.items():
        files[path] = with_rows(path.read_text(encoding="utf-8"), tables[name]())
    return files


def with_rows(text: str, rows: Rows) -> str:
    """A table with other rows."""
    head = text.splitlines()[:2]
    columns = head[1].count("|") - 1
    wrong = [row for row in rows if len(row) != columns]
    if wrong:
        raise ValueError(f"{head[0]} has {columns} columns, and a row of it is {wrong[0]}")
    body = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "".join(f"{line}\n" for line in (*head, *body))
