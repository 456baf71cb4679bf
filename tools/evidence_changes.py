"""Prints the verdicts of docs/evidence/claims.html that have changed since a revision, as a table.

python tools/evidence_changes.py REVISION
"""

import re
import subprocess
import sys
from pathlib import Path

PAGE = "docs/evidence/claims.html"
ROOT = Path(__file__).resolve().parent.parent


def verdicts(page: str) -> dict[str, str]:
    """The verdict of each claim by its id."""
    rows = re.finditer(r'(?m)^<tr id="([\w./-]+)"><td><b>([^<]+)</b>', page)
    return {row[1]: row[2] for row in rows}


def changes(before: str, after: str) -> list[tuple[str, str, str]]:
    """Claims with another verdict, in the order of the newer page: id, old verdict, new verdict."""
    old, new = verdicts(before), verdicts(after)
    rows = [(name, old.get(name, "new"), new.get(name, "gone")) for name in new | old]
    return [row for row in rows if row[1] != row[2]]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    command = ["git", "show", f"{sys.argv[1]}:{PAGE}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        sys.exit(shown.stderr.strip())
    print("| claim | before | now |\n|---|---|---|")
    for row in changes(shown.stdout, (ROOT / PAGE).read_text(encoding="utf-8")):
        print("| {} | {} | {} |".format(*row))
