"""Writes the tables of numbers, or says which differ."""

import argparse
import sys

import tools.tables as tables

from ._files import ROOT, written
from ._registry import MADE


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=tables.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if any differs"
    )
    check = parser.parse_args(argv).check
    differing = {
        path: text
        for path, text in written(MADE).items()
        if path.read_text(encoding="utf-8") != text
    }
    for path, text in differing.items():
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
