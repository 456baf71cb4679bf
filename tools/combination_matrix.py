"""Writes the tables of docs/works_with.md from the rows of tests/optax_ext/combinations.py.

    python tools/combination_matrix.py

The rest of the page, before the first table and after the last one, stays as it is.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "works_with.md"
HEAD = "| combination | how to write it | notes |\n|---|---|---|\n"


def page() -> str:
    """The text of the page."""
    from tests.optax_ext import combinations

    groups: dict[str, list[str]] = {}
    for row in combinations.ROWS:
        how = f"`{row.code}`" + (f", and {row.how}" if row.how else "")
        name = row.name + (" †" if row.also else "")
        line = f"| {name} | {how} | {row.note} |"
        groups.setdefault(row.group, []).append(line)
    tables = [f"### {group}\n\n{HEAD}" + "\n".join(lines) for group, lines in groups.items()]
    text = PAGE.read_text()
    # The next section of the page follows the last table.
    before = text[: text.index(f"### {next(iter(groups))}\n")]
    last = text.rindex(f"\n{HEAD}")
    after = re.search(r"\n\n## .*", text[last + 1 :], re.DOTALL)
    return before + "\n\n".join(tables) + (after[0] if after else "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
