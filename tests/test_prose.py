"""The linter of prose finds what its rules are about, and nothing in code."""

import tomllib

import pytest

from tools.prose.__main__ import RULES, hits, main

EACH = tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"]


@pytest.mark.parametrize("rule", EACH, ids=lambda rule: rule["hit"])
def test_rule_applies_to_its_example_alone(rule):
    assert list(hits(rule["hit"], False, [rule]))
    assert not list(hits(rule["fine"], False, EACH))


def test_code_and_links_are_no_prose():
    page = "See [x](what-is.md) and `what is`.\n\n```\nwhat is\n```\n\nHere is\nwhat is left.\n"
    assert [(line, phrase) for line, phrase, _ in hits(page, False, EACH)] == [(8, "what is")]


def test_docstrings_and_comments_are_read_and_doctests_are_not():
    code = '''"""One line.

    >>> print("what is")
    what is

Nobody waits.
"""
x = "what is"  # what is
'''
    found = [(line, phrase) for line, phrase, _ in hits(code, True, EACH)]
    assert sorted(found) == [(6, "Nobody"), (8, "what is")]


def test_file_with_a_hit_fails(tmp_path, capsys):
    bad, good = tmp_path / "bad.md", tmp_path / "good.md"
    bad.write_text("It ran for ever.\n")
    good.write_text("It ran forever.\n")
    assert main([str(good)]) == 0
    assert main([str(bad), str(good)]) == 1
    assert capsys.readouterr().out.startswith(f"{bad}:1: 'for ever': a")
