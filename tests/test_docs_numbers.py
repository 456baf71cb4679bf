"""README and manual: numbers and tables come from stored results, and have dates or sources."""

import math
import re
import statistics

import pytest

from benchmarks._common.processes import ROOT
from sparse_collectives.cost_model._numbers import NUMBERS
from sparse_collectives.planner import _option_files
from tests.optax_ext.helpers import DOCS
from tests.test_docs import text_of
from tools.tables import _learning, _links, _minutes
from tools.tables.__main__ import main as tables


def undated(text):
    """Paragraphs and rows with a result but no link, of sections without a date or a table."""
    verb = r"\b(took|ended|reached|gained|fell|(was|were) [\d.]+)\b"
    unit = r"(?<![\w.`/-])\d[\d,.]*\s*(%|ms|us|s|seconds|minutes|times|GB|MB)(?![\w/])"
    # A test, a formula or the cost model may be the source.
    source = r"\]\(|\b(tests?|computed|formula)\b"
    text = re.sub(r"(?ms)^ *```.*?```|`[^`\n]*`", "", text)
    for section in re.split(r"(?m)^(?=#+ )", text):
        if re.search(r"20\d\d-\d\d-\d\d|<!-- table", section):
            continue
        for part in re.split(r"\n\n|\n(?= *- | *\d\. |\|)", section):
            result = re.search(verb, part) and re.search(unit + r"|\b\d\.\d{2,3}\b", part)
            if result and not re.search(source, part):
                yield part


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda x: x.stem
)
def test_a_result_has_a_date_or_a_source(page):
    assert not list(undated(page.read_text()))


def test_a_result_without_either_is_found():
    assert list(undated("# A\n\nA step took 3 ms.\n\n- It [took](b.md) 4 ms.")) == [
        "A step took 3 ms."
    ]
    assert not list(undated("# A\n\nOn 2026-11-23 a step took 3 ms."))


def test_tables_are_those_of_their_data(capsys):
    """`python -m tools.tables` writes them, and has a function for each one in a page."""
    assert tables(["--check"]) == 0, capsys.readouterr().out


def test_the_numbers_of_the_readme_are_those_of_the_data():
    text = text_of("README.md")
    speeds = [_links.speedups(*point)["sparse_adamw"] for point in _links.POINTS]
    (low, high), (low_1, high_1), (small, _) = ((min(x), max(x)) for x in speeds)
    assert f"{math.floor(low)} to {math.floor(high)} times at 100 Mbit/s" in text
    assert f"{low_1:.1f} to {high_1:.1f} times at 1 Gbit/s; {small:.1f} times for" in text
    assert [round(low_1, 1), round(high_1, 1)] == NUMBERS["shared_cores"]["sparse_adamw"]
    for link, owner in (("100mbit", "PyTorch's "), ("1gbit", "")):
        rows = {row[0]: row[2] for row in _minutes.loss_after_minutes(link)}
        ours, low_rank = rows["`sparse_adamw`"], [rows[x] for x in rows if "PowerSGD" in x]
        half, dense = rows["PyTorch: float16"], rows["PyTorch: dense (DDP)"]
        assert f"{ours}; {owner}PowerSGD {low_rank[0]} to {low_rank[-1]}, " in text
        assert f", float16 {half}, dense {dense}" in text
    above = [_learning.above_dense("sparse_adamw", workers) for workers in (4, 8, 16, 32)]
    means = [round(statistics.mean(x), 1) + 0.0 for x in above]
    worst = max(map(max, above))
    assert f"{min(means):.1f} to {max(means):.1f} % above AdamW" in text
    assert f"three seeds; {worst:.1f} % at worst" in text


def test_the_steps_to_the_option_files_are_those_of_the_stored_runs():
    """The planner's factors for a step lie on a line through dense runs of two lengths."""

    def mean(seeds=None, steps=2000, **of):
        found = _learning.runs(task="text", steps=steps, **of)
        return statistics.mean(x["value"] for x in found if seeds is None or x["seed"] in seeds)

    seeds = {x["seed"] for x in _learning.runs(contestant="dense", task="text", steps=1000)}
    doubling = mean(contestant="dense", steps=1000) - mean(seeds, contestant="dense")
    names = {
        ("partitioned_topk(few)", 0.05): "sparse_adamw",
        ("partitioned_topk(1, 3)", 0.05): "sparse_adamw bits=[1, 3]",
        ("partitioned_topk(few)", 0.01): "sparse_adamw density=0.01",
        ("ok_topk", 0.01): "sparse_adamw, ok_topk",
    }
    for name, cases in _option_files.MEASURED.items():
        for (workers, density), factor in cases.items():
            found = mean(contestant=names[name, density], workers=workers)
            above = found - mean(contestant="dense")
            assert round(2 ** (above / doubling), 2) == factor, (name, workers, density)
