"""Epochs of linear models over links with a limited bandwidth: every host a network namespace.

    sudo python -m benchmarks.network.linear_models --data url webspam --model logistic svm
    sudo python -m benchmarks.network.linear_models --method scd --data url --steps 100
    sudo python -m benchmarks.network.linear_models --quick

It is section 8.2 of SparCML (Table 2) with generated data of the shape of URL and webspam. The
trainings are those of examples/linear_models, one for each exchange. They take turns, a turn is an
epoch or its first --steps, and a ratio is one of the same round. Seconds of a turn are scaled to an
epoch of the generated rows. docs/linear_models.md says how to read it.

Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import itertools
import sys
from typing import Any

from examples.linear_models.data import SHAPES
from examples.linear_models.training import EXCHANGES, MODELS

from .._common import display, namespaces, options, reports, timing
from .._common.processes import interrupt_when_told
from ._workers import WorkerError, workers

_BASE = {"sgd": "dense", "scd": "dense_allgather"}
_CELLS = ("", "epoch s", "exchange s", "epoch ratio", "quartiles", "exchange ratio", "quartiles")
_MORE = ("words of a step", "of the base", "differs by")
# A new port for every start: a closed one may be in use for a while.
_ports = itertools.count(9500)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = options.parser_of(__doc__)
    add = made.add_argument
    add("--data", nargs="+", choices=SHAPES, default=["url"], metavar="NAME")
    add("--model", nargs="+", choices=MODELS, default=["logistic"], metavar="NAME")
    add("--method", choices=EXCHANGES, default="sgd")
    add("--exchange", nargs="+", metavar="NAME", help="by default all of the method")
    add("--workers", type=options.several, default=4, metavar="P")
    add("--link", type=options.link, default="1gbit", metavar="RATE")
    add("--rows", type=options.at_least_one, help="of the generated data")
    add("--batch", type=options.at_least_one, default=1000, help="rows of a worker in a batch")
    add("--block", type=options.at_least_one, default=100, help="coordinates of a worker in a step")
    add("--regularisation", type=options.positive, default=1e-5)
    add("--rounds", type=options.at_least_one, default=5, help="turns of each exchange")
    add("--steps", type=options.at_least_one, default=10**9, help="of a turn at most")
    add("--seed", type=int, default=0)
    add("--timeout", type=options.positive, default=1800, help="seconds for one answer")
    options.add_outputs(made)
    add("--quick", action="store_true", help="a functional test with little data")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the file that is asked for."""
    own = parser()
    args = own.parse_args(argv)
    known = EXCHANGES[args.method]
    for name in args.exchange or ():
        if name not in known:
            own.error(f"--exchange {name} is none of --method {args.method}: {', '.join(known)}")
    if args.quick:
        args.data, args.rounds, args.rows, args.batch, args.steps = ["small"], 2, 800, 50, 3
    names = list(dict.fromkeys([_BASE[args.method], *(args.exchange or known)]))
    interrupt_when_told()
    try:
        reason = namespaces.unusable()
        if reason is not None:
            own.error(reason)
        rows: list[dict[str, Any]] = []
        for data in args.data:
            for found in _measured(args, data, names):
                rows += found
                _show(args, found)
                # After each: a failure in the next must not take it away.
                reports.write(args.json, {"settings": _settings(args), "rows": rows})
    except (namespaces.NetworkError, WorkerError) as error:
        print(f"{own.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{own.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "json"}


def _measured(args: argparse.Namespace, data: str, names: list[str]):
    """The rows of one data set, those of each model as they come."""
    with namespaces.network(args.workers) as hosts:
        config = {
            "workers": args.workers,
            "coordinator": f"{hosts.addresses[0]}:{next(_ports)}",
            "pin": True,
            "data": data,
            **{k: getattr(args, k) for k in ("rows", "method", "batch", "block", "seed")},
            "regularisation": args.regularisation,
        }
        options.say(f"{data}: making the data")
        program = f"{__package__}._linear_worker"
        with workers(program, hosts, config, threads=1, seconds=args.timeout) as group:
            for model in args.model:
                hosts.limit("none")
                steps = 0
                for name in names:
                    options.say(f"{data}, {model}: compiling {name}")
                    steps = group.ask("prepare", model=model, exchange=name)[0]["steps"]
                hosts.limit(args.link)
                found = {name: [] for name in names}
                for turn in range(args.rounds):
                    first = turn % len(names)
                    for name in names[first:] + names[:first]:
                        options.say(f"{data}, {model}: round {turn + 1} of {args.rounds}, {name}")
                        asked = {"model": model, "exchange": name, "most": args.steps}
                        found[name].append(group.ask("measure", **asked))
                group.ask("drop", model=model)
                yield [_row(data, model, name, steps, answers) for name, answers in found.items()]


def _row(data: str, model: str, name: str, steps: int, rounds: list) -> dict[str, Any]:
    """Of each round the slowest worker's time; counts are those of all alike, bytes their mean."""

    def slowest(key: str) -> list[float]:
        return [steps * max(answer[key] for answer in answers) for answers in rounds]

    return {
        "data": data,
        "model": model,
        "exchange": name,
        "steps": steps,
        "epoch_seconds": slowest("seconds"),
        # What the slowest to compute spends there is little: others wait for it in theirs.
        "exchange_seconds": slowest("exchange_seconds"),
        "words": [answers[0]["words"] for answers in rounds],
        "received": [sum(a["received"] for a in answers) / len(answers) for answers in rounds],
        "delivered": [answers[0]["delivered"] for answers in rounds],
        "objectives": [answers[0]["objective"] for answers in rounds],
    }


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    base, lines = rows[0], []

    def times_as_fast(row: dict[str, Any], key: str) -> list[str]:
        ratios = [a / b for a, b in zip(base[key], row[key], strict=True)]
        low, middle, high = timing.quartiles(ratios)
        return [f"{middle:.2f}", f"{low:.2f} - {high:.2f}"]

    for row in rows:
        pairs = zip(row["objectives"], base["objectives"], strict=True)
        epoch, exchanged = (
            timing.quartiles(row[key])[1] for key in ("epoch_seconds", "exchange_seconds")
        )
        lines.append(
            [
                row["exchange"],
                f"{epoch:.2f}",
                f"{exchanged:.2f}",
                *times_as_fast(row, "epoch_seconds"),
                *times_as_fast(row, "exchange_seconds"),
                f"{row['words'][0]:,.0f}",
                f"1/{base['words'][0] / row['words'][0]:,.1f}",
                f"{max(abs(a / b - 1) for a, b in pairs):.0e}",
            ]
        )
    title = (
        f"{base['data']}, {base['model']}, {args.method}: {args.workers} workers, {args.link}, "
        f"{base['steps']:,} steps an epoch; ratios: times as fast as {base['exchange']}"
    )
    display.show(title, _CELLS + _MORE, lines)


if __name__ == "__main__":
    sys.exit(main())
