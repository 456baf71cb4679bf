"""The tables of docs/choosing.md: a selection of those of other pages, of the same data."""

import re
import statistics

from . import _learning, _links, _timed, _trainings
from ._data import interval, mean, read
from ._links import runs, speedups
from ._pages import Rows
from ._printed import printed


def _table(page: str, head: str) -> Rows:
    """A table of a page of which the cells are kept."""
    return next(
        rows
        for (on, begins, _), rows in printed().items()
        if on == page and begins.startswith(head)
    )


def _numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"\d+\.\d+", text)]


def is_it_faster() -> Rows:
    """Speed-up of a step, as README has it, and of two methods more."""
    return _links.of_all_runs(_links.SHOWN | _links.MORE)


def adamw() -> Rows:
    """Loss after the same steps above that of dense."""

    def row(shown: str, contestant: str, workers: int) -> list[str]:
        above = _learning.above_dense(contestant, workers)
        found = _learning.runs(contestant=contestant, workers=workers, task="text", steps=2000)
        gap = [f"{round(x, 1) + 0.0:.1f} %" for x in (statistics.mean(above), max(above))]
        return [shown, str(workers), _learning.words(found[0]), *gap]

    counts = (4, 8, 16, 32)
    rows = [row("" if p > 4 else "`sparse_adamw`", "sparse_adamw", p) for p in counts]
    rows.append(row("`sparse_adamw(density=0.01)`", "sparse_adamw density=0.01", 8))
    name = "`sparse_adamw(density=0.01, exchange=ok_topk(...))`"
    rows.append(row(name, "sparse_adamw, ok_topk", 8))
    short, long, longest = _table("docs/convergence.md", "| steps | dense |")
    gap = [re.search(r"\(\+(.*)\)", row[2]) for row in (short, long, longest)]
    plain = re.search(r"\(\+(\d+)\.\d+ %\)", short[3])
    assert plain is not None
    assert all(gap)
    first, *later = (found[1] for found in gap if found)
    several = "the same with a dense tenth and small leaves dense, one seed"
    return [
        *rows,
        ["`ok_topk(0.01)` in front of AdamW, one seed", "16", "no fewer", f"{plain[1]} %", ""],
        [several, "16", "more", first, ""],
        ["the same, 8,000 and 40,000 steps, one seed", "16", "more", ", ".join(later), ""],
    ]


def in_the_same_seconds() -> Rows:
    """Loss over links: a transformer, and word embeddings."""
    text = {row[0]: row[1:] for row in _learning.over_links_short()}
    words = {
        row[0]: row for row in _table("docs/learning.md", "| | 100 Mbit/s: loss | ms a step |")
    }

    def embeddings(name: str, which: int = 0, of: int = 1) -> list[str]:
        found = [_numbers(words[name][column]) for column in (1, 3)]
        return [mean(x[which::of] if of > 1 else x, 2) for x in found]

    lowest = "PyTorch: PowerSGD(1), (2), (4)"
    no_limit = "`sparse_adamw`, `limit=None`"
    rows = [["`sparse_adamw`", *text["`sparse_adamw`"], *embeddings("`sparse_adamw`")]]
    rows.append(["`sparse_adamw(limit=None)`", "", "", *embeddings(f"**{no_limit}**")])
    name = "`powersgd(4)` before AdamW"
    rows.append([name, *text[name], *embeddings(name)])
    rows.append(["PyTorch, float16", *text["PyTorch: float16"], *embeddings("PyTorch: float16")])
    last = embeddings(lowest, which=2, of=3)
    rows.append(["PyTorch, PowerSGD(4)", *text["PyTorch: PowerSGD(4)"], *last])
    rows.append(["dense", *text["dense"], *embeddings("dense")])
    name = "`ok_topk` before AdamW"
    rows.append([name, "", "", *embeddings(name)])
    return rows


def sgd() -> Rows:
    """Accuracy below that of dense, of the task with images."""
    table = _table("docs/learning.md", "| task | P, steps, rates |")
    first = next(i for i, row in enumerate(table) if row[0].startswith("`images`"))
    four, sixteen, tenth = table[first : first + 3]
    dense = _numbers(four[2].split("%")[0])

    def below(text: str) -> tuple[float, float]:
        each = [a - b for a, b in zip(dense, _numbers(text), strict=True)]
        return statistics.mean(each), max(each)

    def accuracies(cell: str) -> str:
        return cell.split("`ok_topk_sgd`")[1].split("(")[0]

    rows = []
    for workers, row in (("4", four), ("16", sixteen)):
        middle, worst = below(accuracies(row[3]))
        name = "`ok_topk_sgd`" if workers == "4" else ""
        rows.append([name, workers, f"{middle:.2f} points", f"{worst:.2f}"])
    one = _numbers(four[3].split("`sparse_sgd`")[1].split("(")[0])
    rows.append(["`sparse_sgd`, one seed", "4", f"{dense[0] - one[0]:.1f} points", ""])
    middle, worst = below(accuracies(tenth[3]))
    rows.append(["`ok_topk_sgd` at 0.1 %", "4", f"{middle:.1f} points", f"{worst:.1f}"])
    return rows


def short_of_cores() -> Rows:
    """Four processes on two cores: the least and the most of the medians of the runs."""
    point = (4, 14_700_000, "1gbit")
    found = speedups(*point)
    names = {
        "agreed": "`agreed` at 1 %, SGD behind it",
        "powersgd1/adamw": "`powersgd(1)` before AdamW",
        "sparse_adamw": "`sparse_adamw` at 5 %",
        "alone/adamw": "AdamW that exchanges nothing",
    }

    def milliseconds(method: str) -> list[float]:
        return [
            1e3 * statistics.median(row["cpu_seconds"])
            for _, row in runs()
            if (row["workers"], row["params"], row["link"], row["method"]) == (*point, method)
        ]

    return [
        [shown, interval(found[name], 1), interval(milliseconds(name), 0)]
        for name, shown in names.items()
        if name in found
    ]


def exchanges() -> Rows:
    """Which exchange, by the workers, and its words."""
    found = read("traffic.json")["algorithms"]
    at = {(row["algorithm"], row["workers"]): row for row in found}

    def words(name: str, workers: tuple[int, ...], case: str, digits: int = 1) -> str:
        return interval([at[name, p][case] / at[name, p]["k"] for p in workers], digits)

    two, more, many = (2,), (3, 384), (6, 384)
    best, worst = words("ok_topk", more, "best"), words("ok_topk", more, "worst")
    levels = interval(
        [at[name, p]["worst"] / at[name, p]["k"] for name in ("spardl", "gtopk") for p in many], 1
    )
    return [
        [
            "2",
            "`topk_a`",
            words("topk_a", two, "worst"),
            f"`ok_topk` {words('ok_topk', two, 'best')} in its best step, more messages",
        ],
        [
            "3 to some hundred, slow links",
            "`ok_topk`",
            f"{best} (worst step {worst})",
            f"`topk_a` {words('topk_a', more, 'worst', 0)}",
        ],
        [
            "the same, each message slow to start",
            "`spardl`, `gtopk`",
            levels,
            "nearly the largest sums: 94 and 95 % of the magnitude with 8 workers",
        ],
        [
            "nodes with fast links inside",
            "`hierarchical` around one of them",
            "between nodes only",
            "`torus_2d`, if dense",
        ],
        [
            "any number, whole sums wanted",
            "`agreed`",
            words("agreed", (2, 384), "worst"),
            "takes entries in turn: up to P steps of waiting",
        ],
    ]


def wishes() -> Rows:
    """Which selector and which encoding."""
    speed = {row[0]: row[3] for row in _timed.selectors()}
    quality = {row[0]: row for row in _trainings.quality()}
    shares = [_percents(quality["`layerwise(topk)`"][i])[0] for i in (3, 6)]
    steps = {row[0]: row for row in _table("docs/network.md", "| method | 1 Gbit/s | quartiles |")}
    narrow, exact = steps["`ok_topk/reuse/narrow16`"], steps["`ok_topk/reuse`"]
    parts = {row[0]: row[2].split()[0] for row in _links.parts()}
    newer = [parts[f"`ok_topk/reuse{codec}`"] for codec in ("/narrow16", "")]
    return [
        [
            "nothing special",
            "`select.topk`, exact",
            f"{speed['`topk`']} of the time of `lax.top_k` (n = 2^24, two cores)",
        ],
        ["less computing", "`select.threshold_reuse`", "k within a few percent"],
        [
            "each layer its share",
            "`select.layerwise(...)`",
            f"{min(shares)} to {max(shares)} % of the entries of the exact choice",
        ],
        [
            "fewer bytes on 100 Mbit/s",
            "`wire.narrow16()`",
            f"{narrow[3]} times dense, where exact pairs gave {exact[3]} (an older run)",
        ],
        [
            "fewer bytes on 1 Gbit/s",
            "exact pairs",
            f"`narrow16` gave {newer[0]}, exact pairs {newer[1]} (a newer run): the cores decide",
        ],
    ]


def sharded() -> Rows:
    """Parameters that are sharded inside a site."""
    rows = []
    for i, row in enumerate(_timed.sites()):
        kind = row[0].replace("tensor parallel", "tensor parallelism")
        first, second = (_numbers(cell)[0] for cell in row[3:5])
        beside = " times as fast as dense" if i == 0 else ""
        rows.append([kind, row[1], f"{first:.1f}{beside}", f"{second:.1f}"])
    return rows


def _percents(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"(\d+) %", text)]
