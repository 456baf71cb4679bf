"""Prints the verdicts of docs/evidence/index.md that are others than at a revision, as a table.

python tools/evidence_changes.py REVISION
"""

import re
import subprocess
import sys
from pathlib import Path

PAGE = "docs/evidence/index.md"
ROOT = Path(__file__).resolve().parent.parent


def verdicts(page: str) -> dict[str, str]:
    """The verdict of each claim by its id."""
    rows = re.finditer(r"(?m)^\| `([\w./-]+)` .*\| \*\*([^*|]+)\*\*[^|]*(?:\\\|[^|]*)* \|$", page)
    return {row[1]: row[2] for row in rows}


def changes(before: str, after: str) -> list[tuple[str, str, str]]:
    """Claims with another verdict, in the order of the newer page: id, old verdict, new verdict."""
    old, new = verdicts(before), verdicts(after)
    rows = [(name, old.get(name, "new"), found) for name, found in new.items()]
    rows += [(name, found, "gone") for name, found in old.items() if name not in new]
    return [row for row in rows if row[1] != row[2]]


def main(argv: list[str]) -> int:
    """Prints the table; 2 where there is no such revision."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    shown = subprocess.run(
        ["git", "show", f"{argv[0]}:{PAGE}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shown.returncode:
        print(shown.stderr.strip(), file=sys.stderr)
        return 2
    print("| claim | before | now |\n|---|---|---|")
    for row in changes(shown.stdout, (ROOT / PAGE).read_text(encoding="utf-8")):
        print("| {} | {} | {} |".format(*row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
