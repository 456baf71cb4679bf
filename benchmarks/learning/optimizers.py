"""Losses of optax's optimizers by what exchanges the gradients, over simulated workers.

    python -m benchmarks.learning.optimizers --text FILE --runs FILE [--optimizers lion muon]
    python -m benchmarks.learning.optimizers --width 128 --steps 4000 --factors 0.5 1 2 --together

An optimizer trains the transformer of ``benchmarks.learning.steps`` after each exchange; or, if
there is a scaling for it, inside ``sparse_optimizer``; or in rounds, in ``sparse_optimizer`` with
``every`` and in ``diloco``. The learning rates of an optimizer are
its usual one times each of ``--factors``, the same for all exchanges; the table has the best mean
over the seeds. Runs that are in FILE are not repeated, and ``--show`` prints them.

Bytes are received by a worker in a step, as a share of what a dense allreduce of float32 takes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._common import display, options
from ..training._recorded_training import schedule
from ..training._simulated_training import Variant, exact_top_k, train
from . import _lines, _tasks
from ._optimizers import DENSE, DILOCO, EXCHANGES, INSIDE, OPTIMIZERS, ROUNDS, transformations
from .steps import NEEDED

USUAL = (DENSE, "ok_topk(0.01)", "powersgd(2)", "powersgd(4)", "quantized((2, 4))", INSIDE)


def variant(name: str, exchange: str, rate: float, steps: int) -> Variant:
    """An optimizer over simulated workers."""
    averaged = OPTIMIZERS[name].averaged
    if averaged is None:
        return Variant(*transformations(name, exchange, schedule(rate, steps), exact_top_k))
    warmup = max(1, steps // 20)
    at = optax.warmup_constant_schedule(0.05 * rate, rate, warmup)
    return Variant(*transformations(name, exchange, at, exact_top_k), averaged)


def ways(args: Any) -> list[tuple[str, str]]:
    """Optimizers and exchanges to train with."""
    return [
        (name, exchange)
        for name in args.optimizers
        for exchange in args.exchanges
        if exchange != INSIDE or OPTIMIZERS[name].scaling
    ]


def case_of(args: Any, name: str, exchange: str) -> dict[str, Any]:
    """What the runs of an optimizer and an exchange have in common."""
    case = {key: getattr(args, key) for key in ("width", "batch", "steps")}
    workers = 1 if exchange == DENSE else args.workers
    return case | {
        "task": "text",
        "share": 1.0,
        "workers": workers,
        "contestant": f"{name}, {exchange}",
    }


def rows_of(store: _lines.Store, args: Any) -> list[dict[str, Any]]:
    """A row for each optimizer and exchange of which there are runs."""
    rows = []
    for name, exchange in ways(args):
        runs, dense = (
            {run["seed"]: run for run in store.reported(**case_of(args, name, x))}
            for x in (exchange, DENSE)
        )
        if not runs:
            continue
        values = [run["value"] for run in runs.values()]
        pairs = [(runs[seed]["value"], dense[seed]["value"]) for seed in runs if seed in dense]
        worse = [_lines.worse(*pair, large=False) for pair in pairs]
        first = next(iter(runs.values()))
        share = None
        if exchange != DENSE and first["words"]:
            received = 2 * first["curve"]["size"] * (args.workers - 1) / args.workers
            share = f"1/{received / first['words']:.1f}"
        rows.append(
            {
                "optimizer": name,
                "exchange": exchange,
                "bytes": share,
                "rate": first["rate"],
                "seeds": len(values),
                "loss": np.mean(values),
                "worse by %": np.mean(worse) if worse and exchange != DENSE else None,
                "of each seed": worse if exchange != DENSE else None,
            }
        )
    return rows


@options.program
def main(argv: Sequence[str] | None = None) -> None:
    """Trains the missing runs, and prints all of them."""
    usual: dict[str, Any] = {"seeds": 3, "points": 4, "workers": 8, "batch": 64, "steps": 600}
    usual |= {"show": (False, "what is in --runs, and train nothing")}
    usual |= {"together": (False, "all rates and seeds of a way in one program")}
    parser = options.parser_of(__doc__, "text", "runs", "width", **usual)
    add = functools.partial(parser.add_argument, nargs="+")
    add("--optimizers", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--exchanges", choices=[*EXCHANGES, INSIDE, *ROUNDS, *DILOCO], default=list(USUAL))
    add("--factors", type=options.positive, default=[0.5, 1.0, 2.0])
    args = parser.parse_args(argv)
    args.width = args.width or _tasks.KINDS["text"].width
    options.check_batch(parser, args.batch, args.workers)
    store = _lines.Store(args.runs, NEEDED, large=False)
    if not args.show:
        task = _tasks.make("text", args.width, args.text, None)
        size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0)))
        for name, exchange in ways(args):
            case, rates = case_of(args, name, exchange), sorted(args.factors)
            rates = [factor * OPTIMIZERS[name].rate for factor in rates]
            missing = list(store.missing(rates, args.seeds, **case))
            while missing:
                # All rates with the first seed, and then the best of them with the others.
                some = missing if args.together else missing[:1]
                of_some = [sorted({key[i] for key in some}) for i in (0, 1)]
                found = train(
                    task,
                    functools.partial(variant, name, exchange),
                    rates=of_some[0],
                    seeds=of_some[1],
                    workers=args.workers,
                    steps=args.steps,
                    every=max(1, args.steps // args.points),
                    batch=args.batch,
                    label=case["contestant"],
                    together=args.together,
                )
                for rate, seed in some:
                    curve = found[rate, seed]
                    points = {"steps": curve.steps, "values": curve.values, "size": size}
                    result = {"value": curve.values[-1], "words": curve.words, "curve": points}
                    store.add({**case, "rate": rate, "seed": seed, **result})
                missing = list(store.missing(rates, args.seeds, **case))
    title = f"text, width {args.width}, {args.steps} steps, {args.workers} workers"
    display.show_rows(title, rows_of(store, args))


if __name__ == "__main__":
    raise SystemExit(main())
