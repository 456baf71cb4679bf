"""Tables of runs of which only what was printed is kept: docs/data/printed.

They are older than the benchmarks' option ``--json``, or of programs of their own that were not
kept. A file there has the cells of a page's tables, transcribed by hand, and where they are from.
"""

import json
from typing import Any

from ._data import DATA
from ._pages import Rows

FOLDER = DATA / "printed"


def printed() -> dict[tuple[str, str, int], Rows]:
    """The rows of all such tables, by page, first line, and which of those with that line."""
    found: dict[tuple[str, str, int], Rows] = {}
    for path in sorted(FOLDER.glob("*.json")):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for table in content["tables"]:
            found[content["page"], table["head"], table.get("which", 0)] = table["rows"]
    return found
