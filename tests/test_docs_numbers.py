"""What README and docs say in sentences is what the files in docs/data and docs/evidence hold.

Their tables: tests/test_docs_tables.py.
"""

import re
import statistics

import pytest

from tools.tables._data import DATA, EVIDENCE, read
from tools.tables._pages import ROOT


def words_of(page):
    """The text of a page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_what_is_said_of_the_same_steps():
    rows = {
        row["workers"]: row["above_dense"]
        for row in read("learning_steps.json")["rows"]
        if row["method"] == "sparse_adamw"
    }
    said = re.search(
        r"ended ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) % above the loss of the dense AdamW with "
        r"4, 8, 16 and 32 workers, in the mean of three seeds \(([\d.]+), ([\d.]+), ([\d.]+) and "
        r"([\d.]+) % with the worst\)",
        words_of("README.md"),
    )
    assert said is not None
    assert [float(x) for x in said.groups()[4:]] == [max(rows[p]) for p in (4, 8, 16, 32)]
    means = [statistics.mean(rows[p]) for p in (4, 8, 16, 32)]
    # The mean of rounded numbers is off by up to 0.05, and so is what is said of it.
    assert [float(x) for x in said.groups()[:4]] == pytest.approx(means, abs=0.1)


def test_memory():
    said = re.search(
        r"`ok_topk` keeps (\d) bytes .* and `sparse_adamw` (\d),", words_of("README.md")
    )
    assert said is not None
    kept = {row["option"]: row["state"] for row in read("state_memory.json")}
    assert [f"{kept[name]:.0f}" for name in ("ok_topk", "sparse_adamw")] == list(said.groups())


def test_what_flush_costs():
    text = words_of("docs/training.md")
    found = {row["method"]: row["accuracy"] for row in read("flush_cost.json")["rows"]}
    five, one = found["sparse_adamw, 5%"], found["sparse_adamw, 1%"]
    before, after, low, high = (
        f"{x:.1f}" for x in (*map(statistics.mean, five), *map(statistics.mean, one))
    )
    assert f"{before} % test accuracy before `flush` and {after} % after it" in text
    assert f"({min(five[1]):.1f} with the worst)" in text
    assert f"at a density of 1 % {low} and {high} %" in text
    assert f"dense AdamW {statistics.mean(found['dense'][0]):.1f} %" in text


def test_the_count_of_claims():
    page = (EVIDENCE / "index.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*(\d+) claims, (\d+) of them checked", page)
    assert found is not None
    text = words_of("README.md")
    assert f"lists {found[1]} claims" in text
    assert f"checks {found[2]} of them" in text


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DATA.rglob("*.json")) < 600_000
