"""The figures of the page: the mean of the seeds, and a band from the least to the most of them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display
from ._curves import Curves
from ._lines import CURVES
from ._predicted import BARS

# Of the files, beside the page.
FOLDER = "figures"


class Figure(NamedTuple):
    """One figure.

    Attributes:
      name: of its file, without the ending.
      title: above it on the page.
      caption: below it: what is seen, and where it is from.
      x: what is to the right.
      y: what is upwards.
      workers: to the right are numbers of workers, in powers of two.
      log: upwards is logarithmic.
      log_x: to the right, too.
      level: a thin line at this height, and what it is.
      bars: names of bars, of which each line is a part, one on top of the other.
    """

    name: str
    title: str
    caption: str
    x: str
    y: str
    workers: bool = False
    log: bool = False
    log_x: bool = False
    level: tuple[float, str] | None = None
    bars: tuple[str, ...] = ()


FIGURES = (
    Figure(
        "words",
        "Words of a step",
        "Ok-Topk, Table 1: words that a worker receives in a step, as multiples of k, read from "
        "the traced programs, slots included (n = 1,000,000, density 1 %).",
        "workers",
        "words / k",
        workers=True,
        log=True,
    ),
    Figure(
        "thresholds",
        "Thresholds",
        "Ok-Topk, Figure 4, along two trainings instead of at one step: the thresholds that the "
        "paper reuses for 32 steps and that Gaussiank takes from a normal distribution, over the "
        "exact k-th magnitude of the first worker's accumulator. Measured; exact top-k drives the"
        " trainings. The threshold of the first step is too low for the next 31, as the rate "
        "still rises; later ones end up to 3.2 times too high, as it falls. In the paper they are"
        " right after 25 steps.",
        "step",
        "threshold / exact threshold",
        log=True,
        level=(1.0, "exact"),
    ),
    Figure(
        "counts",
        "Selected and delivered",
        "Ok-Topk, Figure 6: what a worker selects (local) and all deliver (global), as multiples "
        "of k, in trainings of a small convolutional network. The paper's thresholds are reused "
        "for 32 steps, as its text says, or corrected by their counts in between, as in the "
        "program that it links to; ours are exact at every step.",
        "step",
        "entries / k",
        log=True,
        level=(1.0, "k"),
    ),
    Figure(
        "xi",
        "xi",
        "Ok-Topk, Figure 5: the distance between what is applied and the top k of the whole, over "
        "the size of the gradient, P = 8. At a constant rate it stays below P as long as there is "
        "something to learn: the convolutional network knows its digits by heart after a third "
        "of the steps. With a rate that falls it grows at the end, for what waits was made at a "
        "larger one.",
        "step",
        "xi",
        log=True,
        level=(8.0, "P"),
    ),
    Figure(
        "reduce_load",
        "Load of the reduction",
        "Ok-Topk, Figure 7a, in entries instead of seconds: those that the fullest owner "
        "receives, over the mean of the owners, in an LSTM (2 %) with one layer's gradients times"
        " 100; the mean of eight steps, balanced regions cut at the first. Measured, without an "
        "allreduce. With equal regions the few owners of that layer get nearly all; hashed "
        "regions stay even.",
        "workers",
        "fullest owner / mean",
        workers=True,
    ),
    Figure(
        "gather_load",
        "Load of the allgather",
        "Ok-Topk, Figure 7b, in the same setting: entries of the result that the fullest owner "
        "sends to all, over the mean, before anything is balanced. The paper balances them first "
        "where this is above 4, which only equal regions reach. Measured.",
        "workers",
        "fullest owner / mean",
        workers=True,
        level=(4.0, "the paper balances"),
    ),
    Figure(
        "weak_scaling",
        "Time of a step",
        "Ok-Topk, Figures 8, 10 and 12: a step of BERT's size (133.5M, 1 %), the same work for "
        "each worker. Predicted by the planner: 300 ms of computing, 25 Gbit/s and 25 us between "
        "GPUs, kernels as in compiled programs for an H100. TopkA grows with the workers, Ok-Topk"
        " hardly.",
        "workers",
        "ms",
        workers=True,
    ),
    Figure(
        "breakdown",
        "Parts of a step",
        "Ok-Topk, Figures 8, 10 and 12: the same steps in their parts, with 32 and 256 workers; of "
        "DenseOvlp what is not hidden behind the backward pass. Predicted. In the paper "
        "sparsification is a larger part.",
        "",
        "ms",
        bars=BARS,
    ),
    Figure(
        "accuracy_time",
        "Accuracy against time",
        "Ok-Topk, Figure 9: accuracy on the test images of a small convolutional network (P = 8, "
        "400 steps) in measured trainings. The time is predicted: steps times the exchange over "
        "100 Mbit/s and 0.1 ms, without computing and selection. Sparse exchanges are there "
        "several times as soon as dense ones.",
        "predicted seconds in the exchange",
        "right, %",
        log_x=True,
    ),
    Figure(
        "loss_time",
        "Loss against time",
        "Ok-Topk, Figures 11 and 13: the training loss of a small transformer on characters (P = "
        "4, 400 steps), measured; the time is predicted in the same way. `ok_topk` in front of "
        "AdamW is fast, and ends above dense; `sparse_adamw` does not.",
        "predicted seconds in the exchange",
        "loss",
        log_x=True,
    ),
    Figure(
        "fill_in",
        "Fill-in",
        "SparCML, Figure 1: the share of all entries that any of the first P workers selects, in "
        "trainings, and as uniform selections would have it.",
        "workers",
        "entries of the sum / n",
        workers=True,
        log=True,
    ),
    Figure(
        "reduction_nodes",
        "Time of a reduction by nodes",
        "SparCML, Figure 3, left: 16M values, 0.781 % of them on each node. Predicted by the "
        "alpha-beta model of our programs with 1.3 us and 10 GB/s. What is sparse is fast with "
        "few nodes; with many the sum fills in.",
        "nodes",
        "ms",
        workers=True,
        log=True,
    ),
    Figure(
        "reduction_density",
        "Time of a reduction by density",
        "SparCML, Figure 3, right: 16M values, 8 nodes. Predicted by the same model with 50 us "
        "and 1 Gbit/s. Doubling is best for very few entries, then the split; it turns dense "
        "here, too, so that it meets DSAR.",
        "density, %",
        "ms",
        log=True,
        log_x=True,
    ),
    Figure(
        "missing_rows",
        "Rows without an entry",
        "ADTopk, Figure 2b: rows of an LSTM's matrices in which nothing is selected (mean of the "
        "matrices). What ADTopk misses are rows that have no gradient at all.",
        "density, %",
        "rows, %",
    ),
    Figure(
        "row_magnitudes",
        "Magnitudes by row",
        "ADTopk, Figure 6: the sums of the magnitudes in each row of a matrix of an LSTM (1,024 "
        "rows, density 2 %), the largest first, at the last recorded step. Measured. Top-k of the"
        " layer takes more from large rows and nothing from the last ones, ADTopk the same count "
        "from all.",
        "rank of the row, %",
        "sum of magnitudes",
        log=True,
    ),
    Figure(
        "mean_magnitudes",
        "Mean magnitude of a row",
        "ADTopk, Figure 7: the mean of the sums of the same rows along the training. Measured. As"
        " in the paper ADTopk's is below that of top-k, early in the training above all.",
        "step",
        "mean sum of magnitudes",
        log=True,
    ),
)


def draw(folder: Path, curves: Curves) -> list[Path]:
    """Writes all figures for which there is something to show, and returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in FIGURES:
        lines = {c.line: curves.best(c) for c in CURVES if c.figure == figure.name}
        if any(lines.values()):
            files.append(folder / f"{figure.name}.png")
            _draw(figure, lines, files[-1])
    return files


def _draw(figure: Figure, lines: dict[str, list[dict[str, Any]]], path: Path) -> None:
    drawn, ((axes,),) = display.panels(1, 1, (9, 4))
    below = np.zeros(len(figure.bars))
    for line, series in lines.items():
        if series and figure.bars:
            parts = np.array([one["y"] for one in series]).mean(0)
            axes.bar(np.arange(len(parts)), parts, 0.7, bottom=below, label=line)
            below = below + parts
        elif series:
            x, values = series[0]["x"], np.array([one["y"] for one in series])
            (handle,) = axes.plot(x, values.mean(0), label=line, linewidth=1.4)
            if len(series) > 1:
                band = {"color": handle.get_color(), "alpha": 0.2, "linewidth": 0}
                axes.fill_between(x, values.min(0), values.max(0), **band)
    if figure.level:
        height, name = figure.level
        axes.axhline(height, color="black", linewidth=0.8, linestyle=":", label=name)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    if figure.workers:
        display.logarithmic(axes)
    elif figure.log_x:
        axes.set_xscale("log")
    if figure.bars:
        axes.set_xticks(range(len(figure.bars)), figure.bars, fontsize=8, rotation=90)
    axes.set_yscale("log" if figure.log else "linear")
    axes.grid(True, alpha=0.25)
    # Beside the panel it hides no line.
    drawn.legend(loc="outside right upper", fontsize=8)
    display.save(drawn, path)
