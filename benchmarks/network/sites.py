"""Steps of sites that shard their parameters, over links with a limited bandwidth between them.

    sudo python -m benchmarks.network.sites --links 1gbit 100mbit --layout fsdp tensor

A site is a network namespace and a process of several devices. They share the parameters of a
perceptron with residual layers by FSDP or by tensor parallelism, and only sites exchange over the
links. Methods take turns, each round begins with another one, and a ratio is one of the same
round. What the devices of a site exchange is copied in the machine and not limited. docs/sharded.md
says how to read it.

Linux only, with root and iproute2 (ip, tc).
"""

import argparse
import itertools
import sys
from typing import Any

from .._common import display, namespaces, options, reports, timing
from .._common.processes import interrupt_when_told
from ._workers import WorkerError, workers

METHODS = ("dense", "ok_topk", "sparse_adamw")
LAYOUTS = ("fsdp", "tensor")
_CELLS = ("", "step s", "times as fast", "quartiles", "words", "MB received")
# A new port for every start: a closed one may be in use for a while.
_ports = itertools.count(9700)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = options.parser_of(__doc__)
    add = made.add_argument
    add("--sites", type=options.several, default=2, metavar="P")
    add("--devices", type=options.at_least_one, default=2, help="of each site")
    add("--links", type=options.link, nargs="+", default=["1gbit", "100mbit"], metavar="RATE")
    add("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--density", type=options.positive, default=0.01)
    add("--width", type=options.at_least_one, default=512, help="of a layer, 8 width^2 parameters")
    add("--layers", type=options.at_least_one, default=4)
    add("--batch", type=options.at_least_one, default=16, help="examples of all sites together")
    add("--rounds", type=options.at_least_one, default=5, help="turns of each method")
    add("--steps", type=options.at_least_one, default=3, help="of a turn")
    add("--seed", type=int, default=0)
    add("--timeout", type=options.positive, default=900, help="seconds for one answer")
    options.add_outputs(made)
    add("--quick", action="store_true", help="a functional test with a small model")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, and writes the file that is asked for."""
    own = parser()
    args = own.parse_args(argv)
    if args.density > 1:
        own.error(f"--density is {args.density}; it must be at most 1")
    if args.quick:
        args.width, args.layers, args.rounds, args.steps = 32, 2, 2, 1
    share = args.sites * args.devices
    if args.batch % share or args.width % args.devices:
        own.error(f"--batch and --width must be multiples of the devices: {share} in all")
    interrupt_when_told()
    try:
        reason = namespaces.unusable()
        if reason is not None:
            own.error(reason)
        rows: list[dict[str, Any]] = []
        for layout in args.layout:
            for found in _measured(args, layout):
                rows += found
                _show(args, found)
                # After each: a failure in the next must not take it away.
                settings = {name: value for name, value in vars(args).items() if name != "json"}
                reports.write(args.json, {"settings": settings, "rows": rows})
    except (namespaces.NetworkError, WorkerError) as error:
        print(f"{own.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{own.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def _measured(args: argparse.Namespace, layout: str):
    """The rows of each link as they come."""
    with namespaces.network(args.sites) as hosts:
        given = ("devices", "density", "width", "layers", "batch", "seed")
        config = {
            "workers": args.sites,
            "coordinator": f"{hosts.addresses[0]}:{next(_ports)}",
            "pin": True,
            "layout": layout,
            **{name: getattr(args, name) for name in given},
        }
        program = f"{__package__}._site_worker"
        with workers(program, hosts, config, threads=1, seconds=args.timeout) as group:
            size = 0
            for method in METHODS:
                options.say(f"{layout}: compiling {method}")
                size = group.ask("prepare", method=method, warmup=4)[0]["size"]
            for link in args.links:
                hosts.limit(link)
                found: dict[str, list[Any]] = {method: [] for method in METHODS}
                for turn in range(args.rounds):
                    first = turn % len(METHODS)
                    options.say(f"{layout}, {link}: round {turn + 1} of {args.rounds}")
                    for method in METHODS[first:] + METHODS[:first]:
                        found[method].append(group.ask("measure", method=method, steps=args.steps))
                hosts.limit("none")
                yield [_row(layout, link, size, *item) for item in found.items()]


def _row(layout: str, link: str, size: int, method: str, rounds: list) -> dict[str, Any]:
    """Of each round the slowest site's time, and the mean of the bytes."""
    return {
        "layout": layout,
        "link": link,
        "size": size,
        "method": method,
        "seconds": [max(answer["seconds"] for answer in answers) for answers in rounds],
        "words": rounds[0][0]["words"],
        "received": [sum(a["received"] for a in answers) / len(answers) for answers in rounds],
    }


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    base, lines = rows[0], []
    for row in rows:
        ratios = [a / b for a, b in zip(base["seconds"], row["seconds"], strict=True)]
        low, middle, high = timing.quartiles(ratios)
        lines.append(
            [
                row["method"],
                f"{timing.quartiles(row['seconds'])[1]:.3f}",
                f"{middle:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{row['words']:,.0f}",
                f"{timing.quartiles(row['received'])[1] / 1e6:.2f}",
            ]
        )
    title = (
        f"{base['layout']}, {base['link']}: {args.sites} sites of {args.devices} devices, "
        f"n = {base['size']:,}, density {args.density:g}"
    )
    display.show(title, _CELLS, lines)


if __name__ == "__main__":
    sys.exit(main())
