"""What Ok-Topk delivers with different divisions of the indices: hashed, balanced and equal.

    python -m benchmarks.training.regions [--workers 2 4 8 16] [--size 12000] [--selected 120]

Simulated workers run error feedback with exact top-k selections on synthetic gradients, each of
which is hard for regions in its own way (`gradient`). The ideal is the top k of the sum of the
workers' selections, computed separately; benchmarks/archive.md explains the columns.

With `--recorded` the selections of two trainings go through each division instead, recorded as in
load_balance. They have the residuals of that training, so "wait" means little.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc

from .._common import display, options, reports
from ._recorded_tasks import recording_parser
from ._replay import on_workers
from .load_balance import recordings

REGIONS = ("hashed", "balanced", "equal")
INPUTS = ("iid", "same region", "drifting", "heavy tails", "one worker", "own region")


def gradient(name: str, step: int, workers: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """The gradients of all workers in one step, ``f32[P, n]``.

    Their mass is everywhere (iid), also with scales by layer (heavy tails, Cauchy); in 1/16 of the
    indices, which may move by 1/40 at each step, or in which one worker outweighs the others; or
    for each worker in a region of its own.
    """
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
def make_step(regions: str, density: float, workers: int, slack: float | None, recorded: bool):
    """The initial state of an allreduce, and a step of all workers."""
    given = {"density": density, "regions": regions, "slack": slack}
    allreduce = sc.allreduce.ok_topk(**given, schedule="all_to_all")
    selector = None if recorded else sc.select.topk(density=density)
    return allreduce.init, on_workers(allreduce, workers, selector)


def deliver(
    inputs: Iterable[Any], size: int, k: int, workers: int, regions: str, slack: float | None
) -> dict[str, float]:
    """Compares a division with the ideal, on gradients or selections of all workers by step."""
    state, residual, waiting, rows = None, 0.0, np.zeros(size, int), []
    for given in inputs:
        recorded = isinstance(given, sc.PaddedCOO)
        init, step = make_step(regions, k / size, workers, slack, recorded)
        state = init(size, workers) if state is None else state
        given = jax.tree.map(jnp.asarray, given) if recorded else residual + given
        sent, total, residual, state, info = step(given, state)
        sent, total = np.asarray(sent, np.float64), np.asarray(total[0], np.float64)
        whole = sent.sum(axis=0)
        ideal = np.argpartition(-np.abs(whole), k - 1)[:k]
        ideal = ideal[whole[ideal] != 0]
        missed = ideal[total[ideal] == 0]
        waited, waiting = waiting, np.zeros_like(waiting)
        waiting[missed] = waited[missed] + 1
        mass = np.abs(total).sum() / np.abs(whole[ideal]).sum()
        overflow = int(np.sum(info.overflow)) / np.count_nonzero(sent)
        words = float(info.words[0]) / (k * (workers - 1) / workers)
        rows.append((missed.size / ideal.size, mass, overflow, waiting.max(), words))
    missing, mass, overflow, _, words = np.mean(rows, axis=0)
    worst, _, _, wait, _ = np.max(rows, axis=0)
    found = {"missing": missing, "missing_worst": worst, "mass": mass, "overflow": overflow}
    return found | {"wait": int(wait), "words": words}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, int, Callable[[int], Any]]]:
    """Each case: its name, n, k, and a function from P to the inputs, step by step."""
    if args.recorded:
        for steps, report in recordings(args):
            recorded = functools.partial(_first_of, steps)
            yield f"{report['run']}, {report['case']}", report["size"], report["k"], recorded
        return
    for name in args.inputs:
        yield name, args.size, args.selected, functools.partial(_synthetic, name, args)


def _first_of(steps: Iterable[sc.PaddedCOO], workers: int) -> Iterator[sc.PaddedCOO]:
    return (jax.tree.map(lambda x: x[:workers], step) for step in steps)


def _synthetic(name: str, args: argparse.Namespace, workers: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(args.seed)
    return (gradient(name, i, workers, args.size, rng) for i in range(args.steps))


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    usual = {"steps": 100, "workers": [2, 4, 8, 16], "every": 5, "size": (12_000, "n")}
    usual |= {"selected": (120, "k"), "inputs": (list(INPUTS), None, INPUTS)}
    usual |= {"slack": (None, "of ok_topk; by default that of the regions")}
    usual |= {"regions": (list(REGIONS[:2]), None, REGIONS)}
    usual |= {"recorded": (False, "selections of two trainings")}
    usual |= {"factor": (100.0, "on one layer's gradient")}
    args = recording_parser(__doc__, **usual).parse_args(argv)
    rows = []
    for case, size, k, inputs in cases(args):
        for workers in args.workers:
            for regions in args.regions:
                options.progress(f"{case}, P = {workers}, {regions}", last=True)
                row = {"case": case, "workers": workers, "regions": regions}
                rows.append(row | deliver(inputs(workers), size, k, workers, regions, args.slack))
    title = f"what arrives of the ideal, in {args.steps} steps"
    display.show_rows(title, rows)
    reports.write(args.json, {"size": args.size, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
