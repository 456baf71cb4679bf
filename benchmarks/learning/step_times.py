"""The time of a step of a real model over links with a limited bandwidth, in two groups.

    sudo python -m benchmarks.learning.step_times --group buckets norms --link 100mbit 1gbit

Processes on hosts of their own (network namespaces) take steps of a real model, as in
``benchmarks.learning.time``. Contestants take turns in every round.

buckets: what an exchange in buckets gains behind the backward pass. A bucket of the last layers is
complete before the pass is, and may be exchanged while the rest is computed: DenseOvlp of Ok-Topk's
evaluation, and `optax_ext.bucketed` around a sparse exchange. "hidden" is the share of the exchange
that costs no time: 1 - (t - alone) / (whole - alone), where alone is a step that exchanges nothing
and whole one exchange of the same kind when all is there; it is negative where buckets cost more
than they hide.

norms: the layers' norms of LAMB computed by every worker (optax), a slice of each by each worker
(`optax_ext.contrib.lamb`), and whole layers dealt out (`optax_ext.contrib.distributed`, the
operator of Shi et al.), with the allreduce that brings them together.

Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from .._common import display, namespaces, options, reports
from .._common.processes import interrupt_when_told
from .._common.timing import over
from ..network._workers import slowest
from . import _over_links, time

# The contestants of each, the one first that the others are compared with.
GROUPS = {"buckets": _over_links.in_buckets, "norms": _over_links.with_norms}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--group", choices=GROUPS, nargs="+", default=list(GROUPS))
    add("--task", choices=time.WIDTHS, default="text")
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--link", type=options.link, nargs="+", default=["100mbit", "1gbit"], metavar="RATE")
    add("--workers", type=options.several, default=4, metavar="P")
    add("--batch", type=options.at_least_one, default=8, help="of all workers")
    add("--width", type=options.at_least_one, help="of the model")
    add("--rounds", type=options.at_least_one, default=5)
    add("--steps", type=options.at_least_one, default=10, help="of a contestant in a round")
    add("--no-pin", action="store_true", help="let the processes move between the cores")
    add("--timeout", type=options.positive, default=600.0, metavar="SECONDS", help="of an answer")
    options.add_outputs(parser)
    args = parser.parse_args(argv)
    args.images, args.width = None, args.width or time.WIDTHS[args.task]
    if args.batch % args.workers:
        parser.error(f"--batch {args.batch} can't be dealt out to {args.workers} workers")
    return args


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by group and link, and contestant, one for each round."""
    cases = [(group, link) for group in args.group for link in args.link]
    seconds = {f"{g}, {link}": {name: [] for name in GROUPS[g]()} for g, link in cases}
    with namespaces.network(args.workers) as made, time.started(made, args) as group_of:
        for number in range(args.rounds):
            for (_, link), of_link in zip(cases, seconds.values(), strict=True):
                made.limit(link)
                for name, found in of_link.items():
                    options.progress(f"round {number + 1} of {args.rounds}, {link}, {name}")
                    begin = {"options": None, "contestant": name, "seed": 0}
                    answers = group_of(name).ask("begin", **begin, warmup=args.steps)
                    found.append(slowest(answers))
    options.progress("", last=True)
    return seconds


def hidden(found: dict[str, list[float]], name: str) -> list[float] | None:
    """What of the exchange costs no time, by round; None for what is not in buckets."""
    whole = name.split(",")[0]
    if whole == name or _over_links.NOTHING not in found:
        return None
    rounds = zip(found[name], found[_over_links.NOTHING], found[whole], strict=True)
    return [1 - (step - alone) / (all_of_it - alone) for step, alone, all_of_it in rounds]


def show(seconds: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> None:
    """The table of each group and link."""

    def spread(values: list[float] | None) -> str:
        if values is None:
            return "-"
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    for case, found in seconds.items():
        first = next(iter(found))
        display.show(
            f"{args.task}, {case}, P = {args.workers}, batch {args.batch}, {args.rounds} rounds of "
            f"{args.steps} steps",
            ["contestant", "step, ms", f"times as fast as {first}", "hidden"],
            [
                [
                    *(name, f"{1000 * median(times):.0f}"),
                    *(spread(over(found[first], times)), spread(hidden(found, name))),
                ]
                for name, times in found.items()
            ],
        )


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, and prints the tables."""
    args = parse(argv)
    interrupt_when_told()
    options.require_network()
    seconds = measure(args)
    show(seconds, args)
    reports.write(args.json, seconds)


if __name__ == "__main__":
    sys.exit(main())
