"""Loss after the same steps: `benchmarks.learning.steps`."""

import functools
import json
import statistics
from collections import Counter
from typing import Any, NamedTuple

from ._data import DATA, LABELS, Rows, blank_repeats, listed

# The workers that contestants of the same steps were run with; others with 8.
WORKERS = {"sparse_adamw": (4, 8, 16, 32), "sparse_adamw limit=1000": (4, 8)}
TEXT = {"task": "text", "steps": 2000, "width": 32, "rate": 0.02}
# Second moments by row and column: a task, and a learning rate if all have the same one.
MOMENTS = (
    ("`text`, 2,000 steps", "text", None),
    ("`text`, 2,000 steps, one learning rate", "text", 0.02),
    ("`words`, 600 steps", "words", None),
    ("`lstm`, 400 steps", "lstm", None),
    ("images, 600 steps, accuracy in %", "images-adamw", None),
)
# After a learning rate that is the smallest or the largest of those that were tried.
END = " (end)"


class Best(NamedTuple):
    """A contestant at its best learning rate.

    Attributes:
      name: its name in the benchmark.
      shown: its name in the manual.
      rate: with the lowest mean, of the learning rates that most seeds were run with.
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


def best_runs(names: dict[str, str], file: str, **wanted: Any) -> list[Best]:
    """The contestants of these names, with names to show, as far as there are such runs."""
    found = []
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
            rate = min(means, key=lambda rate: means[rate])
            # Both of two are at an end.
            edge = len(of_rate) > 2 and rate in (min(of_rate), max(of_rate))
            found.append(Best(name, shown, rate, edge, of_rate[rate]))
    return found


def loss_in_rounds(file: str) -> Rows:
    """Rounds of local steps at their best learning rates, next to an exchange at every step."""
    found, rows = best_runs(LABELS["loss_in_rounds"], file), []
    for one in found:
        # With 8 workers; a dense run, which is the same for all, has the same unit.
        words = one.words / (0.01 * one.size * (1 - 1 / 8))
        above = f"{100 * (one.mean / found[0].mean - 1):.1f} %"
        rows.append([one.shown, f"{words:.3g}", f"{one.rate:g}", f"{one.mean:.3f}", above])
    return rows


def table_loss_many_workers() -> Rows:
    """Ways to train with many workers at their best learning rates, above the dense run."""
    file, rows = "learning_many.jsonl", []
    (dense,) = best_runs({"dense": "dense"}, file)
    rows.append(["", dense.shown, "", dense.rate_shown, listed(dense.losses, 3), ""])
    for workers in sorted({run["workers"] for run in runs(file)} - {1}):
        for one in best_runs(LABELS["loss_many_workers"], file, workers=workers):
            if len(one.runs) < len(dense.runs):
                continue
            above = f"{statistics.mean(one.above(dense)):.1f} %"
            row = [f"{one.words:,.0f}", one.rate_shown, listed(one.losses, 3), above]
            rows.append([str(workers), one.shown, *row])
    return blank_repeats(rows)


table_loss_in_rounds = functools.partial(loss_in_rounds, "learning_rounds.jsonl")


def losses_by_bytes(width: int = 32) -> list[Best]:
    """The contestants of `learning_bytes.jsonl` with models of a width, the dense one first."""
    return best_runs(LABELS["loss_by_bytes"], "learning_bytes.jsonl", width=width)


def loss_by_bytes(width: int) -> Rows:
    """Loss after 4,000 steps, the most words first; of each seed above dense's of that seed."""
    found, rows = losses_by_bytes(width), []
    for one in sorted(found, key=lambda one: -one.words):
        line = [one.shown, f"{one.words:,.0f}", "1", one.rate_shown, f"{one.mean:.3f}", "", ""]
        if one.words < found[0].words:
            above = one.above(found[0])
            line[2] = f"1/{found[0].words / one.words:,.0f}"
            line[5:] = f"{statistics.mean(above):+.1f} %", ", ".join(f"{x:+.1f}" for x in above)
        rows.append(line)
    return rows


table_loss_by_bytes = functools.partial(loss_by_bytes, 32)
table_loss_by_bytes_wide = functools.partial(loss_by_bytes, 128)


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
    """Loss after the same steps, compared with dense."""

    def loss(found: list[dict[str, Any]]) -> str:
        values = [run["value"] for run in found]
        return f"{statistics.mean(values):.3f} ({statistics.stdev(values):.3f})"

    rows = [["dense AdamW", "any", "", loss(runs(contestant="dense", **TEXT)), "", ""]]
    for contestant, shown in LABELS["loss_after_steps"].items():
        for workers in WORKERS.get(contestant, (8,)):
            found = runs(contestant=contestant, workers=workers, **TEXT)
            above = above_dense(contestant, workers)
            # Words of a step, as a multiple of k (P-1)/P for k = 1 % of n.
            words = found[0]["words"] / (0.01 * found[0]["curve"]["size"] * (1 - 1 / workers))
            # A mean of -0.04 is 0.0.
            mean = round(statistics.mean(above), 1) + 0.0
            cells = [shown, str(workers), f"{words:.2f}", loss(found)]
            rows.append([*cells, f"{mean:.1f} %", listed(above, 1)])
    return blank_repeats(rows)


def table_loss_by_windows() -> Rows:
    """More windows for each worker, at the learning rates that are best for the first seed."""
    every = runs("learning_windows.jsonl") + runs(batch=32, **TEXT)
    sparse = {"sparse_adamw": "5 %", "sparse_adamw density=0.01": "1 %"}
    cases = {
        (x["contestant"], x["workers"], x["batch"] // x["workers"], x["steps"], x["width"])
        for x in every
        if x["contestant"] in sparse and x["workers"] > 4
    }
    rows = []
    for contestant, workers, windows, steps, width in sorted(cases, key=lambda x: (x[0], x[1:])):
        setting = {"batch": workers * windows, "steps": steps, "width": width}
        ends = []
        for name in ("dense", contestant):
            count = 1 if name == "dense" else workers
            found = [
                run
                for run in every
                if {**setting, "contestant": name, "workers": count}.items() <= run.items()
            ]
            best = min((run for run in found if not run["seed"]), key=lambda run: run["value"])
            ends.append({x["seed"]: x["value"] for x in found if x["rate"] == best["rate"]})
        dense, ours = ends
        assert dense.keys() == ours.keys(), (contestant, setting)
        above = [100 * (ours[seed] / dense[seed] - 1) for seed in sorted(ours)]
        mean = round(statistics.mean(above), 1) + 0.0
        losses = [listed([x[seed] for seed in sorted(x)], 3) for x in (dense, ours)]
        cells = [sparse[contestant], str(width), str(workers), str(windows), f"{steps:,}"]
        rows.append([*cells, *losses, f"{mean:.1f} %", listed(above, 1)])
    return blank_repeats(rows)


def table_moments() -> Rows:
    """Kept second moments: at the best learning rate of each, and at one learning rate."""
    rows = []
    for shown, task, rate in MOMENTS:
        dense: list[float] = []
        large = task.startswith("images")
        for contestant, name in LABELS["moments"].items():
            found = runs("learning_moments.jsonl", task=task, contestant=contestant)
            seeds = Counter(run["rate"] for run in found)
            whole = {at for at, count in seeds.items() if count == max(seeds.values())}
            of_first = [run for run in found if run["seed"] == 0 and run["rate"] in whole]
            best = max if large else min
            at = rate or best(of_first, key=lambda run: run["value"])["rate"]
            ends = [run["value"] for run in found if run["rate"] == at]
            values = [100 * end for end in ends] if large else ends
            cells = [shown, name, f"{at:g}", listed(values, 2 if large else 3)]
            if dense:
                # An accuracy is so many points below.
                pairs = zip(ends, dense, strict=True)
                above = [100 * (b - a if large else a / b - 1) for a, b in pairs]
                # As above, -0.04 is 0.0.
                mean, *each = (round(x, 1) + 0.0 for x in (statistics.mean(above), *above))
                unit = "points below" if large else "%"
                cells += [f"{mean:.1f} {unit}", listed(each, 1)]
            rows.append(cells if dense else [*cells, "", ""])
            dense = dense or ends
    return blank_repeats(rows)
