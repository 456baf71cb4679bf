"""How well every selector selects on accumulators of real training runs.

    python -m benchmarks.training.select_quality [--text FILE] [--images FOLDER] [--plot FILE.png]

Two networks are trained with exact top-k error feedback over simulated workers: an LSTM on
characters and a VGG-like network on images. At every step worker 0's accumulator (residual plus
gradient) is given to every selector. Each keeps its own state; its selection is only counted and
compared with the exact top-k, and training does not depend on it. "passed" is what reaches a
selector's threshold, "selected" what got into its buffer; both are divided by k. "|s-1|" is the
mean distance of selected/k from 1, "overlap" the share of the exact top-k that was selected,
"captured" that of its squared norm.

The accumulators are those of exact top-k: they end sharply just above the k-th magnitude, so a
threshold that is a little too high lets next to nothing through. Where the learning rate is applied
matters to `gaussian_k` in particular: compare `--learning-rate behind`. With `--self-driven`
estimators also drive a training run each, as in Figure 6 of Ok-Topk.

Second, the rows of each layer in which plain top-k selects nothing ("dimension missing", ADTopk,
section 3.1), on the accumulators of the text run. A row is an output channel of a matrix, a word of
the embedding, or a whole bias.

Without the options the text is Python's own help topics and the images are scikit-learn's digits.
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
from . import _recorded_training as training
from ._measures import DENSITIES, SELECTIONS, MissingRows
from ._recorded_tasks import Run, recorded_runs, recording_parser
from ._shadows import ESTIMATORS, Quality, Shadows

# Figure 2(b) of ADTopk: an LSTM on WikiText-2, a model of words.
PAPER = {0.001: 0.96, 0.05: 0.26}
SNAPSHOTS = 40
# The plot ends here: next to nothing passes.
FLOOR = 1e-3


def record(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Trains, measures along the way, and returns all that is reported of a run."""
    name, task, density = run.name, run.make_task(args.workers), run.density
    shadows = Shadows(density, Layout.of(task.params))
    missing = MissingRows(training.layout_of(task.params))
    spacing = max(1, args.steps // SNAPSHOTS)

    def visit(step, acc, gradient):
        if step % args.every == 0:
            shadows.feed(acc)
        if name == "text" and step % spacing == spacing - 1:
            missing.add(accumulator=np.asarray(acc), gradient=np.asarray(gradient))
        text = f"{name}: step {step + 1} of {args.steps}"
        options.progress(text, last=step + 1 == args.steps)

    curve = training.train(
        task,
        density=density,
        workers=args.workers,
        steps=args.steps,
        order=args.learning_rate,
        visit=visit,
    )
    qualities, shape = shadows.series()
    report = {
        "run": name,
        "size": sum(leaf.size for leaf in missing.layout),
        "density": density,
        "steps": args.steps,
        "learning_rate": args.learning_rate,
        "validation_before": curve.before,
        "validation_after": curve.after,
        "training_loss": [part(curve.losses).tolist() for part in (_head, _tail)],
        "normal_quantile": -NormalDist().inv_cdf(density / 2),
        "shape": {
            key: {"first_tenth": _head(x), "last_quarter": _tail(x)}
            for key, x in shape._asdict().items()
        },
        "selectors": {key: summary(quality) for key, quality in qualities.items()},
        "series": {
            key: {field: np.round(x, 5) for field, x in quality._asdict().items()}
            for key, quality in qualities.items()
        },
    }
    if missing.counts:
        sources = ("accumulator", "gradient")
        report["missing_rows"] = {
            source: {selection: missing.rates(source, selection) for selection in SELECTIONS}
            for source in sources
        }
    return report


def _head(x) -> np.ndarray:
    """The mean over the first tenth of the steps."""
    return np.mean(x[: max(1, len(x) // 10)])


def _tail(x) -> np.ndarray:
    """The mean over the last quarter of the steps."""
    return np.mean(last_quarter(x))


def last_quarter(x):
    """The last quarter of the steps, at least one."""
    return x[len(x) - max(1, len(x) // 4) :]


def summary(quality: Quality) -> dict[str, Any]:
    """The numbers of one selector over a run."""
    numbers: dict[str, Any] = {
        field: {"mean": np.mean(x), "first_tenth": _head(x), "last_quarter": _tail(x)}
        for field, x in quality._asdict().items()
    }
    for field in ("selected", "passed"):
        late = last_quarter(getattr(quality, field))
        numbers[field]["last_quarter_range"] = [np.min(late), np.max(late)]
    numbers["selected"]["range"] = [np.min(quality.selected), np.max(quality.selected)]
    numbers["overlap"]["worst"] = np.min(quality.overlap)
    numbers["mean_deviation_of_selected"] = np.mean(np.abs(quality.selected - 1))
    return numbers


def show(report: dict[str, Any]) -> None:
    """Prints the table of a run."""
    before, after = report["validation_before"], report["validation_after"]
    shape, quantile = report["shape"], report["normal_quantile"]
    print(
        f"\n{report['run']}: n = {report['size']:,}, density {report['density']:.1%}, "
        f"{report['steps']} steps; validation loss {before['loss']:.2f} -> {after['loss']:.2f}, "
        f"accuracy {before['accuracy']:.1%} -> {after['accuracy']:.1%}"
    )
    for label, part in (("first tenth", "first_tenth"), ("last quarter", "last_quarter")):
        print(
            f"  accumulators, {label}: k-th magnitude {shape['reach'][part]:.2f} standard "
            f"deviations (normal: {quantile:.2f}), kurtosis {shape['kurtosis'][part]:.1f}, "
            f"zeros {shape['zeros'][part]:.1%}"
        )
    print(
        f"{'':25} {'---- passed / k ----':>20} {'------------ selected / k -----------':>38} "
        f"{'--- overlap ---':>17} {'captured':>8}\n"
        f"{'':25} {'1st 1/10':>9} {'last 1/4':>10} {'mean':>7} {'last 1/4':>9} "
        f"{'min - max':>13} {'|s-1|':>6} {'mean':>8} {'worst':>8} {'mean':>8}"
    )
    for name, row in report["selectors"].items():
        low, high = row["selected"]["last_quarter_range"]
        print(
            f"{name:25} {row['passed']['first_tenth']:9.3f} {row['passed']['last_quarter']:10.3f} "
            f"{row['selected']['mean']:7.3f} {row['selected']['last_quarter']:9.3f} "
            f"{f'{low:.3f} - {high:.3f}':>13} {row['mean_deviation_of_selected']:6.3f} "
            f"{row['overlap']['mean']:8.2%} {row['overlap']['worst']:8.2%} "
            f"{row['captured']['mean']:8.2%}"
        )


def show_missing(rates: dict[str, Any]) -> None:
    """Prints the tables of missing rows."""
    print("\nrows without a selected entry, text run, mean over the steps")
    print(f"{'density':32}" + "".join(f"{density:>8.1%}" for density in DENSITIES))
    paper = "".join(f"{PAPER[d]:>8.0%}" if d in PAPER else f"{'':8}" for d in DENSITIES)
    print(f"{'ADTopk paper, LSTM, WikiText-2':32}{paper}")
    for source, of_source in rates.items():
        for selection, of_selection in of_source.items():
            print(f"{selection}, {source}")
            for name, row in of_selection.items():
                if source == "accumulator" or name in ("all rows", "mean of matrices"):
                    print(f"  {name:30}" + "".join(f"{rate:>8.1%}" for rate in row))


def self_driven(run: Run, args: argparse.Namespace) -> None:
    """Prints what passes where an estimator's own selection drives the training, as in Figure 6."""
    density = run.density
    drivers = {
        # Room for four times k: what it asks for is what is to be seen.
        "gaussian_k": select.gaussian_k(density=density, headroom=3.0),
        "threshold_reuse": select.threshold_reuse(density=density),
        "topk": select.topk(density=density),
    }
    print(f"\nimages, each selector driving its own run of {args.steps // 2} steps")
    print(f"{'':18} passed / k, mean of each tenth of the run {'':29} accuracy")
    for name, selector in drivers.items():
        curve = training.train(
            run.make_task(args.workers),
            density=density,
            workers=args.workers,
            steps=max(10, args.steps // 2),
            order=args.learning_rate,
            visit=lambda *_: None,
            selector=selector,
        )
        tenths = "".join(f"{np.mean(x):7.3f}" for x in np.array_split(curve.passed, 10))
        print(f"{name:18}{tenths} {curve.after['accuracy']:9.1%}")


def draw(runs: list[dict[str, Any]], every: int, path: Path) -> None:
    """What passes each estimator's threshold over the steps: the form of Ok-Topk's Figure 6."""
    figure, panels = display.panels(1, len(runs), (6 * len(runs), 4.5), sharey=True)
    for panel, report in zip(panels[0], runs, strict=True):
        for name, style in ESTIMATORS.items():
            x = np.maximum(report["series"][name]["passed"], FLOOR)
            # Medians of 100 stretches of the run: single steps would cover each other.
            stretches = np.array_split(x, min(100, len(x)))
            steps = [every * np.mean(s) for s in np.array_split(np.arange(len(x)), len(stretches))]
            panel.plot(steps, [np.median(s) for s in stretches], style, label=name, linewidth=1.5)
        panel.axhline(1, color="black", linewidth=0.8, zorder=0)
        title = f"{report['run']}, density {report['density']:.1%}"
        panel.set(yscale="log", xlabel="step", title=title)
    panels[0, 0].set_ylabel("entries that pass the threshold / k")
    panels[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    display.save(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and one line when one of them is wrong."""
    parser = recording_parser(__doc__, steps=600, batch=16)
    add = parser.add_argument
    add("--every", type=options.at_least_one, default=1, help="steps between measurements")
    add("--workers", type=options.at_least_one, default=4)
    add(
        "--learning-rate",
        choices=training.ORDERS,
        default="before",
        help="before accumulation, without momentum (Ok-Topk), or behind it in SGD with momentum",
    )
    add("--self-driven", action="store_true", help="also let estimators drive runs of their own")
    return parser.parse_args(argv)


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    args = parse(argv)
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
