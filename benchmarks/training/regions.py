"""What Ok-Topk delivers by its ways to divide the indices: `regions` hashed, balanced and equal.

    python -m benchmarks.training.regions [--workers 2 4 8 16] [--size 12000] [--selected 120]

Simulated workers run error feedback with exact top-k selections on synthetic gradients, each of
which is hard for regions in its own way:

- iid: normal everywhere;
- same region: all workers' mass is in one sixteenth of the indices;
- drifting: the same, and it moves by a fortieth of the indices at each step;
- heavy tails: Cauchy, with scales that differ by layer;
- one worker: the mass of one worker is in a sixteenth, and outweighs that of the others;
- own region: the mass of each worker is in a region of its own.

What is ideal is the top k of the sum of the workers' selections, computed apart. "missing" is the
share of it that a step did not deliver, "mass" the sum of magnitudes delivered as a share of the
ideal, "overflow" the share of the selected entries that found no slot, "wait" the longest run of
steps in which an entry was in the ideal and not delivered, and "words" what a worker receives, in
units of k (P-1)/P. With `--time` the wall time of a step is printed, too: of all workers together
on this machine, so only its ratios mean something.

With `--recorded` the selections of two trainings go through each way instead, recorded as in
load_balance (`--text`, `--images`, `--every` and `--factor` are as there). Their residuals are
those of the training, so "wait" means little.
"""

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc

from .._common import options, reports
from ._recorded_tasks import recorded_runs, recording_parser
from .load_balance import record

AXIS = "workers"
REGIONS = ("hashed", "balanced", "equal")
INPUTS = ("iid", "same region", "drifting", "heavy tails", "one worker", "own region")


def gradient(name: str, step: int, workers: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """The gradients of all workers in one step, ``f32[P, n]``."""
    normal = rng.standard_normal((workers, size), np.float32)
    place, part = np.arange(size), size // 16
    if name == "iid":
        return normal
    if name == "same region":
        return np.where(place // part == 5, normal, 1e-3 * normal)
    if name == "drifting":
        return np.where((place - step * size // 40) % size < part, normal, 1e-3 * normal)
    if name == "heavy tails":
        layer = np.random.default_rng(7).lognormal(0, 2, 64).astype(np.float32)
        return rng.standard_cauchy((workers, size)).astype(np.float32) * layer[place * 64 // size]
    worker = np.arange(workers)[:, None]
    if name == "one worker":
        return np.where((worker == 0) & (place // part == 5), 10 * normal, 1e-1 * normal)
    return np.where(place * workers // size == worker, normal, 1e-3 * normal)


@functools.cache
def make_step(regions: str, density: float, workers: int, slack: float | None):
    """The initial state of an allreduce, and a jitted step of error feedback, of all workers."""
    allreduce = sc.allreduce.ok_topk(
        density=density, regions=regions, slack=slack, schedule="all_to_all"
    )
    selector = sc.select.topk(density=density)

    def step(grad, residual, state):
        acc = residual + grad
        coo, _, _ = selector.select(acc, selector.init(acc.shape[0]))
        total, undelivered, state, info = allreduce.reduce(coo, state, axis=AXIS)
        return coo.to_dense(), total.to_dense(), undelivered.residual(acc, coo), state, info

    return allreduce.init, sc.simulate(step, axis=AXIS, axis_size=workers, in_axes=(0, 0, None))


class Score:
    """What of the ideal arrived, added up over steps."""

    def __init__(self, size: int, k: int):
        """For sums of length ``size``, of which ``k`` are wanted."""
        self.k, self.waiting, self.rows = k, np.zeros(size, int), []
        self.wait = 0

    def add(self, sent: np.ndarray, total: np.ndarray, overflow: int, words: float) -> None:
        """One step: the sum of all selections, and what arrived of it."""
        ideal = np.argpartition(-np.abs(sent), self.k - 1)[: self.k]
        ideal = ideal[sent[ideal] != 0]
        missed = ideal[total[ideal] == 0]
        waiting = np.zeros_like(self.waiting)
        waiting[missed] = self.waiting[missed] + 1
        self.waiting, self.wait = waiting, max(self.wait, int(waiting.max()))
        mass = np.abs(total).sum() / np.abs(sent[ideal]).sum()
        self.rows.append((missed.size / ideal.size, mass, overflow, words))

    def report(self, workers: int) -> dict[str, float]:
        """The means over the steps."""
        missing, mass, overflow, words = np.mean(self.rows, axis=0)
        return {
            "missing": missing,
            "missing_worst": max(row[0] for row in self.rows),
            "mass": mass,
            "overflow": overflow,
            "wait": self.wait,
            "words": words / (self.k * (workers - 1) / workers),
        }


def synthetic(name: str, workers: int, regions: str, args: argparse.Namespace) -> dict[str, float]:
    """All steps of one way on one input."""
    size, k = args.size, args.selected
    init, step = make_step(regions, k / size, workers, args.slack)
    state, residual = init(size, workers), jnp.zeros((workers, size))
    rng, score, seconds = np.random.default_rng(args.seed), Score(size, k), []
    for i in range(args.steps):
        grad = jnp.asarray(gradient(name, i, workers, size, rng))
        start = time.perf_counter()
        sent, total, residual, states, info = jax.block_until_ready(step(grad, residual, state))
        seconds.append(time.perf_counter() - start)
        state = jax.tree.map(lambda x: x[0], states)
        score.add(
            np.asarray(sent, np.float64).sum(axis=0),
            np.asarray(total[0], np.float64),
            int(np.sum(info.overflow)) / (k * workers),
            float(info.words[0]),
        )
    return {**score.report(workers), "seconds": float(np.median(seconds[1:] or seconds))}


@functools.cache
def make_reduce(regions: str, density: float, workers: int):
    """The initial state of an allreduce, and a jitted step of all workers."""
    allreduce = sc.allreduce.ok_topk(density=density, regions=regions, schedule="all_to_all")

    def reduce(coo, state):
        total, _, state, info = allreduce.reduce(coo, state, axis=AXIS)
        return coo.to_dense(), total.to_dense(), state, info

    return allreduce.init, sc.simulate(reduce, axis=AXIS, axis_size=workers, in_axes=(0, None))


def recorded(steps, workers: int, regions: str, density: float) -> dict[str, float]:
    """Recorded selections through one way."""
    size = steps[0].size
    init, step = make_reduce(regions, density, workers)
    state, score = init(size, workers), Score(size, max(1, round(density * size)))
    for each in steps:
        coo = jax.tree.map(lambda x: jnp.asarray(x[:workers]), each)
        sent, total, states, info = step(coo, state)
        state = jax.tree.map(lambda x: x[0], states)
        score.add(
            np.asarray(sent, np.float64).sum(axis=0),
            np.asarray(total[0], np.float64),
            int(np.sum(info.overflow)) / int(np.sum(coo.indices < size)),
            float(info.words[0]),
        )
    return score.report(workers)


def show(case: str, workers: int, regions: str, row: dict[str, float], timed: bool) -> None:
    """One line of the table."""
    print(
        f"{case:24} {workers:>3} {regions:9} {row['missing']:>8.1%} {row['missing_worst']:>8.1%} "
        f"{row['mass']:>7.3f} {row['overflow']:>9.2%} {row['wait']:>5.0f} {row['words']:>6.2f}"
        + (f" {1e3 * row['seconds']:>9.0f}" if timed else ""),
        flush=True,
    )


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = recording_parser(__doc__, steps=100)
    parser.add_argument("--workers", type=options.at_least_one, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--size", type=options.at_least_one, default=12_000, help="n")
    parser.add_argument("--selected", type=options.at_least_one, default=120, help="k")
    parser.add_argument("--slack", type=float, help="of ok_topk; by default that of the regions")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS, metavar="INPUT")
    parser.add_argument("--regions", nargs="+", choices=REGIONS, default=REGIONS[:2])
    parser.add_argument("--recorded", action="store_true", help="selections of two trainings")
    parser.add_argument("--every", type=options.at_least_one, default=5, help="steps to a record")
    parser.add_argument("--factor", type=float, default=100.0, help="on one layer's gradient")
    parser.add_argument("--time", action="store_true", help="print the wall time of a step")
    args = parser.parse_args(argv)
    if args.plot:
        parser.error("--plot: this program draws nothing")
    print(
        f"{'input':24} {'P':>3} {'regions':9} {'missing':>8} {'worst':>8} {'mass':>7} "
        f"{'overflow':>9} {'wait':>5} {'words':>6}" + (f" {'ms':>9}" if args.time else "")
    )
    rows = []
    if args.recorded:
        for run in recorded_runs(args):
            for hard in (False, True):
                steps, description = record(run, max(args.workers), hard, args)
                case = f"{run.name}, {description['case']}"
                for workers in args.workers:
                    for regions in args.regions:
                        row = recorded(steps, workers, regions, run.density)
                        show(case, workers, regions, row, False)
                        rows.append({"case": case, "workers": workers, "regions": regions, **row})
    else:
        for case in args.inputs:
            for workers in args.workers:
                for regions in args.regions:
                    row = synthetic(case, workers, regions, args)
                    show(case, workers, regions, row, args.time)
                    if not args.time:
                        del row["seconds"]
                    rows.append({"case": case, "workers": workers, "regions": regions, **row})
    reports.write(args.json, {"size": args.size, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
