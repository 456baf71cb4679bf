"""The tables of numbers in README and docs are made of the files in docs/data and docs/evidence."""

import re

import pytest

from tools.tables import _explaining, _pages, _registry
from tools.tables._printed import FOLDER

MADE = _registry.made()
NAMES = [f"{table.page}:{table.first}" for table, _ in MADE]


@pytest.mark.parametrize(("table", "rows"), MADE, ids=NAMES)
def test_a_table_is_that_of_its_data(table, rows):
    # `python -m tools.tables` writes it anew.
    assert table.rows == rows


def test_every_table_with_numbers_is_made_of_data():
    known = {(table.page, table.first) for table, _ in MADE}
    for page in _pages.pages():
        explaining = tuple(_explaining.EXPLAINING.get(page, ()))
        for table in _pages.tables(page):
            numbers = any(re.search(r"\d", cell) for row in table.rows for cell in row[1:])
            if numbers and not table.head.startswith(explaining or ("no table",)):
                assert (page, table.first) in known, table.head


def test_what_is_said_to_explain_is_there():
    for page, heads in _explaining.EXPLAINING.items():
        found = [table.head for table in _pages.tables(page)]
        for head in heads:
            assert any(one.startswith(head) for one in found), head


def test_no_table_is_made_twice():
    places = [(table.page, table.first) for table, _ in MADE]
    assert len(places) == len(set(places))


def test_what_was_printed_is_small():
    assert all(path.stat().st_size < 30_000 for path in FOLDER.iterdir())


def test_a_table_is_found_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(_pages, "ROOT", tmp_path)
    text = "text\n\n  | a | b |\n  |---|---|\n  | 1 | x \\| y |\n\n```\n| c |\n|---|\n```\nend\n"
    (tmp_path / "page.md").write_text(text)
    (found,) = _pages.tables("page.md")
    assert (found.head, found.rows, found.indent) == ("| a | b |", [["1", "x \\| y"]], "  ")
    _pages.write(found, [["2", ""], ["3", "4"]])
    written = (tmp_path / "page.md").read_text()
    assert written == text.replace("  | 1 | x \\| y |\n", "  | 2 | |\n  | 3 | 4 |\n")


def test_a_table_that_is_not_there_is_named(monkeypatch):
    missing = _registry.Table("README.md", "| no such table |", list)
    monkeypatch.setattr(_registry, "MADE", (missing,))
    with pytest.raises(LookupError, match=r"README.md has no table 0 that begins with '\| no such"):
        _registry.made()
