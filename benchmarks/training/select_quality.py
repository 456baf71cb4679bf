"""How well every selector selects on accumulators of real training runs.

    python -m benchmarks.training.select_quality [--text FILE] [--images FOLDER] [--plot FILE.png]

Two networks are trained with exact top-k error feedback over simulated workers: an LSTM on
characters and a VGG-like network on images. At every step worker 0's accumulator (residual plus
gradient) is given to every selector. Each keeps its own state; its selection is only counted and
compared with the exact top-k. "passed" counts the entries that reach a selector's threshold, and
"selected" those in its buffer; both are divided by k. "overlap" is the share of the exact top-k
that was selected. With `--self-driven` estimators also drive a training run each, as in Figure 6 of
Ok-Topk.

Second, the rows of each layer in which plain top-k selects nothing ("dimension missing", ADTopk,
section 3.1), on the accumulators of the text run.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import Layout, select

from .._common import display, options, reports
from .._common.contestants import selectors
from ._measures import DENSITIES, SELECTIONS, MissingRows
from ._recorded_tasks import recorded_runs, recording_parser
from ._recorded_training import ORDERS, Recorder, Run
from ._unions import parts

# Figure 2(b) of ADTopk: an LSTM on WikiText-2, a model of words.
_PAPER_RATES = {"LSTM, WikiText-2": [0.96, None, None, None, 0.26]}
SNAPSHOTS = 40
# The plot ends here, below which almost nothing passes.
FLOOR = 1e-3


# The plot has the selectors that estimate how many entries pass. The others take a fixed number.
ESTIMATORS = ("threshold_reuse, no servo", "gaussian_k", "gaussian_k, adjusted")
ESTIMATORS += ("redsync", "sidco", "dgc", "threshold_reuse")


def contestants(density: float, first_threshold: float) -> dict[str, Any]:
    """All selectors and variants; the fixed threshold is for the first accumulator."""
    published = select.published
    return selectors(density, first_threshold) | {
        "threshold_reuse, no servo": select.threshold_reuse(density=density, servo=False),
        "gaussian_k, adjusted": published.gaussian_k(density=density, adjust=True),
        "sidco, gamma": published.sidco(density=density, distribution="gamma"),
        "sidco, pareto": published.sidco(density=density, distribution="pareto"),
    }


class Shadows:
    """The selectors of :func:`contestants`, run over a sequence of accumulators."""

    def __init__(self, density: float, layout: Layout):
        self.density, self.layout = density, layout
        self._selectors: dict[str, Any] = {}
        self._states: Any = None
        self._records: list[Any] = []

    def feed(self, acc: jax.Array) -> None:
        """Runs the next step of every selector on ``acc``."""
        # Returns both results from its own program, since for only one of them XLA sorts all n.
        exact = _top_k(jnp.abs(acc), max(1, round(self.density * acc.size)))
        if not self._selectors:
            self._selectors = contestants(self.density, float(exact[0][-1]))
            self._states = {name: s.init(self.layout) for name, s in self._selectors.items()}
        self._states, record = self._measure(acc, *exact, self._states)
        self._records.append(jax.device_get(record))

    def series(self) -> dict[str, dict[str, np.ndarray]]:
        """The selected and passed entries / k and the overlap, by name: ``f32[steps]``."""
        qualities = jax.tree.map(lambda *x: np.asarray(x), *self._records)
        return {name: qualities[name] for name in self._selectors}

    @functools.partial(jax.jit, static_argnums=0)
    def _measure(self, acc, magnitudes, indices, states):
        """One step of all selectors on an accumulator whose exact selection is known."""
        k, count = magnitudes.size, jnp.sum(magnitudes > 0)
        exact = jnp.zeros(acc.size + 1, bool).at[indices].set(magnitudes > 0)
        qualities, following = {}, {}
        for name, selector in self._selectors.items():
            coo, following[name], info = selector.select(acc, states[name])
            qualities[name] = {"selected": info.selected / k}
            qualities[name]["passed"] = (info.selected + info.overflow) / k
            qualities[name]["overlap"] = jnp.sum(exact[coo.indices]) / count
        return following, qualities


# The exact selection by JAX, which shares no code with the selectors.
_top_k = jax.jit(jax.lax.top_k, static_argnums=1)


def record(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Trains, measures along the way, and returns the report on a run."""
    recorder = Recorder(run, args.workers)
    shadows = Shadows(run.density, Layout.of(recorder.task.params))
    missing = MissingRows(recorder.layout)
    spacing = max(1, args.steps // SNAPSHOTS)

    def visit(step, acc, gradient, selections):
        if step % args.every == 0:
            shadows.feed(acc)
        if run.name == "text" and step % spacing == spacing - 1:
            missing.add(accumulator=np.asarray(acc))

    curve = recorder.train(args.steps, order=args.learning_rate, visit=visit)
    qualities, found = shadows.series(), {}
    for name, quality in qualities.items():
        found[name] = {field: parts(x) for field, x in quality.items()}
        found[name]["overlap"]["worst"] = np.min(quality["overlap"])
    report = recorder.description(curve) | {
        "learning_rate": args.learning_rate,
        "selectors": found,
        "series": {name: {"passed": np.round(x["passed"], 5)} for name, x in qualities.items()},
    }
    if missing.counts:
        rates = {selection: missing.rates("accumulator", selection) for selection in SELECTIONS}
        report["missing_rows"] = {"accumulator": rates}
    return report


def self_driven(run: Run, args: argparse.Namespace) -> None:
    """Prints what passes if an estimator's own selection drives the training, as in Figure 6."""
    density, steps, rows = run.density, max(10, args.steps // 2), []
    drivers = {
        # Room for 4k entries, since the demand of the estimator is measured.
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
    display.show_rows(title, rows)


def draw(runs: list[dict[str, Any]], every: int, path: Path | None) -> None:
    """Draws what passes each estimator's threshold over the steps, as in Ok-Topk's Figure 6."""
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
    order = "before accumulation, without momentum (Ok-Topk), or behind it in SGD with momentum"
    usual = {"steps": 600, "every": 1, "workers": 4, "learning_rate": ("before", order, ORDERS)}
    usual |= {"self_driven": (False, "also let estimators drive runs of their own")}
    args = recording_parser(__doc__, "plot", batch=16, **usual).parse_args(argv)
    images, text = recorded_runs(args)
    found = []
    for run in (images, text):
        found.append(record(run, args))
        rows = [{"selector": name, **row} for name, row in found[-1]["selectors"].items()]
        display.show_rows(f"{run.name}, shares of k", rows)
    rates = found[-1].get("missing_rows", {"accumulator": {}})["accumulator"]
    rows = [
        {"selection": selection, "of": of, "rates": row}
        for selection, of_selection in ({"ADTopk paper": _PAPER_RATES} | rates).items()
        for of, row in of_selection.items()
    ]
    densities = ", ".join(f"{density:.1%}" for density in DENSITIES)
    title = f"rows without a selected entry, text run, mean over the steps, at {densities}"
    display.show_rows(title, rows)
    if args.self_driven:
        self_driven(images, args)
    content = {"backend": jax.default_backend(), "every": args.every, "runs": found}
    reports.write(args.json, content)
    draw(found, args.every, args.plot)


if __name__ == "__main__":
    raise SystemExit(main())
