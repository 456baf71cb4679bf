"""The table and the figure of trainings that differ in their exchange."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter
from rich import box
from rich.table import Table

from .._report import write_atomically
from .run import Run

FORMATS = (".pdf", ".png", ".svg")


def summary(runs: list[Run], title: str, solver: float | None) -> dict[str, Any]:
    """The numbers of the table; the first run is what others are compared with.

    Args:
      runs: the trainings.
      title: what was trained.
      solver: the objective that a solver found, if one was asked.
    """
    first = runs[0]
    rows = {}
    for run in runs:
        differences = np.abs(np.divide(run.objectives, first.objectives) - 1)
        rows[run.exchange] = {
            "objectives": run.objectives,
            "difference": float(differences.max()),
            "epoch_seconds": run.seconds,
            "exchange_seconds": run.exchange_seconds,
            "words": run.words,
            "delivered": float(np.mean(run.delivered)),
        }
    return {"title": title, "steps": first.steps, "solver": solver, "runs": rows}


def make_table(numbers: dict[str, Any]) -> Table:
    """The comparison: medians over the epochs; words and seconds are those of one epoch."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title=numbers["title"],
        caption=(
            f"an epoch has {numbers['steps']:,} steps; words: received by each worker in it; "
            "differs by: of the first row's objectives, at most"
        ),
    )
    table.add_column("", no_wrap=True)
    base = next(iter(numbers["runs"]))
    for header in (
        "\nobjective",
        "differs\nby",
        "epoch\nseconds",
        "in the\nexchange",
        "\nwords",
        "of the\nfirst",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    most = np.median(numbers["runs"][base]["words"])
    for name, row in numbers["runs"].items():
        words = np.median(row["words"])
        table.add_row(
            name,
            f"{row['objectives'][-1]:.6f}",
            f"{row['difference']:.0e}" if row["difference"] else "0",
            f"{np.median(row['epoch_seconds']):.2f}",
            f"{np.median(row['exchange_seconds']):.2f}",
            f"{words:,.0f}",
            f"1/{most / words:,.1f}" if words else "-",
        )
    if numbers["solver"] is not None:
        table.add_section()
        table.add_row("scikit-learn", f"{numbers['solver']:.6f}", style="dim")
    return table


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Writes the figure: the objective against words received, and where an epoch's time goes."""
    matplotlib.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    runs = numbers["runs"]
    moves = all(row["words"][0] > 0 for row in runs.values())
    # Two exchanges of as many words lie on one another: both are to be seen.
    styles = itertools.cycle(("-o", "--s", ":^", "-.d", "--x"))
    for name, row in runs.items():
        epochs = np.arange(1, len(row["words"]) + 1)
        x = np.cumsum(row["words"]) if moves else epochs
        left.plot(x, row["objectives"][1:], next(styles), markersize=4, alpha=0.8, label=name)
    if numbers["solver"] is not None:
        left.axhline(numbers["solver"], color="0.5", linestyle="--", label="scikit-learn")
    left.set(
        xlabel="words received per worker (4 bytes each)" if moves else "epoch",
        ylabel="objective",
        title="after each epoch",
    )
    if moves:  # a single worker receives nothing
        left.set_xscale("log")
        left.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3)

    places = np.arange(len(runs))
    exchange = np.array([np.median(row["exchange_seconds"]) for row in runs.values()])
    whole = np.array([np.median(row["epoch_seconds"]) for row in runs.values()])
    right.barh(places, exchange, label="exchange")
    right.barh(places, whole - exchange, left=exchange, label="computing", color="0.7")
    right.set(xlabel="seconds", title="of an epoch", yticks=places, yticklabels=list(runs))
    right.invert_yaxis()
    right.legend(loc="lower right")
    write_atomically(path, lambda part: figure.savefig(part, dpi=150, format=path.suffix[1:]))
    plt.close(figure)
