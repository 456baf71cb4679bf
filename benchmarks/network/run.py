"""Training steps over real sockets with a limited bandwidth: every host a network namespace.

    sudo python -m benchmarks.network.run --workers 4 --link 100mbit 1gbit --params 14.7e6
    sudo python -m benchmarks.network.run --quick
    sudo python -m benchmarks.network.run --clean

The gradients are given, so that nothing but compression, exchange and update is timed, of
optax_ext's allreduces and, where PyTorch is installed, of its DistributedDataParallel over Gloo.
All take turns in each round, and a ratio is one of the same round. docs/network.md says how it is
set up and how to read it. Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import importlib.util
import itertools
import os
import platform
from pathlib import Path

import jax

from .._common import namespaces, options, reports
from .._common.contestants import find
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
_SETTINGS = ("density", "shapes", "rounds", "steps", "warmup", "no_pin", "seed", "timeout")
# Left for everything else on the machine.
_MEMORY_SHARE = 0.8


@options.program
def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the files that are asked for."""
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
    found: _session.Found = {"points": [], "links": [], "local": []}
    for size, hosts in itertools.product(sizes, args.workers):
        batches = _session.batches(methods, size, hosts, _MEMORY_SHARE * _available_memory())
        rows = _session.measure(size, hosts, links, batches, args)
        found = {name: found[name] + more for name, more in rows.items()}
        _report.show(rows)
        # After each session: hours of measurements survive a failure in the next.
        reports.write(args.json, {"settings": settings, **found})
    if args.plot:
        title = f"Steps with given gradients, density {args.density:g}; speed-up over dense"
        _report.draw(args.plot, found, title)
    return 0


def _methods(args: argparse.Namespace) -> list[str]:
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch and any(find(name).torch for name in args.methods):
        raise options.InputError("--methods: PyTorch is not installed (pip install torch)")
    if args.methods:
        return list(dict.fromkeys([_session.BASELINE, *args.methods]))
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
    raise SystemExit(main())
