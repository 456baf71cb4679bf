"""Measurements of the training examples, and the table and figure that show them."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter
from rich import box
from rich.table import Table

Style = dict[str, Any]

# The gaps to dense in docs/learning.md are after this many steps.
SHORT = 2000


class HeldOut(NamedTuple):
    """Measurements on images that no step has seen.

    Attributes:
      over_steps: the loss after so many steps.
      losses: f64[images], of each after the last step.
      right: f64[images], how often each is classified correctly after the last step.
    """

    over_steps: dict[int, float]
    losses: np.ndarray
    right: np.ndarray


class Run(NamedTuple):
    """Measurements of one training run; the arrays have one entry for each step.

    Attributes:
      size: n, the number of gradient components.
      accuracy: on the test images, after the last step.
      train_loss: on all training images, after the last step.
      losses: f64[steps], of the step's batch.
      words: f64[steps], received by each worker.
      selected: f64[steps, workers], components that each worker selected; f64[steps, 1] in a
        dense run, in which all workers have all of them.
      delivered: f64[steps], components in the result that all workers apply.
      overflow: as `selected`: the ones that found no slot, and stay in the residual.
      held_out: the losses of the test images, if they were measured.
    """

    size: int
    accuracy: float
    train_loss: float
    losses: np.ndarray
    words: np.ndarray
    selected: np.ndarray
    delivered: np.ndarray
    overflow: np.ndarray
    held_out: HeldOut | None = None


def traffic(infos) -> dict[str, np.ndarray]:
    """Returns the counts of a run as arrays over steps, from `optax_ext.get_info` of each step."""
    names = ("words", "selected", "delivered", "overflow")
    return {name: np.asarray([getattr(i, name) for i in infos], np.float64) for name in names}


def summary(runs: dict[str, Run], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers of the table; counts are means over steps, and over workers."""
    n = next(iter(runs.values())).size
    k = max(1, round(options.density * n))

    def selection_error(run: Run) -> float | None:
        dense = run.selected.min() == n and k < n
        return None if dense else float(np.abs(run.selected - k).mean() / k)

    def against_first(run: Run) -> dict[str, float]:
        """Compares on the same images, so that their common part adds no noise."""
        (first, *_), now = (run.held_out for run in runs.values()), run.held_out
        if first is None or now is None:
            return {}
        pairs = {"loss": now.losses - first.losses, "accuracy": now.right - first.right}
        return {
            "test_loss": float(now.losses.mean()),
            **{f"{name}_above": float(pair.mean()) for name, pair in pairs.items()},
            **{f"{name}_error": _error_of_mean(pair) for name, pair in pairs.items()},
        }

    names = ("optimizer", "workers", "steps", "batch", "lr", "density", "noise", "seed")
    return {
        "n": n,
        "k": k,
        "bound": 6 * k * (options.workers - 1) / options.workers,
        **{name: getattr(options, name) for name in names},
        "runs": {
            name: {
                "test_accuracy": run.accuracy,
                "train_loss": run.train_loss,
                **against_first(run),
                "words": float(run.words.mean()),
                "selected": float(run.selected.mean()),
                "delivered": float(run.delivered.mean()),
                "selection_error": selection_error(run),
                "overflow": float(run.overflow.mean()),
            }
            for name, run in runs.items()
        },
    }


def _error_of_mean(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def title_of(numbers: dict[str, Any]) -> str:
    """A line that describes the training."""
    return (
        f"{numbers['n']:,} parameters, {numbers['workers']} workers, {numbers['steps']} steps, "
        f"batch {numbers['batch']}, noise {numbers['noise']:g}, seed {numbers['seed']}"
    )


def remarks(numbers: dict[str, Any]) -> list[str]:
    """Lines on the results in the table, and on how much of them is chance."""
    (first, _), *others = numbers["runs"].items()
    lines = []
    for name, row in others:
        loss, error = row["loss_above"], row["loss_error"]
        clear = abs(loss) > 2 * error
        lines.append(
            f"{name}: held-out loss {loss:+.4f} +- {error:.4f} and accuracy "
            f"{100 * row['accuracy_above']:+.2f} +- {100 * row['accuracy_error']:.2f} points "
            f"against {first}" + ("." if clear else ": within the noise of these images.")
        )
    lines.append(
        "+- is the standard error over the held-out images. Another --seed moves the results, too: "
        "compare several."
    )
    above = any(row["loss_above"] > 2 * row["loss_error"] for _, row in others)
    if above and numbers["steps"] < SHORT:
        lines.append(
            f"{numbers['steps']} steps are a short run: an entry waits for many of them until it "
            "is sent, so the gap to dense shrinks in longer runs (docs/learning.md)."
        )
    return lines


def make_table(numbers: dict[str, Any]) -> Table:
    """Returns the comparison; its last row has the values to compare the columns with."""
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
        "test\nloss",
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
            f"{row['test_loss']:.4f}",
            f"{row['train_loss']:.4f}",
            f"{row['words']:,.0f}",
            f"1/{most / row['words']:,.0f}" if row["words"] else "-",
            f"{row['delivered']:,.0f}",
            f"{row['overflow']:,.1f}",
        )
    table.add_section()
    compare_with = (f"n {n:,}\nbound {bound:,.0f}", "", f"k {k:,}")
    table.add_row("reference", "", "", "", *compare_with, style="dim")
    return table


def draw(runs: dict[str, Run], path: Path, *, title: str = "") -> None:
    """Writes the figure: loss against steps, and against the words each worker has received.

    A held-out loss is drawn as a thick line, and the loss of the batches then as a thin one.
    """
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5), sharey=True, layout="constrained")
    thick: Style = {"linewidth": 2.0}
    thin: Style = {"linewidth": 0.8, "alpha": 0.45, "zorder": 1}
    held_out = all(run.held_out for run in runs.values())
    for i, (name, run) in enumerate(runs.items()):
        batches = _smooth(run.losses)
        steps = np.arange(1, len(batches) + 1)
        words = np.cumsum(run.words)
        share = run.delivered.mean() / run.size
        label = (
            f"{name}: density {100 * share:.3g} %, {run.words.mean():,.0f} words a step, "
            f"test accuracy {100 * run.accuracy:.1f} %"
        )
        for axes, x in ((left, steps), (right, words)):
            axes.plot(x, batches, color=f"C{i}", **(thin if held_out else thick))
            if run.held_out:
                at = np.asarray(list(run.held_out.over_steps))
                looks = list(run.held_out.over_steps.values())
                axes.plot(x[at - 1], looks, color=f"C{i}", **thick)
        left.plot([], [], color=f"C{i}", linewidth=2, label=label)
    kind = "loss: held-out (thick), batches (thin)" if held_out else "loss of the batches"
    left.set(xlabel="step", ylabel=kind, yscale="log")
    bottom, top = left.get_ylim()
    ticks = (1, 2, 3, 5) if top < 30 * bottom else (1,)
    left.yaxis.set_major_locator(LogLocator(subs=ticks))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    right.set(xlabel="words received by each worker, of 4 bytes")
    if all(run.words[0] > 0 for run in runs.values()):  # a single worker receives nothing
        right.set_xscale("log")
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.5)
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:]))
    plt.close(figure)


def _smooth(losses: np.ndarray) -> np.ndarray:
    """A mean over past steps only, so that the curve shows nothing before it happens."""
    steps = np.arange(1, len(losses) + 1)
    first = np.maximum(steps - max(1, len(steps) // 60), 0)
    total = np.cumsum(np.concatenate([[0.0], losses]))
    return (total[steps] - total[first]) / (steps - first)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a temporary file next to `path` and renames it, so no half file is seen."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
