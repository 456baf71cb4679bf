"""Facts that stand in sentences of several pages agree with their data, and with one another."""

import importlib.util
import json
import re
import statistics

import numpy as np
import pytest

from benchmarks.evidence._catalogue import CLAIMS
from optax_ext._optimizers._parts import default_gain
from sparse_collectives import cost_model
from tools.tables import _learning
from tools.tables._pages import ROOT
from tools.tables._printed import FOLDER, printed


def text(page):
    """The text of a page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def rows_of(page, head):
    (found,) = (rows for (on, begins, _), rows in printed().items() if (on, begins) == (page, head))
    return found


def numbers(cell):
    return [float(x) for x in re.findall(r"\d+\.\d+", cell)]


OLDER = next(
    rows for (page, head, _), rows in printed().items() if head.startswith("| link | n | P |")
)


def test_what_does_not_pay_at_10_gigabit():
    """Columns: link, n, P, dense, ok_topk, reuse, topk_a, ddp, fp16, powersgd1."""
    fast = [row for row in OLDER if row[0] == "10 Gbit/s"]
    small = {row[2]: row[6] for row in fast if row[1] == "1M"}
    said = f"`topk_a` with 1M parameters ({small['2']} with two workers, {small['8']} with eight)"
    for page in ("README.md", "docs/choosing.md"):
        assert said in text(page), page
    sparse = [float(x) for row in fast for x in row[4:6] if x]
    sparse += [
        float(row[6]) for row in fast if row[6] and row[1:3] not in (["1M", "2"], ["1M", "8"])
    ]
    assert max(sparse) <= 1
    own = [float(row[4]) for row in fast]
    either = [float(row[6]) for row in fast if row[6]]
    said = f"{min(own)} to {max(own)} times as fast"
    for page in ("docs/index.md", "docs/sharp-bits.md"):
        assert said in text(page).replace("as the dense", "as dense"), page
    assert f"`topk_a` {min(either)} to {max(either)} times" in text("docs/index.md")


def test_pytorchs_float16():
    slow = [float(row[8]) for row in OLDER if row[0] != "10 Gbit/s" and row[8]]
    said = f"float16 was {min(slow):.1f} to {max(slow):.1f} times as fast as dense"
    assert said in text("docs/choosing.md")
    (middle,) = (row[8] for row in OLDER if row[:3] == ["1 Gbit/s", "14.7M", "4"])
    assert f"PyTorch's float16 gave {float(middle):.1f} in the middle column" in text("README.md")


def test_buckets():
    head = "| | 100 Mbit/s: ms | times dense | hidden | 1 Gbit/s: ms | times dense | hidden |"
    rows = {row[0]: row for row in rows_of("docs/network.md", head)}

    def longer(buckets):
        parts = rows[f"`bucketed(ok_topk, {buckets})`"], rows["`ok_topk`"]
        return [float(parts[0][i]) / float(parts[1][i]) for i in (1, 4)]

    two, four = ("{:.1f} and {:.1f} times".format(*longer(buckets)) for buckets in (2, 4))
    assert two in text("docs/training.md")
    assert four in text("docs/training.md")
    assert two in text("docs/sharp-bits.md")
    assert four in text("docs/sharp-bits.md")


def test_other_learning_rates():
    rows = {
        row[0]: row[1:] for row in rows_of("docs/learning.md", "| | 0.01 | 0.02 | 0.03 | 0.04 |")
    }
    dense = statistics.mean(numbers(rows["dense"][1]))

    def above(workers, column):
        return f"{100 * (statistics.mean(numbers(rows[workers][column])) / dense - 1):.1f}"

    page = text("docs/learning.md")
    assert (
        f"With 16 the mean of three seeds is {above('16', 1)} % above the dense runs at 0.02, and "
        f"{above('16', 2)} % at 1.5 times" in page
    )
    assert f"With 32 it is {above('32', 1)} % at 0.02 and {above('32', 2)} % at 0.03" in page
    newer = [statistics.mean(_learning.above_dense("sparse_adamw", p)) for p in (16, 32)]
    assert (
        "16 workers end {:.1f} % and 32 end {:.1f} % above dense at its rate".format(*newer) in page
    )


def test_how_far_two_versions_differ():
    """The table of rates and the newer runs have one setting in common."""
    rows = rows_of("docs/learning.md", "| | 0.01 | 0.02 | 0.03 | 0.04 |")
    same = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02, "contestant": "sparse_adamw"}
    largest = 0.0
    for row, workers in zip(rows[1:], (4, 8, 16, 32), strict=True):
        newer = [run["value"] for run in _learning.runs(workers=workers, **same)]
        largest = max(largest, *np.abs(np.subtract(newer, numbers(row[2]))))
    assert f"the loss of a seed differs by up to {largest:.3f}" in text("docs/learning.md")


def test_the_gain():
    assert [default_gain(p) for p in (1, 2, 8, 64)] == [1, 1, 2, 2]
    assert f"{default_gain(4):.2f} for four" in text("docs/training.md")
    for page in ("README.md", "docs/training.md"):
        assert "sqrt(P / 2), but 1 at least and 2 at most" in text(page), page


def words(algorithm, size, selected, workers):
    load = cost_model.Workload(size, selected, workers)
    return cost_model.predict(algorithm, load)


def test_fixed_costs_of_ok_topk():
    found = {k: words("ok_topk", 10**6, k, 8).lower.words for k in (8, 100, 1000)}
    bound = {k: 6 * k * 7 / 8 for k in found}
    readme, bits = text("README.md"), text("docs/sharp-bits.md")
    for page in (readme, bits):
        assert f"{found[8]:.0f} words for k = 8" in page
        assert f"{found[100]:.0f} for k = 100" in page
    assert f"is {bound[8]:.0f}, and {found[100]:.0f} for k = 100 ({bound[100]:.0f})" in readme
    assert f"is {bound[8]:.0f} and {bound[100]:.0f}" in bits
    assert f"({found[1000]:,.0f} of {bound[1000]:,.0f})" in readme


@pytest.mark.parametrize(("size", "said"), [(14_700_000, "4.8"), (31_745, "5.0")])
def test_words_of_the_default_exchange(size, said):
    def multiple(workers):
        unit = 0.01 * size * (workers - 1) / workers
        return words("agreed(few)", size, round(0.05 * size), workers).expected.words / unit

    assert f"{multiple(8):.0f}" == "4"
    assert f"{multiple(34):.1f}" == said
    page = text("docs/training.md")
    assert "4 k (P-1)/P words for up to 8 workers and 4.8 for up to 34" in page
    assert "(5.0 if n is as small as 30,000)" in page


def test_linear_models_beside_other_work():
    (said,) = re.findall(r"SGD was then ([\d.]+ to [\d.]+) times", text("docs/linear_models.md"))
    assert f"({said} beside other work)" in text("docs/papers.md")


def test_the_evidence_quotes_what_the_pages_say():
    claims = {claim.id: claim for claim in CLAIMS}
    above = _learning.above_dense("sparse_adamw", 4)
    mean, worst = f"{statistics.mean(above):.1f}", f"{max(above):.1f}"
    claim = claims["library/sparse-adamw-text"]
    assert f"ends {mean} % above" in claim.text
    assert claim.paper.startswith(f"{mean} %, at worst {worst} %")
    # The claim is of the mean, and so is what decides.
    assert claim.chance
    assert claim.rule[0].most == float(mean)
    table = rows_of("docs/learning.md", "| task | P, steps, rates | dense | sparse |")
    row = next(row for row in table if row[0].startswith("`images-adamw`"))
    ours = numbers(row[3].split(":")[0])
    below = np.subtract(numbers(row[2]), ours)
    claim = claims["library/sparse-adamw-digits"]
    assert claim.paper.startswith(f"{below.mean():.2f} points below, at worst {below.max():.2f}")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_printed_is_of_programs_that_there_are(path):
    said = json.loads(path.read_text(encoding="utf-8"))["from"]
    assert said.startswith("transcribed from what ")
    modules = re.findall(r"\b(?:benchmarks|examples)\.[\w.]+\w", said)
    files = re.findall(r"\b[\w/]+\.py\b", said)
    assert modules or files
    for name in modules:
        assert importlib.util.find_spec(name), name
    for name in files:
        assert (ROOT / name).exists(), name
