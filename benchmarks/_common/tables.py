"""Tables as text."""

from collections.abc import Sequence


def show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip(), flush=True)
