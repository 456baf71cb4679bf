"""The command line."""

import argparse
import os
import re
from pathlib import Path

from .._options import numbers_of, parser_of
from . import exchange, generate, models, report

# By method, and by where the features are.
EXCHANGES = {
    ("sgd", "replicated"): exchange.GRADIENTS,
    ("scd", "replicated"): exchange.COORDINATES,
    ("scd", "sharded"): exchange.MARGINS,
}
_DEFAULT = {
    ("sgd", "replicated"): ["dense", "ssar_recursive_double"],
    ("scd", "replicated"): ["dense_allgather", "sparse_allgather"],
    ("scd", "sharded"): ["dense", "ssar_recursive_double"],
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line when one of them is wrong."""
    about = "Train a linear model on sparse data with several workers, lossless."
    parser = parser_of(about, "linear_models")
    add, number = parser.add_argument, numbers_of(parser)

    add("--data", type=Path, metavar="FILE", help="a LIBSVM file, .gz and .bz2 unpacked")
    add("--test", type=Path, metavar="FILE", help="another one, for the accuracy")
    number("--size", int, None, 1, 2**31 - 2, "features; by default the largest index of --data")
    add("--generate", choices=generate.SHAPES, default="small", help="data without --data (small)")
    number("--rows", int, None, 1, 10**9, "rows of generated data")
    add("--model", choices=models.MODELS, default="logistic", help="(logistic); svm: squared hinge")
    add("--method", choices=("sgd", "scd"), default="sgd", help="SGD, or coordinate descent (sgd)")
    add(
        "--features",
        choices=("replicated", "sharded"),
        default="replicated",
        help="sharded, with scd: a worker has the columns of its own features only (replicated)",
    )
    add(
        "--exchange",
        nargs="+",
        metavar="NAME",
        help="; ".join(f"{' '.join(key)}: {', '.join(names)}" for key, names in EXCHANGES.items())
        + "; each is a training, by default the dense and the first sparse one",
    )
    number("--workers", int, None, 1, 1024, "workers (4; with --mpi the ranks)")
    number("--epochs", int, 10, 1, 10**6, "passes over the rows, or the coordinates")
    number("--batch", int, 100, 1, 10**7, "rows of a worker in a batch, for sgd")
    number("--block", int, 100, 1, 10**7, "coordinates of a worker in a step, for scd")
    number("--rate", float, None, 1e-12, 1e12, "of the first step of sgd; 1 / largest curvature")
    number("--regularisation", float, 1e-4, 1e-12, 1e6, "factor of |w|^2 / 2")
    number("--seed", int, 0, 0, 2**31 - 1, "of the data and of the order of rows and coordinates")
    add("--solver", action="store_true", help="also solve with scikit-learn, to compare")
    add("--processes", action="store_true", help="a process on this machine for each worker")
    add("--mpi", action="store_true", help="the workers are the ranks of mpirun")
    add("--coordinator", metavar="HOST:PORT", help="of processes on several hosts: where 0 listens")
    number("--process-id", int, None, 0, 1023, "of this process, with --coordinator")
    add("--out", type=Path, default=Path("linear_models.png"), help="figure (linear_models.png)")
    add("--json", type=Path, metavar="FILE", help="also write the numbers")
    options = parser.parse_args(argv)
    reason = _wrong(options)
    if reason:
        parser.error(reason)
    options.exchange = list(dict.fromkeys(options.exchange or _DEFAULT[_key(options)]))
    return options


def _key(options: argparse.Namespace) -> tuple[str, str]:
    return options.method, options.features


def _wrong(options: argparse.Namespace) -> str | None:
    """What is wrong with the options together, in one line."""
    if _key(options) not in EXCHANGES:
        return "--features sharded is for --method scd"
    known = EXCHANGES[_key(options)]
    for name in options.exchange or ():
        if name not in known:
            return (
                f"--exchange {name} is none of --method {options.method} with {options.features} "
                f"features: {', '.join(known)}"
            )
    if options.method == "scd" and models.MODELS[options.model]().curvature is None:
        return f"--model {options.model} has no second derivative, which scd needs: --model svm"
    if (options.rate or 0) * options.regularisation >= 1:
        return "--rate times --regularisation must be below 1"
    if options.data is None and (options.test or options.size):
        return "--test and --size are for --data"
    if options.data is not None and options.rows:
        return "--rows is for generated data, not for --data"
    if options.processes + options.mpi + (options.coordinator is not None) > 1:
        return "--processes, --mpi and --coordinator exclude one another"
    if (options.coordinator is None) != (options.process_id is None):
        return "--coordinator and --process-id go together"
    if options.coordinator and not re.fullmatch(r".+:\d{1,5}", options.coordinator):
        return f"--coordinator is {options.coordinator!r}; expected HOST:PORT"
    if options.mpi and options.workers:
        return "--workers is for a mesh; with --mpi it is the -n of mpirun"
    options.workers = options.workers or 4
    if options.process_id is not None and options.process_id >= options.workers:
        return f"--process-id is {options.process_id}, of {options.workers} workers"
    return _unwritable(options)


def _unwritable(options: argparse.Namespace) -> str | None:
    if options.out.suffix not in report.FORMATS:
        return f"--out {options.out} must end in one of {', '.join(report.FORMATS)}"
    for path in filter(None, (options.out, options.json)):
        if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
            return f"cannot write {path}"
    return None
