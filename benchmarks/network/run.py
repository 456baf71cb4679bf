"""Training steps over real sockets with a limited bandwidth: every host a network namespace.

    sudo python benchmarks/network/run.py --workers 4 --link 100mbit 1gbit --params 14.7e6
    sudo python benchmarks/network/run.py --quick
    sudo python benchmarks/network/run.py --clean

The gradients are given, so that nothing but compression, exchange and update is timed.
Contestants are optax_ext's allreduces (jax.distributed over Gloo) and, where PyTorch is
installed, its DistributedDataParallel over Gloo: plain, with fp16, and with PowerSGD. All of
them take turns in each round, and a ratio is one of the same round. docs/network.md says how
it is set up and how to read it.

Linux only, with root, iproute2 (ip, tc) and unshare.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import _hosts
import _plot
import _session
import _tables
import jax
from _methods import BASELINE, JAX, QUICK, TORCH
from _shapes import SHAPES
from _workers import WorkerError

# Left for everything else on the machine.
_MEMORY_SHARE = 0.8


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}\n")
    made.add_argument("--workers", type=_count, nargs="+", default=[4], metavar="P")
    made.add_argument("--link", type=_link, nargs="+", default=["1gbit"], metavar="RATE")
    made.add_argument("--params", type=_count, nargs="+", metavar="N", help="14.7e6")
    made.add_argument("--density", type=_share, default=0.01)
    made.add_argument(
        "--methods",
        nargs="+",
        choices=(*JAX, *TORCH),
        metavar="NAME",
        help=", ".join([*JAX, *TORCH]),
    )
    made.add_argument("--shapes", choices=SHAPES, default="vgg", help="of the parameters")
    made.add_argument("--rounds", type=_count, default=9, help="turns of each method")
    made.add_argument("--steps", type=_count, default=8, help="of a turn at most")
    made.add_argument("--warmup", type=_count, default=16, help="steps before the first turn")
    made.add_argument("--no-pin", action="store_true", help="let processes use all cores")
    made.add_argument("--no-breakdown", action="store_true", help="leave out the parts of a step")
    made.add_argument("--torch-alone", action="store_true", help="not in the same rounds as JAX")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout", type=float, default=900, help="seconds for one answer")
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--plot", type=Path, metavar="FILE", help="a PNG")
    made.add_argument("--quick", action="store_true", help="a functional test with a tiny n")
    made.add_argument("--clean", action="store_true", help="remove leftovers of dead runs, and end")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the files that are asked for."""
    options = parser()
    args = options.parse_args(argv)
    if args.clean:
        removed = _hosts.clean()
        print(f"removed {len(removed)} namespaces of dead runs {' '.join(removed)}".rstrip())
        return 0
    for file in filter(None, (args.json, args.plot)):
        if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
            options.error(f"cannot write {file}")
    if min(args.workers) < 2:
        options.error("--workers: an exchange needs at least 2")
    if args.quick:
        args.rounds, args.steps, args.warmup = 2, 2, 3
    sizes = args.params or [20_000 if args.quick else 14_700_000]
    methods = _methods(args)
    # A plain `kill` cleans up as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        reason = _hosts.unusable()
    except KeyboardInterrupt:
        return 130
    if reason is not None:
        options.error(reason)
    links = list(dict.fromkeys([*args.link, *([] if args.no_breakdown else ["none"])]))
    settings = _session.Settings(
        density=args.density,
        shapes=args.shapes,
        rounds=args.rounds,
        steps=args.steps,
        warmup=args.warmup,
        pin=not args.no_pin,
        breakdown=not args.no_breakdown,
        seed=args.seed,
        seconds=args.timeout,
    )
    found = {"points": [], "links": [], "local": []}
    try:
        for size in sizes:
            for hosts in args.workers:
                available = _MEMORY_SHARE * _available_memory()
                groups = _session.batches(methods, size, hosts, available, args.torch_alone)
                rows = _session.measure(size, hosts, links, groups, settings, _say)
                for name, more in rows.items():
                    found[name] += more
                print("\n" + "\n\n".join(_tables.tables(rows)), flush=True)
                # After each session: hours of measurements survive a failure in the next.
                if args.json:
                    _write(args.json, _machine() | settings._asdict(), found)
    except (_hosts.NetworkError, WorkerError) as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted", file=sys.stderr)
        return 130
    if args.plot:
        title = f"Steps with given gradients, density {args.density:g}; speed-up over dense"
        _plot.draw(str(args.plot), found, title)
    return 0


def _methods(args: argparse.Namespace) -> list[str]:
    has_torch = importlib.util.find_spec("torch") is not None
    if args.methods is None:
        names = list(QUICK if args.quick else JAX)
        if not has_torch:
            _say("PyTorch is not installed: its methods are left out")
        return names + (list(TORCH) if has_torch else [])
    if not has_torch and any(name in TORCH for name in args.methods):
        parser().error("--methods: PyTorch is not installed (pip install torch)")
    return list(dict.fromkeys([BASELINE, *args.methods]))


def _interrupt(*_) -> None:
    # A second one must not interrupt the cleaning up.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


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


def _write(file: Path, settings: dict, found: dict) -> None:
    text = json.dumps({"settings": settings, **found}, indent=1) + "\n"
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)


def _count(text: str) -> int:
    number = float(text)
    if not 1 <= number < float("inf") or number % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(number)


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return float(text)


def _link(text: str) -> str:
    try:
        _hosts.rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    sys.exit(main())
