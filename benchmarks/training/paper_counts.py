"""How many entries Ok-Topk selects as published, and with thresholds that their counts correct.

    python -m benchmarks.training.paper_counts [--text FILE] [--images FOLDER] [--plot FILE.png]

The form of Figure 6 of Ok-Topk, which says that the average deviation from k is below 11 %.
Algorithm 2, SGD with the learning rate inside the accumulation, trains over simulated workers. Both
thresholds are exact every tau' steps. In between they are reused as they are, as the text says
(`paper=True`), or moved by their counts, as in the program that the paper links to
(`paper="corrected"`). Densities and tau' are those of the paper's VGG-16, LSTM and BERT.

Counted are the entries that a worker selects (the mean of the workers) and those that are
delivered, at every step, as multiples of k. "deviation" is the mean of |count / k - 1| over the
steps; "after" is that without the first tenth, as the paper has most of it in its first epochs.
Messages have room for four times k, so that no count is above that.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import optax_ext

from .._common import display, options, reports
from ..learning import _tasks
from ._recorded_training import schedule
from ._simulated_training import AXIS, Variant, train

COUNTS = ("local", "global")
RULES: dict[str, bool | str] = {"the text": True, "corrected": "corrected"}


class Setting(NamedTuple):
    """What is usual for a task.

    Attributes:
      rate: the peak of that of SGD without momentum.
      density: k / n, of the paper's network of this kind.
      period: its tau'.
    """

    rate: float
    density: float
    period: int


SETTINGS = {
    "images": Setting(0.5, 0.01, 32),
    "lstm": Setting(5.0, 0.02, 32),
    "text": Setting(0.5, 0.01, 128),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--workers", type=options.at_least_one, default=8, metavar="P")
    add("--steps", type=options.at_least_one, default=2000)
    add("--seeds", type=options.at_least_one, default=3)
    options.add_outputs(parser, plot=True)
    return parser.parse_args(argv)


def algorithm_2(setting: Setting, steps: int, paper: bool | str) -> optax.GradientTransformation:
    """Ok-Topk SGD with the thresholds of the paper; :func:`optax_ext.ok_topk_sgd` at any tau'."""
    sparse = optax_ext.ok_topk(
        setting.density,
        axis=AXIS,
        paper=paper,
        global_period=setting.period,
        local=optax.scale_by_schedule(schedule(setting.rate, steps)),
    )
    return optax.chain(sparse, optax.scale(-1.0))


def counts_of(name: str, rule: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains once for each seed, and counts: a list over the seeds of each number."""
    kind, setting = _tasks.KINDS[name], SETTINGS[name]
    task = _tasks.make(name, kind.width, args.text, args.images)
    curves = train(
        task,
        Variant(algorithm_2(setting, args.steps, RULES[rule]), optax.identity()),
        workers=args.workers,
        steps=args.steps,
        every=max(1, args.steps // 8),
        batch=kind.batch,
        seeds=range(args.seeds),
        label=f"tau' = {setting.period}, {rule}",
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    k = max(1, round(setting.density * size))
    first = max(1, args.steps // 10)
    # (seeds, local and global, steps)
    shares = np.array([curve.counts for curve in curves]) / k
    off = np.abs(shares - 1)
    return {
        "task": name,
        "rule": rule,
        "steps": args.steps,
        "workers": args.workers,
        "density": setting.density,
        "period": setting.period,
        "k": k,
        "value": [curve.values[-1] for curve in curves],
        **{
            which: {
                "deviation": off[:, i].mean(-1).tolist(),
                "after": off[:, i, first:].mean(-1).tolist(),
                "mean": shares[:, i].mean(-1).tolist(),
            }
            for i, which in enumerate(COUNTS)
        },
        "shares": shares[0],
    }


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The counts over the steps with the first seed, one panel for a run."""
    figure, panels = plt.subplots(
        1, len(rows), figsize=(3.4 * len(rows), 3), sharey=True, squeeze=False
    )
    for panel, row in zip(panels[0], rows, strict=True):
        for which, shares, color in zip(
            COUNTS, row["shares"], ("tab:blue", "tab:orange"), strict=True
        ):
            panel.plot(shares, linewidth=0.6, color=color, label=which)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"{row['task']}, {row['rule']}", xlabel="step", yscale="log")
    panels[0, 0].set_ylabel("selected / k")
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains, and prints the table."""
    args = parse(argv)
    rows = []
    for name in args.tasks:
        for rule in RULES:
            rows.append(counts_of(name, rule, args))
            # After each, as the next one takes long.
            kept = [{x: row[x] for x in row if x != "shares"} for row in rows]
            reports.write(args.json, kept)
    display.show(
        f"Counts of Ok-Topk, P = {args.workers}, {args.steps} steps, of {args.seeds} seeds the "
        "least to the most",
        ["task", "thresholds", *(f"{w}: {x}" for w in COUNTS for x in rows[0][w])],
        [
            [
                row["task"],
                row["rule"],
                *(_interval(numbers) for w in COUNTS for numbers in row[w].values()),
            ]
            for row in rows
        ],
    )
    if args.plot:
        draw(args.plot, rows)


def _interval(numbers: list[float]) -> str:
    return f"{min(numbers):.3f} to {max(numbers):.3f}"


if __name__ == "__main__":
    sys.exit(main())
