"""Writes the tables of docs/works_with.md from what tests run, tests/optax_ext/combinations.py.

What stands before and after them in the page is left as it is.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "works_with.md"


def page() -> str:
    """The text of the page."""
    from tests.optax_ext import combinations

    groups: dict[str, list[str]] = {}
    for row in combinations.ROWS:
        how = f"`{row.code}`" + (f"; {row.how}" if row.how else "")
        modes = ", ".join(("shard_map", *row.also, *(("sharded",) if row.sharded else ())))
        line = f"| {row.name} | {how} | {modes} | {row.note} |"
        groups.setdefault(row.group, []).append(line)
    head = "| combination | how to write it | tested in | notes |\n|---|---|---|---|\n"
    tables = [f"## {group}\n\n{head}" + "\n".join(lines) for group, lines in groups.items()]
    text = PAGE.read_text()
    # The first section behind the last table has no table.
    before = text[: text.index(f"## {next(iter(groups))}\n")]
    last = text.rindex(f"\n{head}")
    after = re.search(r"\n\n## .*", text[last + 1 :], re.DOTALL)
    return before + "\n\n".join(tables) + (after[0] if after else "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
