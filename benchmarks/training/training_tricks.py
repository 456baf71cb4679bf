"""What the tricks of DGC do for the accuracy at a low density, each alone and together.

    python -m benchmarks.training.training_tricks [--images FOLDER] [--only NAME ...] [--json FILE]

A network of one hidden layer on Fashion-MNIST (``--images FOLDER``) or scikit-learn's digits, over
simulated workers: mean and standard deviation of the accuracy on all test images over some seeds.
Every variant sees the same batches, starts from the same parameters and has the learning rate that
is best for the dense run, with a warmup over a twentieth of the steps and then a cosine.

Top-k with error feedback is ``topk_a``: everything that is selected is delivered.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax

import optax_ext
from sparse_collectives import select

from .._common import display, options, reports
from ._data import read_images
from ._recorded_training import MOMENTUM, schedule
from ._simulated_training import AXIS, Variant, exact_top_k, train
from ._small_models import one_hidden_layer
from ._small_tasks import image_task

# DGC starts with 25 %. All messages have the slots of the first stage, so that one is left out.
STAGES = (0.0625, 0.015625, 0.004)
# Tricks that are tried together; all of them are added.
COMBINED = (
    "correction",
    "correction, masking",
    "clipping",
    "dense warm-up",
    "density warm-up",
    "correction, masking, clipping",
    "correction, masking, dense warm-up",
    "correction, masking, density warm-up",
)


def variants(density: float, steps: int, rate: float, max_norm: float) -> dict[str, Variant]:
    """By name. Momentum is behind the exchange where it is not in the correction."""
    stages = [*(stage for stage in STAGES if stage > density), density]
    staged = select.staged_density(max(1, steps // 20), stages)

    def sparse(*tricks: str, momentum: float | None = MOMENTUM) -> Variant:
        given: dict[str, Any] = {"axis": AXIS, "selector": exact_top_k(density)}
        if "correction" in tricks:
            momentum, masking = None, "masking" in tricks
            given["correction"] = optax_ext.momentum_correction(MOMENTUM, masking=masking)
        if "density warm-up" in tricks:
            given["selector"] = select.scheduled(exact_top_k(stages[0]), staged)
        if "dense warm-up" in tricks:
            given["dense_steps"] = max(1, steps // 10)
        tx = optax_ext.topk_a(density, **given)
        if "clipping" in tricks:
            tx = optax.chain(optax_ext.local_clip_by_global_norm(max_norm, axis=AXIS), tx)
        # Without momentum the same distance takes a rate larger by what momentum sums up.
        peak = rate if momentum or "correction" in tricks else rate / (1 - MOMENTUM)
        return Variant(tx, optax.sgd(schedule(peak, steps), momentum=momentum))

    behind = optax.sgd(schedule(rate, steps), momentum=MOMENTUM)
    known = {"dense": Variant(optax_ext.dense(axis=AXIS), behind), "top-k": sparse()}
    known["top-k without momentum"] = sparse(momentum=None)
    for name in COMBINED:
        known[name] = sparse(*name.split(", "))
    for warm_up in ("dense warm-up", "density warm-up"):
        known[f"all, {warm_up}"] = sparse("correction", "masking", "clipping", warm_up)
    return known


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    options.add_usual(parser, density=0.001, workers=16, batch=(8, "of each worker"), hidden=128)
    options.add_usual(parser, rate=(0.05, "the peak"), max_norm=(4.0, "of the clipping"), seeds=3)
    add("--images", type=Path, metavar="DIR", help="IDX files; default: digits")
    add("--steps", type=options.several, default=1000)
    add("--only", nargs="+", metavar="NAME", help="of these variants")
    options.add_outputs(parser)
    args = parser.parse_args(argv)
    known = variants(args.density, args.steps, args.rate, args.max_norm)
    options.check_names(parser, args.only, known)
    data, rows, shown = read_images(args.images), {}, []
    network = one_hidden_layer(data.train_images.shape[1:], data.classes, args.hidden)
    given = {"workers": args.workers, "steps": args.steps, "every": max(1, args.steps // 4)}
    given |= {"batch": args.workers * args.batch, "seeds": range(args.seeds)}
    for name in args.only or known:
        curves = train(image_task(data, network), known[name], **given, label=name)
        last = 100 * np.array([curve.values[-1] for curve in curves])
        deviation = last.std(ddof=1) if len(last) > 1 else None
        shown.append({"variant": name, "mean": last.mean(), "deviation": deviation})
        rows[name] = [curve._asdict() for curve in curves]
        content = {"options": {k: str(v) for k, v in vars(args).items()}, "curves": rows}
        reports.write(args.json, content)
    title = f"test accuracy, %, P = {args.workers}, density {args.density:g}, {args.steps} steps"
    display.show_fields(f"{title}, {args.seeds} seeds", "variant mean deviation", shown)


if __name__ == "__main__":
    sys.exit(main())
