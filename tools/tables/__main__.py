"""The tables of numbers in the manual, made of the files in docs/data and docs/evidence.

    python -m tools.tables           writes them
    python -m tools.tables --check   says which pages differ, and writes nothing

A table stands in a page between the comments ``table: NAME`` and ``end of table``. A run of a
benchmark with ``--json docs/data/NAME.json`` and then the first of these bring it up to date. For a
new one write the comments and the first two lines of the table in a page, and a function
``table_NAME`` in a module of this package.

Every table has the same notation: "a-b" is a range, "x (a-b)" is a median with the quartiles or
with the least and the most, and the head says which. A range with a negative number is "a to b".
"""

import sys
from importlib import import_module

from benchmarks._common import options

from ._data import ROOT, written

_MODULES = ("learning", "links", "minutes", "optimizers", "predicted", "programs", "timed")
_MODULES += ("trainings", "words")
MADE = {
    name.removeprefix("table_"): function
    for module in _MODULES
    for name, function in vars(import_module(f"{__package__}._{module}")).items()
    if name.startswith("table_")
}


def main(argv: list[str] | None = None) -> int:
    """Writes the tables of numbers, or says which differ."""
    parser = options.parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if any differs")
    check, differ = parser.parse_args(argv).check, False
    for path, text in written(MADE).items():
        if path.read_text(encoding="utf-8") != text:
            print(path.relative_to(ROOT))
            differ = True
            if not check:
                path.write_text(text, encoding="utf-8")
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
