"""The tables of numbers in the README are those of the files in docs/data and docs/evidence."""

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks._common.timing import quartiles

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows_of(name, head):
    """The rows of the table in a Markdown file that begins with ``head``, without backticks."""
    lines = iter((ROOT / name).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(head))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def interval(values, digits):
    """The least and the most of some numbers, as a cell has it; one number if they are alike."""
    low, high = (f"{x:.{digits}f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# Loss after the same seconds, and after the same steps.


def losses():
    """The table of the README: the mean over the seeds at the better of the two rates."""
    rows = [row for row in read(DATA / "learning_links.json")["rows"] if len(row["losses"]) > 1]
    shown = ["sparse_adamw", "powersgd(4) before AdamW", "PyTorch: float16"]
    shown += ["PyTorch: PowerSGD(4)", "dense"]
    return [
        [
            name,
            *(
                f"{statistics.mean(row['losses']):.2f}"
                for link in LINKS
                for row in rows
                if (row["method"], row["link"]) == (name, link)
            ),
        ]
        for name in shown
    ]


def test_losses_after_the_same_seconds():
    assert rows_of("README.md", "| after 20 seconds |") == losses()


def test_the_page_about_learning_has_every_seed():
    table = rows_of("docs/learning.md", "| | 100 Mbit/s: loss | steps | 1 Gbit/s: loss | steps |")
    written = {row[0].replace("*", ""): row[1:] for row in table}
    recorded = read(DATA / "learning_links.json")["rows"]
    assert {row["method"] for row in recorded} == set(written)
    for row in recorded:
        column = 2 * list(LINKS).index(row["link"])
        cells = written[row["method"]]
        if row["rate"] == 0.0015:
            parts = cells[4].split(";")
            assert parts[column // 2].strip() == f"{row['losses'][0]:.3f}"
        else:
            numbers = [f"{x:.3f}" for x in row["losses"]]
            assert re.findall(r"\d\.\d+", cells[column]) == numbers
            assert cells[column + 1] == str(row["steps"])


def test_what_is_said_of_the_same_steps():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = {
        row["workers"]: row["above_dense"]
        for row in read(DATA / "learning_steps.json")["rows"]
        if row["method"] == "sparse_adamw"
    }
    said = re.search(
        r"ended ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) % above the loss of the dense AdamW with "
        r"4, 8, 16 and 32 workers, in the mean of three seeds \(([\d.]+), ([\d.]+), ([\d.]+) and "
        r"([\d.]+) % with the worst\)",
        text,
    )
    assert said is not None
    assert [float(x) for x in said.groups()[4:]] == [max(rows[p]) for p in (4, 8, 16, 32)]
    means = [statistics.mean(rows[p]) for p in (4, 8, 16, 32)]
    # The mean of rounded numbers is off by up to 0.05, and so is what is said of it.
    assert [float(x) for x in said.groups()[:4]] == pytest.approx(means, abs=0.1)


# Words, times, memory.


def words():
    """The table of the README: shares of the paper's bound."""
    found = {
        series["line"]: dict(zip(series["x"], series["y"], strict=True))
        for series in read(ROOT / "docs" / "evidence" / "figures" / "curves.json")["series"]
        if series["figure"] == "words"
    }
    lines = {
        "Ok-Topk, entries evenly spread": "Ok-Topk, even step",
        "Ok-Topk, worst case": "Ok-Topk, worst step",
        "TopkA, an allgather of all selections": "TopkA",
        "dense allreduce": "dense",
    }
    return [
        [
            name,
            *(
                f"{share:.3g}" if share >= 10 else f"{share:.2f}"
                for p in (2, 4, 8, 16, 64, 256)
                for share in [found[line][p] / (6 * (p - 1) / p)]
            ),
        ]
        for name, line in lines.items()
    ]


def test_words():
    assert rows_of("README.md", "| workers | 2 | 4 |") == words()


def steps():
    """The table of the README: a whole step of one worker, as a share of `lax.top_k`."""
    names = {
        "jnp.nonzero(abs(acc) >= t, size=k) alone": "jnp.nonzero(abs(acc) >= t, size=k) alone",
        "ok_topk": "ok_topk, the whole step",
        "ok_topk, threshold_reuse": "ok_topk with threshold_reuse, the whole step",
        "dense (psum)": "dense, the whole step (one worker: a copy)",
    }
    runs = [read(path)["times"] for path in sorted(DATA.glob("step_cost*.json"))]
    return [
        [
            shown,
            interval([row["ratio"] for run in runs for row in run if row["contestant"] == name], 2),
        ]
        for name, shown in names.items()
    ]


def test_a_step_of_one_worker():
    assert rows_of("README.md", "| beside lax.top_k |") == steps()


def speedups(workers, params, link):
    """How many times as fast as dense: the medians of all runs, by method."""
    found = {}
    for path in sorted(DATA.glob("network*.json")):
        for point in read(path)["points"]:
            if (point["workers"], point["params"], point["link"]) == (workers, params, link):
                pairs = zip(point["baseline_seconds"], point["seconds"], strict=True)
                median = statistics.median(base / own for base, own in pairs)
                found.setdefault(point["method"], []).append(median)
    return found


def runs_over_links(file, link):
    """The table of docs/network.md of one run and one link."""
    rows = []
    for point in read(DATA / file)["points"]:
        if point["link"] == link:
            step = quartiles([1e3 * x for x in point["seconds"]])
            pairs = zip(point["baseline_seconds"], point["seconds"], strict=True)
            ratio = quartiles([base / own for base, own in pairs])
            rows.append(
                [
                    point["method"],
                    f"{step[1]:.0f} ({step[0]:.0f} to {step[2]:.0f})",
                    f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})",
                    f"{1e3 * statistics.median(point['cpu_seconds']):.0f}",
                    f"{statistics.mean(point['received']) / 1e6:.2f}",
                ]
            )
    return rows


RUNS = {
    "P = 4, n = 14.7M, 100 Mbit/s": ("network_4.json", "100mbit"),
    "P = 4, n = 14.7M, 1 Gbit/s": ("network_4.json", "1gbit"),
    "P = 4, n = 14.7M, 1 Gbit/s, again": ("network_4_again.json", "1gbit"),
    "P = 8, n = 1M, 1 Gbit/s": ("network_8.json", "1gbit"),
}


@pytest.mark.parametrize("title", RUNS)
def test_runs_over_links(title):
    assert rows_of("docs/network.md", f"| {title} |") == runs_over_links(*RUNS[title])


def links():
    """The table of the README: steps over links."""
    names = {
        "ok_topk": "ok_topk",
        "ok_topk/reuse/global32": "ok_topk, thresholds reused for 32 steps",
        "agreed": "agreed, the exchange of sparse_adamw",
        "sparse_adamw": "sparse_adamw, AdamW's arithmetic included",
        "powersgd1": "powersgd(1)",
        "powersgd1/adamw": "powersgd(1) before AdamW",
    }
    columns = [
        speedups(*where)
        for where in (
            (4, 14_700_000, "100mbit"),
            (4, 14_700_000, "1gbit"),
            (8, 1_000_000, "1gbit"),
        )
    ]
    return [
        [shown, *(interval(column[name], 1) if name in column else "" for column in columns)]
        for name, shown in names.items()
    ]


def test_steps_over_links():
    assert rows_of("README.md", "| times as fast as dense |") == links()


def compile_seconds():
    """The table of the README: seconds until the first step has begun."""
    found = read(DATA / "compile_time.json")["rows"]
    names = list(dict.fromkeys(row["contestant"] for row in found))
    sizes = list(dict.fromkeys(row["size"] for row in found))
    at = {(row["contestant"], row["size"]): row["seconds"] for row in found}
    return [[name, *(f"{at[name, size][1]:.1f}" for size in sizes)] for name in names]


def test_compile_times():
    assert rows_of("README.md", "| seconds to compile |") == compile_seconds()


def test_memory():
    found = read(DATA / "state_memory.json")
    assert rows_of("docs/training.md", "| option | state, bytes per parameter |") == [
        [row["option"], f"{row['state']:.2f}", f"{row['temporary']:.1f}"] for row in found
    ]
    # The README says it of two of them.
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"`ok_topk` keeps (\d) bytes .* and `sparse_adamw` (\d),", text)
    assert said is not None
    kept = {row["option"]: row["state"] for row in found}
    assert [f"{kept[name]:.0f}" for name in ("ok_topk", "sparse_adamw")] == list(said.groups())


def test_what_flush_costs():
    text = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    found = {row["method"]: row["accuracy"] for row in read(DATA / "flush_cost.json")["rows"]}
    five, one = found["sparse_adamw, 5%"], found["sparse_adamw, 1%"]
    before, after, low, high = (
        f"{x:.1f}" for x in (*map(statistics.mean, five), *map(statistics.mean, one))
    )
    assert f"{before} % test accuracy before `flush` and {after} % after it" in text
    assert f"({min(five[1]):.1f} with the worst)" in text
    assert f"at a density of 1 % {low} and {high} %" in text
    assert f"dense AdamW {statistics.mean(found['dense'][0]):.1f} %" in text


def test_the_count_of_claims():
    page = (ROOT / "docs" / "evidence" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*(\d+) claims, (\d+) of them checked", page)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert found is not None
    assert f"lists {found[1]} claims" in text
    assert f"checks {found[2]} of them" in text


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 400_000
