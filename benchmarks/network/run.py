"""Training steps over real sockets with a limited bandwidth: every host a network namespace.

    sudo python -m benchmarks.network.run --workers 4 --link 100mbit 1gbit --params 14.7e6
    sudo python -m benchmarks.network.run --quick
    sudo python -m benchmarks.network.run --clean

The gradients are given, so that only compression, exchange and update are timed. The contestants
are optax_ext's allreduces and, if PyTorch is installed, its DistributedDataParallel over Gloo. All
take turns in each round, and a ratio is within one round. docs/network.md explains the setup and
the columns. Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import importlib.util
import itertools
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from .._common import namespaces, options, reports
from .._common.contestants import find
from .._common.namespaces import Hosts
from .._common.options import say
from . import _report
from ._problem import SHAPES
from ._report import REST
from ._workers import Answer, WorkerError, Workers, counted, groups, in_turns, slowest

_CODECS = ("narrow16", "narrow8")
METHODS = (
    *("dense", "dense/adamw", "dense16/adamw", "alone/adamw", "dense/leaves"),
    *("ok_topk", "ok_topk/rotation", *(f"ok_topk/{codec}" for codec in _CODECS)),
    *("ok_topk/reuse", *(f"ok_topk/reuse/{codec}" for codec in _CODECS)),
    *(
        "ok_topk/reuse/global32",
        "partitioned_topk",
        "partitioned_topk/few",
        "sparse_adamw",
        "sparse_sgd",
    ),
    *("sparse_adamw, factors", "sparse_adamw, bits (1, 3)"),
    *(
        "quantized",
        "quantized/adamw",
        "powersgd1",
        "powersgd1/adamw",
        "powersgd4/adamw",
        "acp_sgd1",
    ),
    *("topk_a", "topk_dsa"),
    *("gtopk", "ddp", "ddp/fp16", "ddp/powersgd1", "ddp/powersgd4"),
)
QUICK = ("dense", "ok_topk", "ok_topk/reuse/narrow8", "topk_a")
_SETTINGS = ("density", "shapes", "rounds", "steps", "warmup", "no_pin", "seed", "timeout")
# The rest is left for everything else on the machine.
_MEMORY_SHARE = 0.9
BASELINE = "dense"
# n-sized float32 buffers: of a process (gradients, parameters and temporaries), and of each method
# (a residual, or DDP's parameters, buckets, errors and copies). With 124M parameters, dense and
# sparse_adamw took nine together.
_BUFFERS, _BUFFERS_OF_JAX, _BUFFERS_OF_TORCH = 7, 1, 4
_LIBRARIES = 0.4e9
# The approximate time of a method in a round, so that short steps are not lost in noise.
_ROUND_SECONDS = 0.5
# Words of the operands from which alpha and beta are fitted.
_LATENCY_SIZES = (256, 4096, 65_536)
Found = dict[str, list[dict[str, Any]]]
Names = Sequence[str]
Owner = Callable[[str], Workers]


def batches(methods: Sequence[str], size: int, hosts: int, available: float) -> list[list[str]]:
    """The methods in groups that fit into the memory, each with the baseline, or a WorkerError."""

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


def measure(size: int, hosts: int, links: Names, methods: Names, args: argparse.Namespace) -> Found:
    """Rows for a JSON file: steps over each link, its alpha and beta, steps without exchange."""
    found: Found = {"points": [], "links": [], "local": []}
    config = {"density": args.density, "shapes": SHAPES[args.shapes](size), "seed": args.seed}
    fitting = batches(methods, size, hosts, _MEMORY_SHARE * _available_memory())
    with namespaces.network(hosts) as made:
        for number, names in enumerate(fitting):
            with groups(made, config, pin=not args.no_pin, seconds=args.timeout) as group:

                def owner(name: str, group=group) -> Workers:
                    role = "_torch" if find(name).torch else "_given"
                    return group(f"{__package__}.{role}:Worker")

                for key, rows in _batch(made, links, names, number == 0, owner, args).items():
                    found[key] += [{"workers": hosts, "params": size} | row for row in rows]
    return found


def _batch(
    made: Hosts, links: Names, names: Names, first: bool, owner: Owner, args: argparse.Namespace
) -> Found:
    """The rows of a group of methods; only the first one measures the baseline and the links."""
    found: Found = {"points": [], "links": [], "local": []}
    new = [name for name in names if first or name != BASELINE]

    def prepare(name: str, **options: Any) -> Any:
        # Only methods with a residual need a warm-up; a dense step takes seconds on a slow link.
        short = find(name).torch or name.startswith("dense")
        warmup = min(args.warmup, 4) if short else args.warmup
        say(f"{name}: compiling and {warmup} steps")
        return owner(name).ask("prepare", method=name, warmup=warmup, **options)[0]["words"]

    for name in dict.fromkeys([REST, *names]) if not args.no_breakdown else ():
        if not find(name).torch and (first or name not in (BASELINE, REST)):
            # The step of one worker on each host, all at once, so that they also share the cores.
            prepare(name, local=True)
            asked = {"method": name, "steps": args.steps}
            rounds = [owner(name).ask("measure", **asked) for _ in range(args.rounds)]
            owner(name).ask("drop", method=name)
            found["local"].append({"method": name} | counted(rounds, "cpu_seconds"))
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
        base = {"baseline_seconds": counted(rounds[BASELINE])["seconds"]}
        for name in new:
            row = {"link": link, "method": name, "program_words": words[name]}
            row |= counted(rounds[name], "cpu_seconds", "received", "sent") | base
            said = [answers[0]["words"] for answers in rounds[name]]
            found["points"].append(row | {"words": [x for x in said if x is not None]})
    made.limit("none")
    return found


def _methods(args: argparse.Namespace) -> list[str]:
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch and any(find(name).torch for name in args.methods):
        raise options.InputError("--methods: PyTorch is not installed (pip install torch)")
    if args.methods:
        return list(dict.fromkeys([BASELINE, *args.methods]))
    torch = [name for name in METHODS if find(name).torch]
    names = QUICK if args.quick else [name for name in METHODS if name not in torch]
    return [*names, *(torch if has_torch else ())]


def _available_memory() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * float(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def _machine() -> dict:
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[1],
        "kernel": platform.release(),
        "tcp_congestion_control": congestion.read_text().strip(),
        "jax": jax.__version__,
    }


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the requested files."""
    usual = options.LINKS | {"workers": [4], "link": ["1gbit"], "density": 0.01, "seed": 0}
    usual |= {"rounds": 9, "steps": 8, "warmup": (16, "steps before the first turn")}
    usual |= {"params": ([], "14.7e6 by default"), "shapes": ("vgg", "of the parameters", SHAPES)}
    usual |= {"methods": ([], None, METHODS), "timeout": 900}
    usual |= {"no_breakdown": (False, "leave out the parts of a step")}
    usual |= {"quick": (False, "a functional test with a tiny n")}
    usual |= {"clean": (False, "remove leftovers of dead runs, and end")}
    args = options.parser_of(__doc__, "json", "plot", **usual).parse_args(argv)
    if args.clean:
        removed = namespaces.clean()
        print(f"removed {len(removed)} namespaces of dead runs {' '.join(removed)}".rstrip())
        return 0
    if args.quick:
        args.rounds, args.steps, args.warmup = 2, 2, 3
    sizes = args.params or [20_000 if args.quick else 14_700_000]
    methods = _methods(args)
    options.require_network()
    links = list(dict.fromkeys([*args.link, *([] if args.no_breakdown else ["none"])]))
    settings = _machine() | {name: getattr(args, name) for name in _SETTINGS}
    found: Found = {"points": [], "links": [], "local": []}
    for size, hosts in itertools.product(sizes, args.workers):
        rows = measure(size, hosts, links, methods, args)
        found = {name: found[name] + more for name, more in rows.items()}
        _report.show(rows)
        # After each session, so that hours of measurements survive a failure in the next.
        reports.write(args.json, {"settings": settings, **found})
    if args.plot:
        title = f"Steps with given gradients, density {args.density:g}; speed-up over dense"
        _report.draw(args.plot, found, title)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
