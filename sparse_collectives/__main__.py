"""The planner: `python -m sparse_collectives plan`, `... rounds` and `... measure`."""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from sparse_collectives import _validation, cost_model
from sparse_collectives.cost_model._codecs import CODECS
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.cost_model._numbers import NUMBERS
from sparse_collectives.planner import _command_options, _option_files, _report
from sparse_collectives.planner._allreduces import plan
from sparse_collectives.planner._optimizers import plan_optimizers
from sparse_collectives.planner._slow_links import plan_rounds
from sparse_collectives.planner._ways import GPU, LocalCost

# From this latency on, in seconds, `rounds` may have a better answer.
_LATE = 5e-3


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _Command(NamedTuple):
    run: Callable[[argparse.Namespace], None]
    options: tuple[_command_options.Option, ...]
    help: str
    description: str
    example: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns 0, or exits with 2 and one line on stderr."""
    parser = _Parser(prog="python -m sparse_collectives", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{plan,rounds,measure}")
    for name, command in _COMMANDS.items():
        made = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=command.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in command.options:
            option.add_to(made)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    command = _COMMANDS[args.command]
    try:
        command.run(_command_options.values(command.options, args))
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


def _plan(given: argparse.Namespace) -> None:
    workers, inner, devices, links = given.workers, given.inner, given.shard, given.links
    if workers % inner:
        raise ValueError(f"--inner must divide --workers={workers}, got {inner}.")
    if devices > 1 and inner > 1:
        raise ValueError(
            f"--shard={devices} and --inner={inner} are of two plans: the workers of a node have "
            "the same parameters, the devices of a worker have parts of them. Give one of them."
        )
    if links > devices:
        raise ValueError(f"--links must be at most --shard={devices}, got {links}.")
    network, warnings = _network(given)
    # The devices of a worker exchange their parts at the same time, and share its links.
    network = network._replace(seconds_per_word=network.seconds_per_word * devices / links)
    _check_params(given.params, devices)
    selected = min(given.params, max(1, round(given.density * given.params)))
    size, selected = -(-given.params // devices), -(-selected // devices)
    overlap = None
    if given.expansion is not None:
        expansion, measured = given.expansion
        if expansion * selected > size:
            raise ValueError(
                f"--expansion={expansion:g}@{measured} times --density={given.density:g} must be "
                f"at most all entries, got {expansion * given.density:.3g} times as many."
            )
        overlap = cost_model.Overlap(expansion * selected, measured)
    workload = cost_model.Workload(size, selected, workers, inner, overlap)
    local, steps = _local_cost(given), None
    if given.same_loss is not None:
        steps = _option_files.read_steps(given.same_loss, workers, given.density)
    rows = cost_model.ALGORITHMS.values()
    with_local = functools.partial(
        plan,
        workload,
        network,
        compute=given.compute,
        codecs=[name for name, sizes in CODECS.items() if sizes.exact or not given.exact],
        names=[row.name for row in rows if row.planned and not (row.lossy and given.exact)],
        steps=steps,
    )
    found = with_local(local=local)
    optimizers = plan_optimizers(
        workload, network, local=local, compute=given.compute, exact=given.exact, steps=steps
    )
    if given.json:
        _write_json(given.json, _report.as_dict(found, optimizers))
    remarks: list[str] = []
    if "select_cost" in given.assumed:
        other = with_local(local=GPU).recommended
        if other.dense != found.recommended.dense:
            remarks.append(
                "This holds for workers that select on two CPU cores. With --select-cost gpu the "
                f"answer is {other.name}, {other.speedup:.2f} times as fast as dense."
            )
    remarks += warnings
    if devices > 1:
        remarks.append(
            f"all of one of the {devices} devices of a worker, which exchange their parts at once "
            f"over {links} link{'s' if links > 1 else ''}"
        )
    if not local.gpu:
        shared = NUMBERS["shared_cores"]
        adamw, partitioned = (
            f"{shared[x][0]} to {shared[x][1]}" for x in ("sparse_adamw", "partitioned_topk")
        )
        remarks.append(
            "Workers that share cores gain less. In measurements with four workers on two cores, "
            f"n = 14.7M and 1 Gbit/s, sparse_adamw\nwas {adamw} times as fast as dense, and "
            f"partitioned_topk at 1 % was {partitioned} times as fast.\n"
            "--workers-per-core 2 predicts "
            f"both within a factor of {shared['within']}."
        )
    if network.latency >= _LATE:
        remarks.append(
            f"A message takes {1e3 * network.latency:.3g} ms. To exchange at every H-th step only, "
            "ask python -m sparse_collectives rounds."
        )
    _print_assumed(given)
    print("\n".join([_report.text(found, optimizers, all_codecs=given.all), *remarks]))


def _check_params(params: int, devices: int) -> None:
    """A prediction is for one exchange of all parameters of a device."""
    if -(-params // devices) > _validation.MAX_SIZE:
        raise ValueError(
            f"--params must be below 2**31 for each device of a worker, got {params:,}: an "
            "exchange has indices of 32 bits. Give --shard=M to 'plan' if M devices have a part "
            "each, or plan one exchange of several (optax_ext.bucketed)."
        )


def _network(given: argparse.Namespace) -> tuple[Network, list[str]]:
    """The links of a worker, of a node if it has several workers, and warnings of a poor fit."""
    latency, bandwidth, warnings = given.latency, given.bandwidth, []
    if given.measured is not None:
        measured = _option_files.read_measured(given.measured)
        if given.assumed.pop("latency", None):
            latency, warnings = measured.number("latency"), measured.warnings()
        if bandwidth is None:
            bandwidth, warnings = measured.number("bandwidth"), measured.warnings()
    if bandwidth is None:
        raise ValueError("the network must be given by --bandwidth or --measured.")
    if given.inner == 1:
        return cost_model.network(latency, bandwidth), warnings
    inner = {"inner_latency": given.inner_latency, "inner_bandwidth": given.inner_bandwidth}
    return cost_model.network(latency, bandwidth, **inner), warnings


def _local_cost(given: argparse.Namespace) -> LocalCost:
    local, sharing = given.select_cost, given.workers_per_core
    if local.gpu and sharing > 1:
        raise ValueError(
            f"--workers-per-core={sharing:g} is for workers that select on cores: leave it out "
            "with --select-cost gpu."
        )
    merge = local.merge if given.merge_cost is None else given.merge_cost
    return local._replace(sharing=sharing, merge=merge)


def _rounds(given: argparse.Namespace) -> None:
    _check_params(given.params, 1)
    if given.workers < 2:
        raise ValueError(f"--workers must be 2 sites at least, got {given.workers}.")
    network = cost_model.network(given.latency, given.bandwidth)
    found = plan_rounds(
        given.params, given.workers, network, compute=given.compute, local=given.select_cost
    )
    _print_assumed(given)
    print(_report.of_rounds(found))


def _print_assumed(given: argparse.Namespace) -> None:
    if given.assumed:
        print(f"not given, and assumed: {'; '.join(given.assumed.values())}")


def _measure(given: argparse.Namespace) -> None:
    import jax

    from sparse_collectives.planner._measure import measure

    if given.devices is not None:
        # This works only before the backend starts, and only for CPU devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", given.devices)
        if given.devices > jax.device_count():
            raise ValueError(
                f"--devices must be at most {jax.device_count()}, got {given.devices}."
            )
    mesh = jax.sharding.Mesh(jax.devices()[: given.devices], ("workers",))
    fitted = measure(mesh, rounds=given.rounds)
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
    for line in _option_files.warnings(fitted.error):
        print(line)
    if given.json:
        _write_json(given.json, _report.plain(fitted))


def _write_json(file: str, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")


_COMMANDS = {
    "plan": _Command(
        _plan,
        _command_options.PLAN,
        "predict each algorithm's time and recommend one",
        """\
Predicts the time of a training step's exchange for each algorithm and encoding, and
recommends one. See docs/planner.md for the model.""",
        """\
example:
  python -m sparse_collectives plan --params 133M --density 0.01 --workers 256 \\
      --latency 5us --bandwidth 25Gbit --compute 300ms --select-cost gpu""",
    ),
    "rounds": _Command(
        _rounds,
        _command_options.ROUNDS,
        "predict exchanges every so many steps over a slow link",
        """\
Predicts the time of sparse_adamw with an exchange every H steps, for links on which a
message takes long, and recommends H and density. See docs/between_sites.md.""",
        """\
example:
  python -m sparse_collectives rounds --params 124M --workers 4 --latency 50ms \\
      --bandwidth 100Mbit --compute 500ms""",
    ),
    "measure": _Command(
        _measure,
        _command_options.MEASURE,
        "fit a network",
        """\
Times collectives on the devices of this machine and fits latency and bandwidth to
them. On a CPU, --devices N splits it into N devices, which measures its memory.""",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
