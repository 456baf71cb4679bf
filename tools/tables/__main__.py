"""Writes the tables of numbers, or says which differ."""

import argparse
import sys

import tools.tables as tables

from ._pages import write
from ._registry import differing


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=tables.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if any differs"
    )
    check = parser.parse_args().check
    found = differing()
    # From the end of a page, so that the lines above stay where they are.
    for table, rows in reversed(found):
        print(f"{table.page}:{table.first + 1}: {table.head}")
        if not check:
            write(table, rows)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
