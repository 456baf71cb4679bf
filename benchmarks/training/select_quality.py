"""How well every selector selects on accumulators of real training runs.

    python -m benchmarks.training.select_quality [--text FILE] [--images FOLDER] [--plot FILE.png]

Two networks are trained with exact top-k error feedback over simulated workers: an LSTM on
characters and a VGG-like network on images. At every step worker 0's accumulator (residual plus
gradient) is given to every selector. Each keeps its own state; its selection is only counted and
compared with the exact top-k, and training does not depend on it. "passed" is what reaches a
selector's threshold, "selected" what got into its buffer; both are divided by k. "overlap" is the
share of the exact top-k that was selected, "captured" that of its squared norm.

The accumulators are those of exact top-k: they end sharply just above the k-th magnitude, so a
threshold that is a little too high lets next to nothing through. Where the learning rate is applied
matters to `gaussian_k` in particular: compare `--learning-rate behind`. With `--self-driven`
estimators also drive a training run each, as in Figure 6 of Ok-Topk.

Second, the rows of each layer in which plain top-k selects nothing ("dimension missing", ADTopk,
section 3.1), on the accumulators of the text run. A row is an output channel of a matrix, a word of
the embedding, or a whole bias.
"""

import argparse
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np

from sparse_collectives import Layout, select

from .._common import display, options, reports
from ._measures import DENSITIES, SELECTIONS, MissingRows
from ._recorded_tasks import recorded_runs, recording_parser
from ._recorded_training import ORDERS, Recorder, Run
from ._shadows import ESTIMATORS, Quality, Shadows
from ._unions import last_quarter, parts

# Figure 2(b) of ADTopk: an LSTM on WikiText-2, a model of words.
PAPER = {0.001: 0.96, 0.05: 0.26}
SNAPSHOTS = 40
# The plot ends here: next to nothing passes.
FLOOR = 1e-3


def record(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Trains, measures along the way, and returns all that is reported of a run."""
    recorder = Recorder(run, args.workers)
    shadows = Shadows(run.density, Layout.of(recorder.task.params))
    missing = MissingRows(recorder.layout)
    spacing = max(1, args.steps // SNAPSHOTS)

    def visit(step, acc, gradient, selections):
        if step % args.every == 0:
            shadows.feed(acc)
        if run.name == "text" and step % spacing == spacing - 1:
            missing.add(accumulator=np.asarray(acc), gradient=np.asarray(gradient))

    curve = recorder.train(args.steps, order=args.learning_rate, visit=visit)
    (qualities, shape), training_loss = shadows.series(), parts(curve.losses)
    report = recorder.description(curve) | {
        "learning_rate": args.learning_rate,
        "training_loss": [training_loss[x] for x in ("first_tenth", "last_quarter")],
        "normal_quantile": -NormalDist().inv_cdf(run.density / 2),
        "shape": {key: parts(x) for key, x in shape._asdict().items()},
        "selectors": {key: summary(quality) for key, quality in qualities.items()},
        "series": {
            key: {field: np.round(x, 5) for field, x in quality._asdict().items()}
            for key, quality in qualities.items()
        },
    }
    if missing.counts:
        report["missing_rows"] = {
            source: {selection: missing.rates(source, selection) for selection in SELECTIONS}
            for source in ("accumulator", "gradient")
        }
    return report


def summary(quality: Quality) -> dict[str, Any]:
    """The numbers of one selector over a run."""
    numbers: dict[str, Any] = {field: parts(x) for field, x in quality._asdict().items()}
    for field in ("selected", "passed"):
        late = last_quarter(getattr(quality, field))
        numbers[field]["last_quarter_range"] = [np.min(late), np.max(late)]
    numbers["selected"]["range"] = [np.min(quality.selected), np.max(quality.selected)]
    numbers["overlap"]["worst"] = np.min(quality.overlap)
    numbers["mean_deviation_of_selected"] = np.mean(np.abs(quality.selected - 1))
    return numbers


def show(report: dict[str, Any]) -> None:
    """Prints the table of a run."""
    title = "{run}: n = {size:,}, density {density:.1%}, {steps} steps; validation "
    title = title.format(**report)
    before, after = (report[f"validation_{when}"] for when in ("before", "after"))
    title += ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in before)
    for part in ("first_tenth", "last_quarter"):
        reach, kurtosis, zeros = (report["shape"][x][part] for x in ("reach", "kurtosis", "zeros"))
        title += (
            f"\naccumulators, {part}: k-th magnitude {reach:.2f} standard deviations (normal: "
            f"{report['normal_quantile']:.2f}), kurtosis {kurtosis:.1f}, zeros {zeros:.1%}"
        )
    fields = "selector passed.first_tenth passed.last_quarter selected.mean selected.last_quarter "
    fields += "selected.last_quarter_range mean_deviation_of_selected overlap.mean overlap.worst "
    rows = [{"selector": name, **row} for name, row in report["selectors"].items()]
    display.show_fields(title, f"{fields} captured.mean", rows)


def show_missing(rates: dict[str, Any]) -> None:
    """Prints the table of missing rows."""
    rows = [{"of": "ADTopk paper, LSTM, WikiText-2", "rates": list(map(PAPER.get, DENSITIES))}]
    for source, of_source in rates.items():
        for selection, of_selection in of_source.items():
            for name, row in of_selection.items():
                if source == "accumulator" or name in ("all rows", "mean of matrices"):
                    rows.append({"of": f"{selection}, {source}: {name}", "rates": row})
    densities = ", ".join(f"{density:.1%}" for density in DENSITIES)
    title = f"rows without a selected entry, text run, mean over the steps, at {densities}"
    display.show_fields(title, "of rates", rows)


def self_driven(run: Run, args: argparse.Namespace) -> None:
    """Prints what passes where an estimator's own selection drives the training, as in Figure 6."""
    density, steps, rows = run.density, max(10, args.steps // 2), []
    drivers = {
        # Room for four times k: what it asks for is what is to be seen.
        "gaussian_k": select.published.gaussian_k(density=density, headroom=3.0),
        "threshold_reuse": select.threshold_reuse(density=density),
        "topk": select.topk(density=density),
    }
    for name, selector in drivers.items():
        recorder = Recorder(run, args.workers)
        curve = recorder.train(steps, order=args.learning_rate, selector=selector)
        tenths = [np.mean(x) for x in np.array_split(curve.passed, 10)]
        rows.append({"selector": name, "tenths": tenths, "accuracy": curve.after["accuracy"]})
    title = f"images, each selector driving its own run of {steps} steps: passed / k, by tenths"
    display.show_fields(title, "selector tenths accuracy", rows)


def draw(runs: list[dict[str, Any]], every: int, path: Path) -> None:
    """What passes each estimator's threshold over the steps: the form of Ok-Topk's Figure 6."""
    panels = []
    for report in runs:
        lines = {}
        for name in ESTIMATORS:
            x = np.maximum(report["series"][name]["passed"], FLOOR)
            # Medians of 100 stretches of the run: single steps would cover each other.
            stretches = np.array_split(np.arange(len(x)), min(100, len(x)))
            steps = [every * np.mean(part) for part in stretches]
            lines[name] = steps, [np.median(x[part]) for part in stretches]
        title = f"{report['run']}, density {report['density']:.1%}"
        given = {"title": title, "ylabel": "passed / k", "yscale": "log", "xlabel": "step"}
        panels.append(given | {"lines": lines})
    display.draw(path, panels)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = recording_parser(__doc__, steps=600, batch=16)
    add = parser.add_argument
    add("--every", type=options.at_least_one, default=1, help="steps between measurements")
    add("--workers", type=options.at_least_one, default=4)
    order = "before accumulation, without momentum (Ok-Topk), or behind it in SGD with momentum"
    add("--learning-rate", choices=ORDERS, default="before", help=order)
    add("--self-driven", action="store_true", help="also let estimators drive runs of their own")
    args = parser.parse_args(argv)
    images, text = recorded_runs(args)
    found = []
    for run in (images, text):
        found.append(record(run, args))
        show(found[-1])
        if "missing_rows" in found[-1]:
            show_missing(found[-1]["missing_rows"])
    if args.self_driven:
        self_driven(images, args)
    content = {"backend": jax.default_backend(), "every": args.every, "runs": found}
    reports.write(args.json, content)
    if args.plot:
        draw(found, args.every, args.plot)


if __name__ == "__main__":
    sys.exit(main())
