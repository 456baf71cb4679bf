"""Trains a linear model with each exchange; README.md here has the method."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from .._data import InputError
from .._options import check_outputs, numbers_of, parser_of
from .._report import write_atomically
from . import coordinate_descent, data, sgd, workers
from .training import EXCHANGES, MODELS

METHODS = {"sgd": sgd, "scd": coordinate_descent}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = parser_of("Train a linear model on sparse data, lossless.", "linear_models")
    add, number = parser.add_argument, numbers_of(parser)
    add("--data", type=Path, metavar="FILE", help="a LIBSVM file, .gz and .bz2 unpacked")
    add("--test", type=Path, metavar="FILE", help="another one, for the accuracy")
    number("--size", int, None, 1, 2**31 - 2, "features; by default the largest index of --data")
    add("--generate", choices=data.SHAPES, default="small", help="data without --data (small)")
    number("--rows", int, None, 1, 10**9, "rows of generated data")
    add("--model", choices=MODELS, default="logistic", help="(logistic); svm: squared hinge")
    add("--method", choices=EXCHANGES, default="sgd", help="SGD, or coordinate descent (sgd)")
    known = "; ".join(f"{method}: {', '.join(names)}" for method, names in EXCHANGES.items())
    add("--exchange", nargs="+", metavar="NAME", help=f"{known}; each is a training")
    number("--workers", int, None, 1, 1024, "workers (4; with --mpi the ranks)")
    number("--epochs", int, 10, 1, 10**6, "passes over the rows, or the coordinates")
    number("--batch", int, 100, 1, 10**7, "rows of a worker in a batch, for sgd")
    number("--block", int, 100, 1, 10**7, "coordinates of a worker in a step, for scd")
    number("--rate", float, None, 1e-12, 1e12, "of the first step of sgd; 1 / largest curvature")
    number("--regularisation", float, 1e-4, 1e-12, 1e6, "factor of |w|^2 / 2")
    number("--seed", int, 0, 0, 2**31 - 1, "of the data and of the order of rows and coordinates")
    text = "a process for each worker: where the first one listens, and which one this is"
    add("--join", nargs=2, metavar=("HOST:PORT", "I"), help=text)
    add("--mpi", action="store_true", help="the workers are the ranks of mpirun")
    add("--json", type=Path, metavar="FILE", help="also write the numbers")
    opts = parser.parse_args(argv)
    opts.workers, ranks = opts.workers or 4, opts.mpi and (opts.workers or opts.join)
    known, (address, process) = EXCHANGES[opts.method], opts.join or ("localhost:1", "0")
    opts.exchange = list(dict.fromkeys(opts.exchange or known))
    wrong, joins = set(opts.exchange) - set(known), re.fullmatch(r".+:\d{1,5}", address)
    opts.process = int(process) if process.isdecimal() else opts.workers
    for holds, reason in (
        (
            wrong,
            f"--exchange {' '.join(wrong)} is none of --method {opts.method}: {', '.join(known)}",
        ),
        (not opts.data and (opts.test or opts.size), "--test and --size are for --data"),
        (opts.data and opts.rows, "--rows is for generated data, not for --data"),
        (ranks, "--workers and --join are for a mesh; with --mpi they are those of mpirun"),
        (not joins, f"--join is {address!r}; expected HOST:PORT"),
        (opts.process >= opts.workers, f"--join {process}: there are {opts.workers} workers"),
    ):
        if holds:
            parser.error(reason)
    check_outputs(parser, None, opts.json)
    return opts


def compare(opts: argparse.Namespace) -> None:
    """Trains with each exchange, prints its costs, and writes the numbers."""
    if opts.join:
        workers.join(opts.join[0], opts.workers, opts.process)
    count = None if opts.join else opts.workers
    group = workers.over_mpi() if opts.mpi else workers.on_devices(count)
    say = print if 0 in group.mine else lambda text: None
    if opts.data is None:
        shape, test = data.SHAPES[opts.generate], None
        source = data.power_law(opts.generate, shape, opts.seed, opts.rows)
    else:  # every process reads the whole file: it keeps its own part only
        matrix, labels, classes = data.read(opts.data, opts.size)
        order = np.random.default_rng(opts.seed).permutation(len(labels))
        source = data.of_matrix(opts.data.name, matrix[order], labels[order])
        test = opts.test and data.read(opts.test, source.size, classes)
    rows = f"{source.count:,} rows, {source.size:,} features"
    say(f"{source.name}: {rows}; {opts.model}, {opts.method}, {group.workers} workers")
    source, method = data.spread(source), METHODS[opts.method]
    given = {name: getattr(opts, name) for name in ("rate", "block", "regularisation", "seed")}
    del given["block" if opts.method == "sgd" else "rate"]
    problem, runs = method.make(source, group, opts.batch), {}
    for name in opts.exchange:
        training = method.Trainer(group, MODELS[opts.model], problem, name, **given)
        run, console = training.run, Console(stderr=True, quiet=say is not print)
        for _ in track(range(opts.epochs), name, console=console):
            training.epoch()
        runs[name] = vars(run)
        first = runs[opts.exchange[0]]["objectives"]
        run.difference = float(np.abs(np.divide(run.objectives, first) - 1).max())
        seconds, exchange, words = map(np.median, (run.seconds, run.exchange_seconds, run.words))
        say(
            f"{name}: objective {run.objectives[-1]:.6f}, differs by {run.difference:.0e}; "
            f"an epoch {seconds:.2f} s, exchange {exchange:.2f} s, {words:,.0f} words received"
        )
    numbers: dict[str, Any] = {"runs": runs}
    if test is not None:
        moved = data.spread_indices(np.arange(source.size), source.size)
        right = (test[0] @ training.weights[moved] > 0) == (test[1] > 0)
        numbers["test_accuracy"] = float(right.mean())
        say(f"accuracy on {opts.test.name}: {right.mean():.2%}")
    if opts.json and say is print:
        write_atomically(opts.json, lambda part: part.write_text(json.dumps(numbers, indent=2)))


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    opts = parse(argv)
    try:
        compare(opts)
    except InputError as error:
        # All processes read the same data and see the same error.
        if not opts.process:
            print(f"linear_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
