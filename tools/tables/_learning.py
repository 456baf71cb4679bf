"""Loss after the same steps: `benchmarks.learning.steps`."""

import json
import statistics
from collections import Counter
from typing import Any, NamedTuple

from benchmarks.learning._tasks import KINDS

from ._data import DATA, LABELS, Rows, blank_repeats

# The workers that contestants of the same steps were run with; others with 8.
WORKERS = {"sparse_adamw": (4, 8, 16, 32), "sparse_adamw limit=1000": (4, 8)}
TEXT = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02}
# Second moments by row and column: a task, and a learning rate if all have the same one.
MOMENTS = (
    ("`text`, 2,000 steps: % above", "text", None),
    ("the same at a learning rate of 0.02", "text", 0.02),
    ("images, 600 steps: points of accuracy below", "images-adamw", None),
)
# After a learning rate that is the smallest or the largest of those that were tried.
END = " (end)"


class Best(NamedTuple):
    """A contestant at its best learning rate.

    Attributes:
      name: its name in the benchmark.
      shown: its name in the manual.
      rate: with the best mean, of the learning rates that most seeds were run with.
      edge: whether it is the smallest or the largest of more than two that were tried.
      runs: one for each seed.
    """

    name: str
    shown: str
    rate: float
    edge: bool
    runs: list[dict[str, Any]]
    losses = property(lambda self: [run["value"] for run in self.runs])
    mean = property(lambda self: statistics.mean(self.losses))
    words = property(lambda self: self.runs[0]["words"])
    size = property(lambda self: self.runs[0]["curve"]["size"])
    rate_shown = property(lambda self: f"{self.rate:g}{END if self.edge else ''}")

    def above(self, other: "Best") -> list[float]:
        """Percent by which the loss of each seed is above the other's of that seed."""
        theirs = {run["seed"]: run["value"] for run in other.runs}
        return [100 * (run["value"] / theirs[run["seed"]] - 1) for run in self.runs]


def best_runs(
    names: dict[str, str], file: str, *, large: bool = False, **wanted: Any
) -> list[Best]:
    """The contestants of these names, with names to show, as far as there are such runs.

    The best value is the smallest one, or with ``large`` the largest.
    """
    found, choose = [], max if large else min
    for name, shown in names.items():
        of_rate: dict[float, list[dict[str, Any]]] = {}
        for run in runs(file, contestant=name, **wanted):
            of_rate.setdefault(run["rate"], []).append(run)
        if of_rate:
            # A mean over fewer seeds may be lower by luck.
            most = max(map(len, of_rate.values()))
            means = {
                rate: statistics.mean(run["value"] for run in at)
                for rate, at in of_rate.items()
                if len(at) == most
            }
            rate = choose(means, key=lambda rate: means[rate])
            # Both of two are at an end.
            edge = len(of_rate) > 2 and rate in (min(of_rate), max(of_rate))
            found.append(Best(name, shown, rate, edge, of_rate[rate]))
    return found


def table_loss_many_workers() -> Rows:
    """Ways to train with many workers at their best learning rates, above the dense run."""
    file, rows = "learning_many.jsonl", []
    for steps in sorted({run["steps"] for run in runs(file)}):
        (dense,) = best_runs({"dense": "dense"}, file, steps=steps)
        for workers in sorted({run["workers"] for run in runs(file, steps=steps)} - {1}):
            labels = LABELS["loss_many_workers"]
            for one in best_runs(labels, file, steps=steps, workers=workers):
                if len(one.runs) == len(dense.runs):
                    row = [f"{steps:,}", str(workers), one.shown, _above(one, dense)]
                    rows.append([*row, one.rate_shown, f"{one.words:,.0f}"])
    return blank_repeats(rows, 2)


def _above(one: Best, dense: Best) -> str:
    """How far the mean is above the dense one, and in brackets the seed that is worst."""
    above = [round(x, 1) + 0.0 for x in one.above(dense)]
    mean = round(statistics.mean(one.above(dense)), 1) + 0.0
    return f"{mean:+.1f} % ({max(above):+.1f})"


def losses_by_bytes(width: int = 32) -> list[Best]:
    """The contestants of `learning_bytes.jsonl` with models of a width, the dense one first."""
    return best_runs(LABELS["loss_by_bytes"], "learning_bytes.jsonl", width=width)


def table_loss_flushed() -> Rows:
    """Losses before and after a flush, with the means and the worst seed of the change."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs("learning_flushed.jsonl"):
        shown = LABELS["loss_by_bytes"][run["contestant"]]
        found.setdefault((f"{run['size']:,}", f"{run['steps']:,}", shown), []).append(run)
    rows = []
    for key, of in found.items():
        before, after = (statistics.mean(run[name] for run in of) for name in ("value", "flushed"))
        change = [100 * (run["flushed"] / run["value"] - 1) for run in of]
        by = f"{statistics.mean(change):+.1f} % ({max(change):+.1f})"
        rows.append([*key, str(len(of)), f"{before:.3f}", f"{after:.3f}", by])
    return blank_repeats(rows, 2)


def table_workers_apart() -> Rows:
    """Workers with examples of their own: the best learning rate, and how much worse than dense."""
    rows, file = [], "learning_apart.jsonl"
    for task, shown in LABELS["workers_apart_tasks"].items():
        large = KINDS[task].large
        dense, *others = best_runs(LABELS["workers_apart"], file, large=large, task=task)
        value = "{:.1%}" if large else "{:.3f}"
        rows.append([shown, dense.shown, value.format(dense.mean).replace("%", " %"), ""])
        for one in others:
            pairs = zip(one.losses, dense.losses, strict=True)
            points = [100 * (theirs - ours) for ours, theirs in pairs]
            worse, unit = (points, "points") if large else (one.above(dense), "%")
            by = f"{statistics.mean(worse):.1f} {unit} ({max(worse):.1f})"
            rows.append([shown, one.shown, value.format(one.mean).replace("%", " %"), by])
    return blank_repeats(rows)


def table_loss_by_bytes() -> Rows:
    """Loss of the wider model after 4,000 steps, the most words first."""
    dense, *others = losses_by_bytes(128)
    shown = [x for x in others if x.name not in LABELS["loss_by_bytes_left_out"]["names"]]
    shown.sort(key=lambda one: -one.words)
    rows = [
        [x.shown, _above(x, dense), f"1/{dense.words / x.words:,.0f}".removesuffix("/1")]
        for x in shown
    ]
    return [[dense.shown, f"0 (loss {dense.mean:.3f})", "1"], *rows]


def runs(file: str = "learning_steps.jsonl", /, **wanted: Any) -> list[dict[str, Any]]:
    """Runs of `benchmarks.learning.steps`, by their seed."""
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    fitting = [run for run in map(json.loads, lines) if wanted.items() <= run.items()]
    return sorted(fitting, key=lambda run: run["seed"])


def above_dense(contestant: str, workers: int) -> list[float]:
    """How far each seed is above the dense loss, in percent, after 2,000 steps of text."""
    dense = runs(contestant="dense", **TEXT)
    found = runs(contestant=contestant, workers=workers, **TEXT)
    assert [run["seed"] for run in found] == [run["seed"] for run in dense], contestant
    return [100 * (a["value"] / b["value"] - 1) for a, b in zip(found, dense, strict=True)]


def table_loss_after_steps() -> Rows:
    """How far the loss after the same steps is above dense, and the words of a step."""
    rows = []
    for contestant, shown in LABELS["loss_after_steps"].items():
        for workers in WORKERS.get(contestant, (8,)):
            above = above_dense(contestant, workers)
            found = runs(contestant=contestant, workers=workers, **TEXT)[0]
            # Words of a step, as a multiple of k (P-1)/P for k = 1 % of n.
            words = found["words"] / (0.01 * found["curve"]["size"] * (1 - 1 / workers))
            # A mean of -0.04 is 0.0.
            mean = round(statistics.mean(above), 1) + 0.0
            worst = f"{max(above):.1f}"
            rows.append([shown, str(workers), f"{mean:.1f} % ({worst})", f"{words:.2f}"])
    return blank_repeats(rows)


def table_moments() -> Rows:
    """Kept second moments at the best learning rate of each, compared with dense AdamW."""
    rows = []
    for shown, task, rate in MOMENTS:
        dense: list[float] = []
        large, line = task.startswith("images"), [shown]
        for contestant in LABELS["moments"]:
            found = runs("learning_moments.jsonl", task=task, contestant=contestant)
            seeds = Counter(run["rate"] for run in found)
            whole = {at for at, count in seeds.items() if count == max(seeds.values())}
            of_first = [run for run in found if run["seed"] == 0 and run["rate"] in whole]
            best = max if large else min
            at = rate or best(of_first, key=lambda run: run["value"])["rate"]
            ends = [run["value"] for run in found if run["rate"] == at]
            if dense:
                # An accuracy is so many points below.
                pairs = zip(ends, dense, strict=True)
                above = [100 * (b - a if large else a / b - 1) for a, b in pairs]
                # As above, -0.04 is 0.0.
                mean, worst = (round(x, 1) + 0.0 for x in (statistics.mean(above), max(above)))
                line.append(f"{mean:.1f} ({worst:.1f})")
            dense = dense or ends
        rows.append(line)
    return rows
