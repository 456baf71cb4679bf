"""Tables of reports, whose columns are formats of their fields."""

from collections.abc import Iterable
from typing import Any

from .._common import display


def show(title: str, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    """Prints a table with a line for each row.

    Args:
      title: above it.
      columns: a format for each heading, such as ``"{union[mean]:.2%}"``.
      rows: what is formatted.
    """
    lines = [[form.format(**row) for form in columns.values()] for row in rows]
    display.show(title, list(columns), lines)
