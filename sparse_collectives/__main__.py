"""The planner: `python -m sparse_collectives plan`, `... rounds` and `... measure`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sparse_collectives import _units, cost_model
from sparse_collectives.cost_model import _codecs
from sparse_collectives.planner import (
    _arguments,
    _measured_file,
    _optimizers,
    _plan_report,
    _planner,
    _steps,
)
from sparse_collectives.planner import _rounds as rounds

_PLAN_HELP = """\
Predicts the time of a training step's exchange for each algorithm and encoding, and
recommends one. See docs/planner.md for the model."""

_PLAN_EXAMPLE = """\
example:
  python -m sparse_collectives plan --params 133M --density 0.01 --workers 256 \\
      --latency 5us --bandwidth 25Gbit --compute 300ms --select-cost gpu"""

_ROUNDS_HELP = """\
Predicts the time of sparse_adamw with an exchange every H steps, for links on which a
message takes long, and recommends H and density. See docs/between_sites.md."""

_ROUNDS_EXAMPLE = """\
example:
  python -m sparse_collectives rounds --params 124M --workers 4 --latency 50ms \\
      --bandwidth 100Mbit --compute 500ms"""

_MEASURE_HELP = """\
Times collectives on the devices of this machine and fits latency and bandwidth to
them. On a CPU, --devices N splits it into N devices, which measures its memory."""

# The defaults: the density of `optax_ext.sparse_adamw`, the latency of messages over Ethernet, and
# a step that only exchanges.
_DENSITY, _LATENCY, _COMPUTE = "0.05", "100us", "0s"

_SELECT_COST = "--select-cost cpu"
# From this latency on, in seconds, `rounds` may have a better answer.
_LATE = 5e-3

# The speedups of the three runs in docs/data/network_4*.json, whose workers share cores.
_MEASURED_SHARING = (
    "Workers that share cores gain less. In measurements with four workers on two cores, n = 14.7M "
    "and 1 Gbit/s, sparse_adamw\nwas 3.5 to 4.0 times as fast as dense, and agreed at 1 % was 7.0 "
    "to 7.2 times as fast.\n--workers-per-core 2 predicts both within a factor of 1.3."
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sparse_collectives", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{plan,rounds,measure}")

    def command(name: str, what: str, description: str, example: str | None = None) -> Any:
        made = commands.add_parser(
            name,
            help=what,
            description=description,
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return made.add_argument

    add = command(
        "plan", "predict each algorithm's time and recommend one", _PLAN_HELP, _PLAN_EXAMPLE
    )
    add("--params", required=True, metavar="N", help="gradient components: 133M, 133e6")
    add("--density", metavar="D", help=f"share k/n that is sent, in (0, 1] (default {_DENSITY})")
    add("--workers", required=True, metavar="P", help="data-parallel workers")
    add("--latency", metavar="T", help=f"latency of a message: 5us (default {_LATENCY})")
    add("--bandwidth", metavar="B", help="bandwidth of a worker while all send: 25Gbit, 3GB/s")
    add("--measured", metavar="FILE", help="take both from the file of 'measure --json FILE'")
    add("--compute", metavar="T", help=f"forward and backward pass: 300ms (default {_COMPUTE})")
    add("--inner", default="1", metavar="G", help="workers in a node; adds two-level schemes")
    add("--shard", default="1", metavar="M", help="devices of a worker that shard its parameters")
    add("--links", default="1", metavar="L", help="links of a worker, shared by its devices")
    add("--inner-latency", metavar="T", help=f"within a node (default {_arguments.INNER_LATENCY})")
    add(
        "--inner-bandwidth",
        metavar="B",
        help=f"within a node (default {_arguments.INNER_BANDWIDTH})",
    )
    add(
        "--expansion",
        metavar="X@P",
        help="fill-in: at P workers the union of all selections is X times k (default: uniform)",
    )
    add(
        "--select-cost",
        metavar="T",
        help="local work per parameter: a time such as 0.1ns, 'cpu' (3ns, measured: the default) "
        "or 'gpu' (from the launches and bytes of compiled programs)",
    )
    add(
        "--workers-per-core",
        default="1",
        metavar="W",
        help="workers that share a core, 2 for four on two cores: their local work takes turns",
    )
    add("--merge-cost", metavar="T", help="work per received pair (default: by --select-cost)")
    add("--exact", action="store_true", help="only encodings that round nothing")
    add(
        "--same-loss",
        nargs="?",
        const=_steps.ADAMW,
        metavar="FILE",
        help="compare times to the same loss: with the measured steps of sparse_adamw, or with "
        "the steps in a JSON file, {algorithm: multiple of the steps of a dense run}",
    )
    add("--all", action="store_true", help="show every encoding")
    add("--plot", metavar="FILE", help="draw the predicted step over P: a PNG")
    add("--json", metavar="FILE", help="also write all numbers here")

    add = command(
        "rounds",
        "predict exchanges every so many steps over a slow link",
        _ROUNDS_HELP,
        _ROUNDS_EXAMPLE,
    )
    add("--params", required=True, metavar="N", help="gradient components: 124M")
    add("--workers", required=True, metavar="P", help="sites")
    add("--latency", required=True, metavar="T", help="latency of a message between sites: 50ms")
    add("--bandwidth", required=True, metavar="B", help="of a site while all send: 100Mbit")
    add("--compute", required=True, metavar="T", help="forward and backward pass: 500ms")
    add("--select-cost", metavar="T", help="as in 'plan': a time, 'cpu' or 'gpu'")

    add = command("measure", "fit a network", _MEASURE_HELP)
    add("--devices", metavar="N", help="use N devices (default: all)")
    add("--rounds", default="9", metavar="R", help="timings of each collective")
    add("--json", metavar="FILE", help="write the fit here, for plan --measured")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns 0, or exits with 2 and one line on stderr."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        {"plan": _plan, "rounds": _rounds, "measure": _measure}[args.command](args)
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


def _plan(args: argparse.Namespace) -> None:
    size = _units.count("--params", args.params)
    assumed = []
    if args.density is None:
        args.density = _DENSITY
        assumed.append(f"--density {_DENSITY}, the default of sparse_adamw")
    if args.latency is None and args.measured is None and args.bandwidth is not None:
        args.latency = _LATENCY
        assumed.append(f"--latency {_LATENCY}")
    if args.compute is None:
        args.compute = _COMPUTE
        assumed.append(f"--compute {_COMPUTE}")
    if args.select_cost is None:
        assumed.append(_SELECT_COST)
    density = _arguments.density(args.density)
    selected = min(size, max(1, round(density * size)))
    workers = _arguments.workers("--workers", args.workers)
    inner = _arguments.workers("--inner", args.inner)
    if workers % inner:
        raise ValueError(f"--inner must divide --workers={workers}, got {inner}.")
    devices = _arguments.workers("--shard", args.shard)
    links = _arguments.workers("--links", args.links)
    if devices > 1 and inner > 1:
        raise ValueError(
            f"--shard={devices} and --inner={inner} are of two plans: the workers of a node have "
            "the same parameters, the devices of a worker have parts of them. Give one of them."
        )
    if links > devices:
        raise ValueError(f"--links must be at most --shard={devices}, got {links}.")
    measured = _measured_file.read(args.measured) if args.measured is not None else None
    network = _arguments.network(args, inner, measured)
    # The devices of a worker exchange their parts at the same time, and share its links.
    network = network._replace(seconds_per_word=network.seconds_per_word * devices / links)
    size, selected = -(-size // devices), -(-selected // devices)
    compute = _units.seconds("--compute", args.compute)
    overlap = None if args.expansion is None else _arguments.overlap(args.expansion, selected)
    codecs = [name for name, cost in _codecs.CODECS.items() if cost.exact or not args.exact]
    names = [
        name
        for name, row in cost_model.ALGORITHMS.items()
        if row.planned and not (row.rounds and args.exact)
    ]

    def steps_of(count: int) -> dict[str, float] | None:
        return None if args.same_loss is None else _steps.read(args.same_loss, count, density)

    def plan_for(count: int, local: _planner.LocalCost) -> _planner.Plan:
        workload = cost_model.Workload(size, selected, count, inner, overlap)
        return _planner.plan(
            workload,
            network,
            local=local,
            compute=compute,
            codecs=codecs,
            names=names,
            steps=steps_of(count),
        )

    local = _arguments.local_cost(args.select_cost, args.workers_per_core, args.merge_cost)
    plan = plan_for(workers, local)
    optimizers = _optimizers.plan_optimizers(
        plan.workload,
        network,
        local=local,
        compute=compute,
        exact=args.exact,
        steps=steps_of(workers),
    )
    if args.json:
        _write_json(args.json, _plan_report.as_dict(plan, optimizers))
    if args.plot:
        _plan_report.plot(args.plot, lambda count: plan_for(count, local), workers, inner)
    remarks = []
    if args.select_cost is None:
        other = plan_for(workers, _planner.GPU).recommended
        if other.dense != plan.recommended.dense:
            remarks.append(
                "This holds for workers that select on two CPU cores. With --select-cost gpu the "
                f"answer is {other.name}, {other.speedup:.2f} times as fast as dense."
            )
    if measured is not None and (args.latency is None or args.bandwidth is None):
        remarks += _measured_file.warnings(measured.error)
    if devices > 1:
        remarks.append(
            f"all of one of the {devices} devices of a worker, which exchange their parts at once "
            f"over {links} link{'s' if links > 1 else ''}"
        )
    if not local.gpu:
        remarks.append(_MEASURED_SHARING)
    if network.latency >= _LATE:
        remarks.append(
            f"A message takes {1e3 * network.latency:.3g} ms. To exchange at every H-th step only, "
            "ask python -m sparse_collectives rounds."
        )
    _print_assumed(assumed)
    print("\n".join([_plan_report.text(plan, optimizers, all_codecs=args.all), *remarks]))


def _rounds(args: argparse.Namespace) -> None:
    found = rounds.plan_rounds(
        _units.count("--params", args.params),
        _arguments.workers("--workers", args.workers),
        cost_model.network(
            _units.seconds("--latency", args.latency),
            _units.bandwidth("--bandwidth", args.bandwidth),
        ),
        compute=_units.seconds("--compute", args.compute),
        local=_arguments.local_cost(args.select_cost),
    )
    _print_assumed([] if args.select_cost is not None else [_SELECT_COST])
    print(rounds.text(found))


def _print_assumed(options: Sequence[str]) -> None:
    if options:
        print(f"not given, and assumed: {'; '.join(options)}")


def _measure(args: argparse.Namespace) -> None:
    import jax

    from sparse_collectives.planner._measure import measure

    devices = None
    if args.devices is not None:
        devices = _arguments.workers("--devices", args.devices, examples="4 or 8")
    if devices is not None:
        # This works only before the backend starts, and only for CPU devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
        if devices > jax.device_count():
            raise ValueError(f"--devices must be at most {jax.device_count()}, got {devices}.")
    rounds = _units.count("--rounds", args.rounds, examples="9 or 100")
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("workers",))
    fitted = measure(mesh, rounds=rounds)
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
    for line in _measured_file.warnings(fitted.error):
        print(line)
    if args.json:
        _write_json(args.json, fitted.as_dict())


def _write_json(file: str, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")


if __name__ == "__main__":
    sys.exit(main())
