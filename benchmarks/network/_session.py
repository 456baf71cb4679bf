"""All measurements of one number of hosts and one number of parameters."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from .._common.contestants import find
from .._common.namespaces import Hosts, network
from .._common.options import say
from ._problem import SHAPES
from ._workers import WorkerError, Workers, groups, mean, slowest

BASELINE = "dense"
# Of one worker alone this does nothing but apply the update.
REST = "dense/leaves"
# n-sized float32 buffers of a process: gradients, parameters and temporaries; and of each
# method: a residual, or DDP's parameters, buckets, errors and copies.
_BUFFERS, _BUFFERS_OF_JAX, _BUFFERS_OF_TORCH = 8, 1, 4
_LIBRARIES = 0.4e9
# A round of a method takes about so long, so that short steps are not lost in noise.
_ROUND_SECONDS = 0.5
# Words of the operands from which alpha and beta are fitted.
_LATENCY_SIZES = (256, 4096, 65_536)
_COUNTED = ("cpu_seconds", "received", "sent")


def batches(methods: Sequence[str], size: int, hosts: int, available: float) -> list[list[str]]:
    """The methods in groups whose hosts fit into the memory together, each with the baseline.

    A WorkerError where not even one method beside the baseline fits.
    """

    def need(names: Sequence[str]) -> float:
        torch = sum(find(name).torch for name in names)
        buffers = _BUFFERS + _BUFFERS_OF_JAX * (len(names) - torch)
        if torch:
            buffers += _BUFFERS + _BUFFERS_OF_TORCH * torch
        return hosts * (4 * size * buffers + _LIBRARIES * (1 + bool(torch)))

    found: list[list[str]] = [[BASELINE]]
    for name in methods:
        if name == BASELINE:
            continue
        if need([*found[-1], name]) > available:
            if need([BASELINE, name]) > available:
                raise WorkerError(
                    f"{hosts} hosts with {size:,} parameters need about "
                    f"{need([BASELINE, name]) / 1e9:.0f} GB of free memory for {name}, and there "
                    f"are {available / 1e9:.0f}: use fewer --workers or --params"
                )
            found.append([BASELINE])
        found[-1].append(name)
    return found


def measure(
    size: int, hosts: int, links: Sequence[str], batches: Sequence[Sequence[str]], args: Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Rows for a JSON file: steps over each link, its alpha and beta, steps without exchange."""
    found: dict[str, list[dict[str, Any]]] = {"points": [], "links": [], "local": []}
    config = {"density": args.density, "shapes": SHAPES[args.shapes](size), "seed": args.seed}
    with network(hosts) as made:
        for number, names in enumerate(batches):
            with groups(made, config, pin=args.pin, seconds=args.timeout) as group:

                def owner(name: str, group=group) -> Workers:
                    return group(
                        f"{__package__}.{'_torch' if find(name).torch else '_given'}:Worker"
                    )

                for key, rows in _batch(made, links, names, number == 0, owner, args).items():
                    found[key] += [{"workers": hosts, "params": size} | row for row in rows]
    return found


def _batch(
    made: Hosts,
    links: Sequence[str],
    names: Sequence[str],
    first: bool,
    owner: Callable[[str], Workers],
    args: Namespace,
) -> dict[str, list[dict[str, Any]]]:
    """What the others have in common with the first batch is measured in that one only."""
    found: dict[str, list[dict[str, Any]]] = {"points": [], "links": [], "local": []}
    for name in dict.fromkeys([REST, *names]) if args.breakdown else ():
        if not find(name).torch and (first or name not in (BASELINE, REST)):
            say(f"{name}: a step without exchange")
            found["local"].append(_local(owner(name), name, args))
    words, steps = {}, {}
    for name in names:
        say(f"{name}: compiling and {args.warmup} steps")
        words[name] = owner(name).ask("prepare", method=name, warmup=_warmup(name, args))[0][
            "words"
        ]
    for link in links:
        made.limit(link)
        if first:
            say(f"{link}: latency")
            fitted = owner(BASELINE).ask("latency", sizes=_LATENCY_SIZES, rounds=5)[0]
            found["links"].append({"link": link} | fitted)
        for name in names:
            seconds = slowest(owner(name).ask("measure", method=name, steps=1))
            steps[name] = max(1, min(args.steps, math.ceil(_ROUND_SECONDS / seconds)))
        rows = {name: _row(link, name, words[name]) for name in names}
        for turn in range(args.rounds):
            say(f"{link}: round {turn + 1} of {args.rounds}")
            for name, row in rows.items():
                _add(row, owner(name).ask("measure", method=name, steps=steps[name]))
        for name, row in rows.items():
            row["baseline_seconds"] = rows[BASELINE]["seconds"]
            if first or name != BASELINE:
                found["points"].append(row)
    made.limit("none")
    return found


def _local(group: Workers, name: str, args: Namespace) -> dict[str, Any]:
    """The step of one worker on each host, all at once: they share the cores as ever."""
    group.ask("prepare", method=name, warmup=_warmup(name, args), local=True)
    row = _row("local", name, None)
    for _ in range(args.rounds):
        _add(row, group.ask("measure", method=name, steps=args.steps))
    group.ask("drop", method=name)
    return {key: row[key] for key in ("method", "seconds", "cpu_seconds")}


def _warmup(name: str, args: Namespace) -> int:
    # Only what keeps a residual has a beginning; a dense step takes seconds on a slow link.
    short = find(name).torch or name.startswith("dense")
    return min(args.warmup, 4) if short else args.warmup


def _row(link: str, name: str, words: Any) -> dict[str, Any]:
    lists = {key: [] for key in ("seconds", *_COUNTED, "words")}
    return {"link": link, "method": name, "program_words": words} | lists


def _add(row: dict[str, Any], answers: Sequence[dict[str, Any]]) -> None:
    """One round: the slowest worker's time, and the mean of what they count."""
    row["seconds"].append(slowest(answers))
    for key in _COUNTED:
        row[key].append(mean(answers, key))
    if answers[0]["words"] is not None:
        row["words"].append(answers[0]["words"])
