"""All measurements of one number of hosts and one number of parameters."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from .._common.contestants import find
from .._common.namespaces import Hosts, network
from .._common.options import say
from ._problem import SHAPES
from ._workers import Answer, WorkerError, Workers, groups, in_turns, mean, slowest

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
Found = dict[str, list[dict[str, Any]]]


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
        if need([*found[-1], name]) > available and found[-1] != [BASELINE]:
            found.append([BASELINE])
        found[-1].append(name)
    if (most := max(map(need, found))) > available:
        raise WorkerError(
            f"{hosts} hosts with {size:,} parameters need about {most / 1e9:.0f} GB of free memory "
            f"for a method, and there are {available / 1e9:.0f}: use fewer --workers or --params"
        )
    return found


def measure(
    size: int, hosts: int, links: Sequence[str], batches: Sequence[Sequence[str]], args: Namespace
) -> Found:
    """Rows for a JSON file: steps over each link, its alpha and beta, steps without exchange."""
    found: Found = {"points": [], "links": [], "local": []}
    config = {"density": args.density, "shapes": SHAPES[args.shapes](size), "seed": args.seed}
    with network(hosts) as made:
        for number, names in enumerate(batches):
            with groups(made, config, pin=not args.no_pin, seconds=args.timeout) as group:

                def owner(name: str, group=group) -> Workers:
                    role = "_torch" if find(name).torch else "_given"
                    return group(f"{__package__}.{role}:Worker")

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
) -> Found:
    """What the others have in common with the first batch is measured in that one only."""
    found: Found = {"points": [], "links": [], "local": []}
    new = [name for name in names if first or name != BASELINE]

    def prepare(name: str, **options: Any) -> Any:
        # Only what keeps a residual has a beginning; a dense step takes seconds on a slow link.
        short = find(name).torch or name.startswith("dense")
        warmup = min(args.warmup, 4) if short else args.warmup
        say(f"{name}: compiling and {warmup} steps")
        return owner(name).ask("prepare", method=name, warmup=warmup, **options)[0]["words"]

    for name in dict.fromkeys([REST, *names]) if not args.no_breakdown else ():
        if not find(name).torch and (first or name not in (BASELINE, REST)):
            # The step of one worker on each host, all at once: they share the cores as ever.
            prepare(name, local=True)
            asked = {"method": name, "steps": args.steps}
            rounds = [owner(name).ask("measure", **asked) for _ in range(args.rounds)]
            owner(name).ask("drop", method=name)
            row = _counted(rounds)
            times = {key: row[key] for key in ("seconds", "cpu_seconds")}
            found["local"].append({"method": name} | times)
    words, steps = {name: prepare(name) for name in names}, {}

    def ask(name: str) -> list[Answer]:
        return owner(name).ask("measure", method=name, steps=steps[name])

    for link in links:
        made.limit(link)
        if first:
            say(f"{link}: latency")
            fitted = owner(BASELINE).ask("latency", sizes=_LATENCY_SIZES, rounds=5)[0]
            found["links"].append({"link": link} | fitted)
        for name in names:
            seconds = slowest(owner(name).ask("measure", method=name, steps=1))
            steps[name] = max(1, min(args.steps, math.ceil(_ROUND_SECONDS / seconds)))
        rounds = in_turns(ask, names, args.rounds, link)
        base = {"baseline_seconds": _counted(rounds[BASELINE])["seconds"]}
        for name in new:
            row = {"link": link, "method": name, "program_words": words[name]}
            found["points"].append(row | _counted(rounds[name]) | base)
    made.limit("none")
    return found


def _counted(rounds: Sequence[Sequence[Answer]]) -> dict[str, list[Any]]:
    """Of each round the slowest worker's time, and the mean of what they count."""
    counted = ("cpu_seconds", "received", "sent")
    row = {key: [mean(answers, key) for answers in rounds] for key in counted}
    words = [answers[0]["words"] for answers in rounds]
    row["words"] = [x for x in words if x is not None]
    return row | {"seconds": [slowest(answers) for answers in rounds]}
