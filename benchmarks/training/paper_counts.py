"""How many entries Ok-Topk selects as published, with thresholds that are reused as they are.

    python -m benchmarks.training.paper_counts [--text FILE] [--images FOLDER] [--plot FILE.png]

`optax_ext.ok_topk(paper=True)` trains over simulated workers: the local threshold and the global
one are exact every tau' steps and are reused in between. Counted are the entries that a worker
selects (the mean of the workers) and those that are delivered, at every step, as multiples of k:
the form of Figure 6 of Ok-Topk, which says that the average deviation from k is below 11 %.
"deviation" is the mean of |count / k - 1| over the steps; the first tenth is told apart, as the
paper has most of it in its first epochs. Messages have room for four times k, so that no count is
above that.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import optax_ext

from .._common import display, options, reports
from ..learning import _tasks
from ._recorded_training import MOMENTUM, schedule
from ._simulated_training import AXIS, Variant, train

COUNTS = ("local", "global")
RATES = {"text": 0.01, "lstm": 0.02, "images": 0.1}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=RATES, default=list(RATES))
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
    add("--workers", type=options.at_least_one, default=8, metavar="P")
    add("--steps", type=options.at_least_one, default=2000)
    add("--density", type=options.share, default=0.01)
    add("--periods", type=options.at_least_one, nargs="+", default=[32, 128], metavar="TAU")
    options.add_outputs(parser, plot=True)
    return parser.parse_args(argv)


def counts_of(name: str, period: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains once, and counts."""
    kind = _tasks.KINDS[name]
    task = _tasks.make(name, kind.width, args.text, args.images)
    rate = schedule(RATES[name], args.steps)
    adamw = kind.optimizer == _tasks.ADAMW
    behind = optax.adamw(rate) if adamw else optax.sgd(rate, momentum=MOMENTUM)
    exchange = optax_ext.ok_topk(args.density, axis=AXIS, paper=True, global_period=period)
    curve = train(
        task,
        Variant(exchange, behind),
        workers=args.workers,
        steps=args.steps,
        every=max(1, args.steps // 8),
        batch=kind.batch,
        seeds=[0],
        label=f"tau' = {period}",
    )[0]
    assert curve.counts is not None
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
    k = max(1, round(args.density * size))
    shares = curve.counts / k
    first = max(1, args.steps // 10)
    return {
        "task": name,
        "period": period,
        "k": k,
        "value": curve.values[-1],
        **{
            which: {
                "deviation": float(np.abs(share - 1).mean()),
                "first tenth": float(np.abs(share[:first] - 1).mean()),
                "after it": float(np.abs(share[first:] - 1).mean()),
                "mean": float(share.mean()),
                "shares": share.round(4).tolist(),
            }
            for which, share in zip(COUNTS, shares, strict=True)
        },
    }


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The counts over the steps, one panel for a run."""
    figure, panels = plt.subplots(
        1, len(rows), figsize=(3.4 * len(rows), 3), sharey=True, squeeze=False
    )
    for panel, row in zip(panels[0], rows, strict=True):
        for which, color in zip(COUNTS, ("tab:blue", "tab:orange"), strict=True):
            panel.plot(row[which]["shares"], linewidth=0.6, color=color, label=which)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"{row['task']}, tau' = {row['period']}", xlabel="step", yscale="log")
    panels[0, 0].set_ylabel("selected / k")
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains, and prints the table."""
    args = parse(argv)
    rows = [counts_of(name, period, args) for name in args.tasks for period in args.periods]
    head = ["task", "tau'", "k", *(f"{w}: {x}" for w in COUNTS for x in list(rows[0][w])[:4])]
    display.show(
        f"Ok-Topk as published, P = {args.workers}, {args.steps} steps, density {args.density:g}",
        head,
        [
            [
                row["task"],
                str(row["period"]),
                f"{row['k']:,}",
                *(f"{x:.3f}" for w in COUNTS for x in list(row[w].values())[:4]),
            ]
            for row in rows
        ],
    )
    if args.plot:
        draw(args.plot, rows)
    reports.write(args.json, rows)


if __name__ == "__main__":
    sys.exit(main())
