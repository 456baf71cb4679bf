"""How many entries Ok-Topk selects as published, and with thresholds that their counts correct.

    python -m benchmarks.training.paper_counts [--text FILE] [--images FOLDER]

The output has the form of Figure 6 of Ok-Topk. Algorithm 2, SGD with the learning rate inside the
accumulation, trains over simulated workers. Both thresholds are exact every tau' steps, and in
between reused without change (`paper=True`), or moved by their counts (`paper="corrected"`).

The program counts the entries that a worker selects (the mean of the workers) and the delivered
entries, at every step, as multiples of k. "deviation" is the mean of |count / k - 1| over the
steps; "after" leaves out the first 10 % of them, since the paper has most of the deviation in its
first epochs. Messages have room for four times k, so that no count is above that.
"""

import argparse
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import optax_ext

from .._common import display, options, reports
from ..learning import _tasks
from ._recorded_training import schedule
from ._simulated_training import AXIS, Variant, train

COUNTS, NUMBERS = ("local", "global"), ("deviation", "after", "mean")
RULES: dict[str, bool | str] = {"the text": True, "corrected": "corrected"}


class Setting(NamedTuple):
    """The defaults of a task: the peak learning rate of SGD, and the paper's k / n and tau'."""

    rate: float
    density: float
    period: int


SETTINGS = {
    "images": Setting(0.5, 0.01, 32),
    "lstm": Setting(5.0, 0.02, 32),
    "text": Setting(0.5, 0.01, 128),
}


def counts_of(name: str, rule: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains once for each seed, and counts: a list over the seeds of each number."""
    kind, setting = _tasks.KINDS[name], SETTINGS[name]
    task = _tasks.make(name, kind.width, args.text, args.images)
    # `ok_topk_sgd` at any tau'.
    sparse = optax_ext.ok_topk(
        setting.density,
        axis=AXIS,
        paper=RULES[rule],
        global_period=setting.period,
        local=optax.scale_by_schedule(schedule(setting.rate, args.steps)),
    )
    variant = Variant(optax.chain(sparse, optax.scale(-1.0)), optax.identity())
    given = {"workers": args.workers, "steps": args.steps, "every": max(1, args.steps // 8)}
    given |= {"batch": kind.batch, "label": f"tau' = {setting.period}, {rule}"}
    curves = [*train(task, lambda *_: variant, seeds=range(args.seeds), **given).values()]
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    k, first = max(1, round(setting.density * size)), max(1, args.steps // 10)
    # (seeds, local and global, steps)
    shares = np.array([curve.counts for curve in curves]) / k
    off = np.abs(shares - 1)
    row = {"task": name, "rule": rule, "steps": args.steps, "workers": args.workers, "k": k}
    row |= {"density": setting.density, "period": setting.period}
    row["value"] = [curve.values[-1] for curve in curves]
    for i, which in enumerate(COUNTS):
        numbers = (off[:, i].mean(-1), off[:, i, first:].mean(-1), shares[:, i].mean(-1))
        row[which] = {x: y.tolist() for x, y in zip(NUMBERS, numbers, strict=True)}
    return row


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains, and prints the table."""
    usual = {"workers": 8, "steps": 2000, "seeds": 3}
    usual |= {"tasks": (list(SETTINGS), None, SETTINGS)}
    args = options.parser_of(__doc__, "text", "images", "json", **usual).parse_args(argv)
    rows = []
    for case in itertools.product(args.tasks, RULES):
        rows.append(counts_of(*case, args))
        # After each, since the next one takes long.
        reports.write(args.json, rows)
    title = f"Counts of Ok-Topk / k, P = {args.workers}, {args.steps} steps, of each seed"
    display.show_rows(title, rows)


if __name__ == "__main__":
    raise SystemExit(main())
