"""Trains a linear model once with each exchange, and compares what they cost.

    python -m examples.linear_models
    python -m examples.linear_models --data a9a --test a9a.t --solver
    python -m examples.linear_models --generate url --rows 20000 --batch 1000 --processes
    python -m examples.linear_models --method scd
    mpirun -n 4 python -m examples.linear_models --mpi

docs/linear_models.md has what was measured.
"""

import argparse
import json
import sys

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .._data import InputError
from .._report import write_atomically
from . import (
    batches,
    coordinate_descent,
    data,
    generate,
    group,
    launch,
    models,
    options,
    reference,
    report,
    sgd,
    sharded,
)
from .run import Run


def compare(opts: argparse.Namespace) -> None:
    """Trains with each exchange, prints the table, and writes the figure."""
    if opts.coordinator:
        launch.join(opts.coordinator, opts.workers, opts.process_id)
    if opts.mpi:
        workers = group.over_mpi()
    else:
        workers = group.on_devices(None if opts.coordinator else opts.workers)
    source, test = _read(opts)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=not workers.leads)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        runs = _train(opts, workers, data.spread(source), progress)
    if not workers.leads:
        return

    solver = None
    if opts.solver:
        matrix, labels = source.rows(0, source.count)
        _, solver = reference.solved(matrix, labels, opts.model, opts.regularisation)
    title = (
        f"{source.name}: {source.count:,} rows, {source.size:,} features; {opts.model}, "
        f"{opts.method}, {workers.workers} workers"
    )
    numbers = report.summary(runs, title, solver)
    Console().print(report.make_table(numbers))
    if test is not None:
        weights = runs[-1].weights[data.spread_indices(np.arange(source.size), source.size)]
        numbers["test_accuracy"] = reference.accuracy(*test, weights)
        print(f"accuracy on {opts.test.name}: {numbers['test_accuracy']:.2%}")
    report.draw(numbers, opts.out)
    print(f"wrote {opts.out}")
    if opts.json:
        text = json.dumps(numbers, indent=2) + "\n"
        write_atomically(opts.json, lambda part: part.write_text(text))


def _read(opts: argparse.Namespace):
    """The rows to train on, and those to test on."""
    if opts.data is None:
        shape = generate.SHAPES[opts.generate]
        shape = shape._replace(rows=opts.rows or shape.rows)
        return generate.power_law(opts.generate, shape, opts.seed), None
    source, classes = data.from_file(opts.data, opts.size, opts.seed)
    if opts.test is None:
        return source, None
    matrix, labels, _ = data.read(opts.test, source.size, classes)
    return source, (matrix, labels)


def _train(
    opts: argparse.Namespace, workers: group.Group, source: data.Source, progress: Progress
) -> list[Run]:
    model = models.MODELS[opts.model]()
    if opts.method == "sgd":
        made = batches.make(source, workers, opts.batch)
        rate = opts.rate or sgd.default_rate(model, made)
        if rate * opts.regularisation >= 1:
            raise InputError(f"--regularisation {opts.regularisation} is too large for this data")
        settings = sgd.Settings(rate, opts.regularisation, opts.seed)

        def trainer(name: str):
            return sgd.Trainer(workers, model, made, name, settings)
    else:
        descent = sharded if opts.features == "sharded" else coordinate_descent
        problem = descent.problem_of(source, workers)
        settings = coordinate_descent.Settings(opts.block, opts.regularisation, opts.seed)

        def trainer(name: str):
            return descent.Trainer(workers, model, problem, name, settings)

    runs = []
    for name in opts.exchange:
        task = progress.add_task(name, total=None)
        training = trainer(name)
        progress.reset(task, total=opts.epochs * training.run.steps)
        for _ in range(opts.epochs):
            training.epoch(lambda task=task: progress.advance(task))
        runs.append(training.finished())
    return runs


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    opts = options.parse(argv)
    try:
        if opts.processes:
            given = sys.argv[1:] if argv is None else argv
            return launch.on_loopback([x for x in given if x != "--processes"], opts.workers)
        compare(opts)
    except InputError as error:
        # All processes read the same data and see the same error.
        if not opts.process_id:
            print(f"linear_models: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
