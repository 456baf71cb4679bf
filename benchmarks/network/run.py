"""Training steps over real sockets with a limited bandwidth: every host a network namespace.

    sudo python -m benchmarks.network.run --workers 4 --link 100mbit 1gbit --params 14.7e6
    sudo python -m benchmarks.network.run --quick
    sudo python -m benchmarks.network.run --clean

The gradients are given, so that nothing but compression, exchange and update is timed.
Contestants are optax_ext's allreduces (jax.distributed over Gloo) and, where PyTorch is
installed, its DistributedDataParallel over Gloo: plain, with fp16, and with PowerSGD. All of
them take turns in each round, and a ratio is one of the same round. docs/network.md says how
it is set up and how to read it.

Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import importlib.util
import os
import platform
import sys
from pathlib import Path

import jax

from .._common import namespaces, options, reports
from .._common.contestants import find
from .._common.processes import interrupt_when_told
from . import _report, _session
from ._problem import SHAPES

_CODECS = ("narrow16", "narrow8")
METHODS = (
    *("dense", "dense/adamw", "dense16/adamw", "alone/adamw", "dense/leaves"),
    *("ok_topk", "ok_topk/rotation", *(f"ok_topk/{codec}" for codec in _CODECS)),
    *("ok_topk/reuse", *(f"ok_topk/reuse/{codec}" for codec in _CODECS)),
    *("ok_topk/reuse/global32", "agreed", "agreed/few", "sparse_adamw", "sparse_sgd"),
    *("powersgd1", "powersgd1/adamw", "powersgd4/adamw", "acp_sgd1", "topk_a", "topk_dsa"),
    *("gtopk", "ddp", "ddp/fp16", "ddp/powersgd1", "ddp/powersgd4"),
)
QUICK = ("dense", "ok_topk", "ok_topk/reuse/narrow8", "topk_a")
_SETTINGS = ("density", "shapes", "rounds", "steps", "warmup", "pin", "breakdown", "seed")
# Left for everything else on the machine.
_MEMORY_SHARE = 0.8


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the files that are asked for."""
    made = options.parser_of(__doc__)
    add = made.add_argument
    options.add_usual(made, workers=[4], density=0.01, rounds=9, steps=8, seed=0, timeout=900)
    options.add_usual(made, warmup=(16, "steps before the first turn"))
    add("--link", type=options.link, nargs="+", default=["1gbit"], metavar="RATE")
    add("--params", type=options.at_least_one, nargs="+", metavar="N", help="14.7e6")
    add("--methods", nargs="+", choices=METHODS, metavar="NAME", help=", ".join(METHODS))
    add("--shapes", choices=SHAPES, default="vgg", help="of the parameters")
    add("--no-pin", action="store_false", dest="pin", help="let processes use all cores")
    parts = "leave out the parts of a step"
    add("--no-breakdown", action="store_false", dest="breakdown", help=parts)
    options.add_outputs(made, plot=True)
    add("--quick", action="store_true", help="a functional test with a tiny n")
    add("--clean", action="store_true", help="remove leftovers of dead runs, and end")
    args = made.parse_args(argv)
    if args.clean:
        removed = namespaces.clean()
        print(f"removed {len(removed)} namespaces of dead runs {' '.join(removed)}".rstrip())
        return 0
    if args.quick:
        args.rounds, args.steps, args.warmup = 2, 2, 3
    sizes = args.params or [20_000 if args.quick else 14_700_000]
    methods = _methods(args)
    interrupt_when_told()
    options.require_network()
    links = list(dict.fromkeys([*args.link, *(["none"] if args.breakdown else [])]))
    settings = _machine() | {name: getattr(args, name) for name in _SETTINGS}
    settings |= {"seconds": args.timeout}
    found = {"points": [], "links": [], "local": []}
    for size in sizes:
        for hosts in args.workers:
            batches = _session.batches(methods, size, hosts, _MEMORY_SHARE * _available_memory())
            rows = _session.measure(size, hosts, links, batches, args)
            for name, more in rows.items():
                found[name] += more
            print("\n" + "\n\n".join(_report.tables(rows)), flush=True)
            # After each session: hours of measurements survive a failure in the next.
            reports.write(args.json, {"settings": settings, **found})
    if args.plot:
        title = f"Steps with given gradients, density {args.density:g}; speed-up over dense"
        _report.draw(args.plot, found, title)
    return 0


def _methods(args: argparse.Namespace) -> list[str]:
    has_torch = importlib.util.find_spec("torch") is not None
    if args.methods:
        if not has_torch and any(find(name).torch for name in args.methods):
            raise options.InputError("--methods: PyTorch is not installed (pip install torch)")
        return list(dict.fromkeys([_session.BASELINE, *args.methods]))
    if not has_torch:
        options.say("PyTorch is not installed: its methods are left out")
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


if __name__ == "__main__":
    sys.exit(main())
