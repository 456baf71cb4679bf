"""Epochs of linear models over links with a limited bandwidth: every host a network namespace.

    sudo python -m benchmarks.network.linear_models --data url webspam --model logistic svm
    sudo python -m benchmarks.network.linear_models --method scd --data url --steps 100
    sudo python -m benchmarks.network.linear_models --quick

It repeats section 8.2 of SparCML (Table 2) with generated data in the shape of URL and webspam, and
the trainings of examples/linear_models, one for each exchange. They take turns. A turn is an epoch
or its first --steps, and seconds are scaled to an epoch. Linux only, with root and iproute2 (ip,
tc).
"""

import argparse
from collections.abc import Iterator
from typing import Any

from examples.linear_models import coordinate_descent, sgd, training, workers
from examples.linear_models import data as datasets
from examples.linear_models.data import SHAPES
from examples.linear_models.training import EXCHANGES, MODELS

from .._common import display, namespaces, options, timing
from .._common.worker import barrier, measured
from ._workers import all_of, groups, in_turns, mean, slowest

_BASE = {"sgd": "dense", "scd": "dense_allgather"}


class Worker:
    """The role of a host: the trainings of one data set, each continued from turn to turn."""

    def __init__(self, config: dict[str, Any]):
        given = config["data"], SHAPES[config["data"]], config["seed"], config["rows"]
        source = datasets.spread(datasets.power_law(*given))
        self._method: Any = {"sgd": sgd, "scd": coordinate_descent}[config["method"]]
        more = {"rate": None} if config["method"] == "sgd" else {"block": config["block"]}
        self._options = {name: config[name] for name in ("regularisation", "seed")} | more
        self._group = workers.on_devices()
        self.barrier = barrier(self._group.mesh)
        self._problem: Any = self._method.make(source, self._group, config["batch"])
        self._trainings: dict[tuple[str, str], Any] = {}

    def prepare(self, model: str, exchange: str) -> dict[str, Any]:
        """Compiles a training; returns the number of steps in an epoch."""
        what = self._group, training.MODELS[model], self._problem, exchange
        made = self._trainings[model, exchange] = self._method.Trainer(*what, **self._options)
        return {"steps": made.run.steps}

    def drop(self, model: str) -> dict[str, Any]:
        """Frees the trainings of a model."""
        self._trainings = {key: x for key, x in self._trainings.items() if key[0] != model}
        return {}

    def measure(self, model: str, exchange: str, most: int) -> dict[str, Any]:
        """Seconds, bytes and words of a step, averaged over an epoch or ``most`` steps."""
        trained = self._trainings[model, exchange]
        run, taken = trained.run, min(most, trained.run.steps)

        def take() -> list[float]:
            trained.epoch(most=most)
            return [run.words[-1]]

        return measured(self.barrier, take, taken) | {
            # Without the evaluation of the objective, which is no part of a step.
            "seconds": run.seconds[-1] / taken,
            "exchange_seconds": run.exchange_seconds[-1] / taken,
            "delivered": run.delivered[-1],
            "objective": run.objectives[-1],
        }


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, prints, and writes the requested file."""
    usual = {"workers": 4, "rows": (None, "of the generated data")}
    usual |= {"batch": (1000, "rows of a worker in a batch"), "regularisation": 1e-5}
    usual |= {"block": (100, "coordinates of a worker in a step"), "timeout": 1800}
    usual |= {"rounds": 5, "steps": 10**9, "seed": 0, "link": "1gbit"}
    usual |= {"data": (["url"], None, SHAPES), "model": (["logistic"], None, MODELS)}
    usual |= {"method": ("sgd", None, EXCHANGES)}
    usual |= {"quick": (False, "a functional test with little data")}
    made = options.parser_of(__doc__, "json", **usual)
    made.add_argument("--exchange", nargs="+", help="by default all of the method")
    args = made.parse_args(argv)
    known = EXCHANGES[args.method]
    for name in set(args.exchange or ()) - set(known):
        made.error(f"--exchange {name} is none of --method {args.method}: {', '.join(known)}")
    if args.quick:
        args.data, args.rounds, args.rows, args.batch, args.steps = ["small"], 2, 800, 50, 3
    all_of(args, args.data, _measured, _show)


def _measured(args: argparse.Namespace, data: str) -> Iterator[list[dict[str, Any]]]:
    """The rows of one data set, after each model."""
    names = [_BASE[args.method], *(args.exchange or EXCHANGES[args.method])]
    names = list(dict.fromkeys(names))
    given = ("rows", "method", "batch", "block", "seed", "regularisation")
    config = {"data": data, **{name: getattr(args, name) for name in given}}
    with (
        namespaces.network(args.workers) as hosts,
        groups(hosts, config, seconds=args.timeout) as group_of,
    ):
        options.say(f"{data}: making the data")
        group = group_of(f"{__package__}.linear_models:Worker")
        for model in args.model:
            hosts.limit("none")
            steps = 0
            for name in names:
                options.say(f"{data}, {model}: compiling {name}")
                steps = group.ask("prepare", model=model, exchange=name)[0]["steps"]
            hosts.limit(args.link)

            def ask(name: str, model=model) -> list[dict[str, Any]]:
                return group.ask("measure", model=model, exchange=name, most=args.steps)

            found = in_turns(ask, names, args.rounds, f"{data}, {model}")
            group.ask("drop", model=model)
            where = {"data": data, "model": model, "steps": steps}
            yield [where | _row(name, steps, answers) for name, answers in found.items()]


def _row(name: str, steps: int, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """For each round the slowest worker's times, the workers' common counts, and mean bytes."""
    # The worker that computes longest waits least in the exchange: each time has its own maximum.
    times = {"epoch_seconds": "seconds", "exchange_seconds": "exchange_seconds"}
    alike = {"words": "words", "delivered": "delivered", "objectives": "objective"}
    row = {key: [steps * slowest(x, of) for x in rounds] for key, of in times.items()}
    row |= {key: [answers[0][of] for answers in rounds] for key, of in alike.items()}
    return {"exchange": name, **row, "received": [mean(answers) for answers in rounds]}


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    base, lines = rows[0], []
    for row in rows:
        line: dict[str, Any] = {"": row["exchange"]}
        for what in ("epoch", "exchange"):
            seconds = row[f"{what}_seconds"]
            line[f"{what} s"] = timing.quartiles(seconds)[1]
            line[f"{what} ratio"] = timing.times_as_fast(base[f"{what}_seconds"], seconds)
        line |= {"words of a step": row["words"][0]}
        line |= {"base's / these": base["words"][0] / row["words"][0]}
        off = (abs(x - 1) for x in timing.over(row["objectives"], base["objectives"]))
        lines.append(line | {"differs by": max(off)})
    title = (
        f"{base['data']}, {base['model']}, {args.method}: {args.workers} workers, {args.link}, "
        f"{base['steps']:,} steps an epoch; ratios: times as fast as {base['exchange']}"
    )
    display.show_rows(title, lines)


if __name__ == "__main__":
    raise SystemExit(main())
