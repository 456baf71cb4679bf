"""What README and docs say in sentences is what the files in docs/data and docs/evidence hold.

Their tables: tests/test_docs_tables.py.
"""

import re
import statistics

from sparse_collectives.planner import _steps
from tools.tables import _learning
from tools.tables._data import DATA, EVIDENCE, read
from tools.tables._pages import ROOT


def words_of(page):
    """The text of a page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


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


def test_a_newcomers_network():
    text = words_of("docs/learning.md")
    for file in ("flush_cost_raw.json", "flush_cost.json"):
        rows = {row["method"]: row["accuracy"][0] for row in read(file)["rows"]}
        dense, five, one = (
            ", ".join(f"{x:.2f}" for x in rows[name][:2]) + f" and {rows[name][2]:.2f}"
            for name in ("dense", "sparse_adamw, 5%", "sparse_adamw, 1%")
        )
        said = re.search(rf"{dense} %.{{0,60}}{five} %.{{0,60}}{one} %", text)
        assert said is not None, (dense, five, one)


def test_what_is_said_of_low_densities():
    above = _learning.above_dense("sparse_adamw density=0.01", 8)
    text = words_of("docs/choosing.md")
    low, worst = statistics.mean(above), max(above)
    assert f"at 1 % ended {low:.1f} % above with 8 workers (worst seed {worst:.1f} %)" in text
    runs = {"task": "images-adamw", "rate": 0.004, "steps": 600}
    dense = _learning.runs(contestant="dense", **runs)
    sparse = _learning.runs(contestant="sparse_adamw", share=0.1, **runs)
    below = [100 * (a["value"] - b["value"]) for a, b in zip(dense, sparse, strict=True)]
    said = f"{statistics.mean(below):.2f} points below in 600 steps (worst seed {max(below):.2f})"
    assert said in text


def test_the_sentences_about_the_same_steps():
    by_workers = {p: _learning.above_dense("sparse_adamw", p) for p in (4, 8, 16, 32)}
    # A mean of -0.04 is 0.0.
    means = [f"{round(statistics.mean(above), 1) + 0.0:.1f}" for above in by_workers.values()]
    worst = [f"{max(above):.1f}" for above in by_workers.values()]
    said = {
        "README.md": (
            "ended {}, {}, {} and {} % above the loss of the dense AdamW with 4, 8, 16 and 32 "
            "workers, in the mean of three seeds (" + "{}, {}, {} and {} % with the worst)"
        ),
        "docs/index.md": "{} and {} % of the loss with 4 and 8 workers, {} and {} % with 16 and 32",
        "docs/quick-start.md": (
            "ended {} and {} % above the loss of the dense AdamW with 4 and 8 workers, {} % "
            "with 16 and {} % with 32"
        ),
    }
    for page, sentence in said.items():
        assert sentence.format(*means, *worst) in words_of(page), page


def test_steps_to_the_same_loss():
    """What the planner multiplies a step by: on a line through the dense runs of two lengths."""
    short = _learning.runs(contestant="dense", task="text", steps=1000)
    dense = _learning.runs(contestant="dense", task="text", steps=2000)
    seeds = {run["seed"] for run in short}
    long = [run["value"] for run in dense if run["seed"] in seeds]
    doubling = statistics.mean(run["value"] for run in short) - statistics.mean(long)
    base = statistics.mean(run["value"] for run in dense)
    names = {
        ("agreed(few)", 0.05): "sparse_adamw",
        ("agreed(few)", 0.01): "sparse_adamw density=0.01",
        ("ok_topk", 0.01): "sparse_adamw, ok_topk",
    }
    for name, cases in _steps.MEASURED.items():
        for (workers, density), factor in cases.items():
            found = _learning.runs(
                contestant=names[name, density], workers=workers, task="text", steps=2000
            )
            above = statistics.mean(run["value"] for run in found) - base
            assert round(2 ** (above / doubling), 2) == factor, (name, workers, density)
