"""The time of a step of a real model over links with a limited bandwidth, in two groups.

    sudo python -m benchmarks.learning.step_times --group buckets norms --link 100mbit 1gbit

Processes on hosts of their own (network namespaces) take steps of a real model, as in
``benchmarks.learning.time``. Contestants take turns in every round.

buckets: the gain of an exchange in buckets that overlaps the backward pass: DenseOvlp of Ok-Topk's
evaluation, and `optax_ext.bucketed` around a sparse exchange. "hidden" is the share of the exchange
that costs no time: 1 - (t - alone) / (whole - alone), where alone is a step that exchanges nothing
and whole is one exchange of the same kind after the backward pass.

norms: the layers' norms of LAMB computed by every worker (optax), a slice of each by each worker
(`optax_ext.contrib.lamb`), and whole layers dealt out (`optax_ext.contrib.distributed`).

Linux only, with root and iproute2 (ip, tc).
"""

from statistics import median

from .._common import display, namespaces, options, reports
from .._common.timing import over
from ..network._workers import slowest
from . import time
from ._contestants import NOTHING, over_links

Times = dict[str, list[float]]
# The contestants of each, starting with the one that the others are compared with.
GROUPS = {name: of for name, of in over_links().items() if name != "time"}


def hidden(found: Times, name: str) -> list[float] | None:
    """The share of the exchange that costs no time, by round; None without buckets."""
    whole = name.split(",")[0]
    if whole == name or NOTHING not in found:
        return None
    rounds = zip(found[name], found[NOTHING], found[whole], strict=True)
    return [1 - (step - alone) / (all_of_it - alone) for step, alone, all_of_it in rounds]


def spread(values: list[float] | None) -> tuple[float, float, float] | None:
    """A cell: the median, the least and the most."""
    return None if values is None else (median(values), min(values), max(values))


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, and prints the table of each group and link."""
    usual = {"batch": (8, "of all workers"), "rounds": 5, "timeout": 600}
    usual |= {"steps": (10, "of a contestant in a round"), "task": ("text", None, time.WIDTHS)}
    usual |= {"group": (list(GROUPS), None, GROUPS)} | options.LINKS
    parser = options.parser_of(__doc__, "text", "width", "json", **usual)
    args = parser.parse_args(argv)
    args.images, args.width = None, args.width or time.WIDTHS[args.task]
    options.check_batch(parser, args.batch, args.workers)
    options.require_network()
    cases = [(group, link) for group in args.group for link in args.link]
    seconds = {f"{g}, {link}": {name: [] for name in GROUPS[g]} for g, link in cases}
    with namespaces.network(args.workers) as made, time.started(made, args) as group_of:
        for number in range(args.rounds):
            for (_, link), of_link in zip(cases, seconds.values(), strict=True):
                made.limit(link)
                for name, found in of_link.items():
                    options.say(f"round {number + 1} of {args.rounds}, {link}, {name}")
                    begin = {"options": None, "contestant": name, "seed": 0}
                    answers = group_of(name).ask("begin", **begin, warmup=args.steps)
                    found.append(slowest(answers))
    what = f"P = {args.workers}, batch {args.batch}, {args.rounds} rounds of {args.steps} steps"
    for case, found in seconds.items():
        rows, first = [], next(iter(found))
        for name, times in found.items():
            row = {"contestant": name, "step, ms": 1000 * median(times)}
            row[f"times as fast as {first}"] = spread(over(found[first], times))
            rows.append(row | {"hidden": spread(hidden(found, name))})
        display.show_rows(f"{args.task}, {case}, {what}: median, least and most", rows, digits=3)
    reports.write(args.json, seconds)


if __name__ == "__main__":
    raise SystemExit(main())
