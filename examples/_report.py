"""What the training examples measure, and the table and figure they make of it."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.table import Table

FORMATS = (".pdf", ".png", ".svg")


class Run(NamedTuple):
    """What one training run measured; the arrays have one entry for each step.

    Attributes:
      size: n, the number of gradient components.
      accuracy: on the test images, after the last step.
      train_loss: on all training images, after the last step.
      losses: f64[steps], of the step's batch.
      words: f64[steps], received by each worker.
      selected: f64[steps, workers], components that each worker selected.
      delivered: f64[steps], components in the result that all workers apply.
      overflow: f64[steps, workers], selected components that found no slot and wait.
    """

    size: int
    accuracy: float
    train_loss: float
    losses: np.ndarray
    words: np.ndarray
    selected: np.ndarray
    delivered: np.ndarray
    overflow: np.ndarray


def traffic(infos, *, size: int, workers: int) -> dict[str, np.ndarray]:
    """Returns the counts of a run as arrays over steps.

    Args:
      infos: one `optax_ext.get_info` for each step. For a dense run each of them is None, and the
        counts are those of a ring allreduce: 2n(P-1)/P words for P workers.
      size: n, the number of gradient components.
      workers: P.
    """
    names = ("words", "selected", "delivered", "overflow")
    if infos[0] is None:
        everywhere = np.full((len(infos), workers), float(size))
        words = np.full(len(infos), 2 * size * (workers - 1) / workers)
        return dict(zip(names, (words, everywhere, everywhere[:, 0], 0 * everywhere), strict=True))
    return {name: np.asarray([getattr(i, name) for i in infos], np.float64) for name in names}


def summary(runs: dict[str, Run], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers of the table; counts are means over steps, and over workers."""
    n = next(iter(runs.values())).size
    k = max(1, round(options.density * n))

    def selection_error(run: Run) -> float | None:
        dense = run.selected.min() == n and k < n
        return None if dense else float(np.abs(run.selected - k).mean() / k)

    names = ("optimizer", "workers", "steps", "batch", "lr", "density", "seed")
    return {
        "n": n,
        "k": k,
        "bound": 6 * k * (options.workers - 1) / options.workers,
        **{name: getattr(options, name) for name in names},
        "runs": {
            name: {
                "test_accuracy": run.accuracy,
                "train_loss": run.train_loss,
                "words": float(run.words.mean()),
                "selected": float(run.selected.mean()),
                "delivered": float(run.delivered.mean()),
                "selection_error": selection_error(run),
                "overflow": float(run.overflow.mean()),
            }
            for name, run in runs.items()
        },
    }


def make_table(numbers: dict[str, Any]) -> Table:
    """Returns the comparison; its last row has the values to hold the columns against."""
    n, k, bound = numbers["n"], numbers["k"], numbers["bound"]
    most = max(row["words"] for row in numbers["runs"].values())
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title=f"{numbers['steps']} steps on {numbers['workers']} workers; counts are per step",
        caption="words: received by each worker; Ok-Topk's bound is 6k(P-1)/P",
    )
    table.add_column("")
    for header in (
        "test\naccuracy",
        "train\nloss",
        "\nwords",
        "\nof dense",
        "\ndelivered",
        "\noverflow",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for name, row in numbers["runs"].items():
        table.add_row(
            name,
            f"{row['test_accuracy']:.2%}",
            f"{row['train_loss']:.4f}",
            f"{row['words']:,.0f}",
            f"1/{most / row['words']:,.0f}" if row["words"] else "-",
            f"{row['delivered']:,.0f}",
            f"{row['overflow']:,.1f}",
        )
    table.add_section()
    compare_with = (f"n {n:,}\nbound {bound:,.0f}", "", f"k {k:,}")
    table.add_row("reference", "", "", *compare_with, style="dim")
    return table


def draw(runs: dict[str, Run], path: Path) -> None:
    """Writes the figure: loss against steps, and against the words each worker has received."""
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, run in runs.items():
        steps = np.arange(1, len(run.losses) + 1)
        # A mean over past steps only, so that the curve shows nothing before it happened.
        window = max(1, len(steps) // 60)
        total = np.cumsum(np.concatenate([[0.0], run.losses]))
        first = np.maximum(steps - window, 0)
        smooth = (total[steps] - total[first]) / (steps - first)
        for axes, x in ((left, steps), (right, np.cumsum(run.words))):
            (line,) = axes.plot(x, smooth, label=name)
            axes.plot(x, run.losses, color=line.get_color(), alpha=0.2, linewidth=0.7, zorder=1)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="words received per worker (4 bytes each)")
    if all(run.words[0] > 0 for run in runs.values()):  # a single worker receives nothing
        right.set_xscale("log")
    right.legend()
    write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:]))
    plt.close(figure)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a temporary file beside `path` and renames it, so no half file is seen."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
