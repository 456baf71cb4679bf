"""The planner: `python -m sparse_collectives plan` and `... measure`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sparse_collectives import cost_model
from sparse_collectives.planner import _plan_report, _planner, _units

_PLAN_HELP = """\
Predicts the time of a training step's exchange for each algorithm and encoding, and
recommends one. See docs/planner.md for the model behind it."""

_PLAN_EXAMPLE = """\
example:
  python -m sparse_collectives plan --params 133M --density 0.01 --workers 256 \\
      --latency 5us --bandwidth 25Gbit --compute 300ms --select-cost gpu"""

_MEASURE_HELP = """\
Times collectives on the devices of this machine and fits latency and bandwidth to
them. On a CPU, --devices N makes N devices of it, which measures its memory."""

# One node's link where none is given; NVLink is several times as fast, PCIe slower.
_INNER_LATENCY, _INNER_BANDWIDTH = "2us", "100GB/s"

# A ring has a message for each worker; beyond, its cost alone takes seconds.
_MOST_WORKERS = 1 << 16


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sparse_collectives", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{plan,measure}")
    plan = commands.add_parser(
        "plan",
        help="predict each algorithm's time and recommend one",
        description=_PLAN_HELP,
        epilog=_PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = plan.add_argument
    add("--params", required=True, metavar="N", help="gradient components: 133M, 133e6")
    add("--density", required=True, metavar="D", help="share k/n that is sent, in (0, 1]")
    add("--workers", required=True, metavar="P", help="data-parallel workers")
    add("--latency", metavar="T", help="alpha, of one message: 5us")
    add("--bandwidth", metavar="B", help="of one worker while all send: 25Gbit, 3GB/s")
    add("--measured", metavar="FILE", help="take both from what 'measure --json FILE' wrote")
    add("--compute", default="0s", metavar="T", help="forward and backward pass: 300ms")
    add("--inner", default="1", metavar="G", help="workers in a node; adds two-level schemes")
    add("--inner-latency", metavar="T", help=f"within a node (default {_INNER_LATENCY})")
    add("--inner-bandwidth", metavar="B", help=f"within a node (default {_INNER_BANDWIDTH})")
    add(
        "--expansion",
        metavar="X@P",
        help="fill-in: at P workers the union of all selections is X times k (default: uniform)",
    )
    add(
        "--select-cost",
        metavar="T",
        help="local work per parameter: a time such as 0.1ns, 'cpu' (6ns, measured: the default) "
        "or 'gpu' (0.06ns, an assumption)",
    )
    add("--merge-cost", metavar="T", help="local work per received pair (default: as above)")
    add("--exact", action="store_true", help="only encodings that round nothing")
    add("--all", action="store_true", help="show every encoding")
    add("--plot", metavar="FILE", help="draw the predicted step over P: a PNG")
    add("--json", metavar="FILE", help="also write all numbers here")

    measure = commands.add_parser("measure", help="fit a network", description=_MEASURE_HELP)
    measure.add_argument("--devices", metavar="N", help="use N devices (default: all)")
    measure.add_argument("--rounds", default="9", metavar="R", help="timings of each collective")
    measure.add_argument("--json", metavar="FILE", help="write the fit here, for plan --measured")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or exits with 2 and one line on stderr."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        {"plan": _plan, "measure": _measure}[args.command](args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


def _plan(args: argparse.Namespace) -> None:
    size = _units.count("--params", args.params)
    density = _density(args.density)
    selected = min(size, max(1, round(density * size)))
    workers, inner = _units.count("--workers", args.workers), _units.count("--inner", args.inner)
    if workers > _MOST_WORKERS:
        raise ValueError(f"--workers is {workers}; pass at most {_MOST_WORKERS}.")
    if workers % inner:
        raise ValueError(f"--inner is {inner} and must divide --workers, {workers}.")
    network = _network(args, inner)
    compute = _units.seconds("--compute", args.compute)
    overlap = _overlap(args.expansion, selected) if args.expansion else None
    codecs = [name for name, cost in cost_model.CODECS.items() if cost.exact or not args.exact]

    def plan_for(count: int, local: _planner.LocalCost) -> _planner.Plan:
        workload = cost_model.Workload(size, selected, count, inner, overlap)
        return _planner.make_plan(workload, network, local=local, compute=compute, codecs=codecs)

    local = _local_cost(args)
    plan = plan_for(workers, local)
    if args.json:
        _write_json(args.json, _plan_report.as_dict(plan))
    if args.plot:
        _plan_report.plot(args.plot, lambda count: plan_for(count, local), workers, inner)
    report = _plan_report.text(plan, all_codecs=args.all)
    if args.select_cost is None:
        other = plan_for(workers, _planner.GPU).recommended
        if other.dense != plan.recommended.dense:
            table, _, last = report.rpartition("\n")
            hint = f"With --select-cost gpu the answer is another: {other.name}."
            report = f"{table}\n{hint}\n{last}"
    print(report)


def _measure(args: argparse.Namespace) -> None:
    import jax

    from sparse_collectives.planner._measure import measure

    devices = _units.count("--devices", args.devices) if args.devices else None
    if devices is not None:
        # Before the backend starts; where it runs already, or on a GPU, it has no effect.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
        if devices > jax.device_count():
            raise ValueError(f"--devices is {devices}; there are {jax.device_count()}.")
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("workers",))
    fitted = measure(mesh, rounds=_units.count("--rounds", args.rounds))
    print(f"{'collective':12}{'messages':>9}{'words':>14}{'us':>12}{'spread':>8}")
    for row in fitted.samples:
        print(
            f"{row.collective:12}{row.messages:>9g}{row.words:>14,.0f}"
            f"{1e6 * row.seconds:>12,.1f}{row.spread:>8.0%}"
        )
    print(
        f"latency {1e6 * fitted.latency:.4g} us, bandwidth {fitted.bandwidth / 1e9:.4g} GB/s"
        f" ({8 * fitted.bandwidth / 1e9:.4g} Gbit/s) over {fitted.workers} workers;"
        f" median error of the fit {fitted.error:.0%}, median spread {fitted.spread:.0%}"
    )
    if args.json:
        _write_json(args.json, fitted.as_dict())


def _density(text: str) -> float:
    try:
        density = float(text)
    except ValueError:
        density = -1.0
    if not 0 < density <= 1:
        raise ValueError(f"--density is {text!r}; pass a share in (0, 1], such as 0.01 for 1 %.")
    return density


def _network(args: argparse.Namespace, inner: int) -> cost_model.Network:
    latency, bandwidth = args.latency, args.bandwidth
    if args.measured:
        found = _read_measured(args.measured)
        latency = found["latency"] if latency is None else latency
        bandwidth = found["bandwidth"] if bandwidth is None else bandwidth
    if latency is None or bandwidth is None:
        raise ValueError("pass --latency and --bandwidth, or --measured FILE.")
    latency = _units.seconds("--latency", latency)
    bandwidth = _units.bandwidth("--bandwidth", bandwidth)
    if inner == 1:
        return cost_model.network(latency, bandwidth)
    near, fast = args.inner_latency or _INNER_LATENCY, args.inner_bandwidth or _INNER_BANDWIDTH
    return cost_model.network(
        latency,
        bandwidth,
        inner_latency=_units.seconds("--inner-latency", near),
        inner_bandwidth=_units.bandwidth("--inner-bandwidth", fast),
    )


def _read_measured(file: str) -> dict[str, float]:
    with open(file, encoding="utf-8") as stream:
        try:
            found = json.load(stream)
            return {name: float(found[name]) for name in ("latency", "bandwidth")}
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"--measured {file} holds no latency and bandwidth; write it with 'measure --json'."
            ) from None


def _overlap(text: str, selected: int) -> cost_model.Overlap:
    try:
        factor, workers = text.split("@")
        overlap = cost_model.Overlap(float(factor) * selected, int(workers))
        cost_model.effective_size(selected, overlap)
    except ValueError:
        raise ValueError(
            f"--expansion is {text!r}; write X@P with P >= 2 workers and 1 <= X <= P: 3.2@16."
        ) from None
    return overlap


def _local_cost(args: argparse.Namespace) -> _planner.LocalCost:
    named = {"cpu": _planner.CPU, "gpu": _planner.GPU, None: _planner.CPU}
    if args.select_cost in named:
        local = named[args.select_cost]
    else:
        select = _units.seconds("--select-cost", args.select_cost)
        local = _planner.LocalCost(select, select)
    if args.merge_cost is not None:
        local = local._replace(merge=_units.seconds("--merge-cost", args.merge_cost))
    return local


def _write_json(file: str, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")


if __name__ == "__main__":
    sys.exit(main())
