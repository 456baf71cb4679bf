"""Counts kernels and bytes of selections and steps for an H100, on a machine without a GPU.

    python -m benchmarks.gpu.programs [--only NAME ...] [--write FILE] [--check FILE]

XLA compiles for a device that is described to it. This counts in the compiled program the kernels
that a step launches, the bytes that they touch (all operands, an upper bound) and move (for a
gather what it takes, for a scatter what it changes), the temporary memory, the conditionals and
loops for which the host may have to wait, and the collectives that are started. Steps run on the
given number of devices, selections on one. If a cell has two numbers, the first is for the steady
step (the lightest path), and the second for the heaviest path or for all collectives of the
program. "sorts" are launches that are tens of kernels each.

--check compares with a file of --write; the status is 1 if a steady step launches, touches or
moves over 10 % more. --breakdown shows where the launches of one program come from. Nothing is
run, and nothing is timed.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from .._common import options, reports
from .._common.contestants import selectors
from .._common.display import show_rows
from . import _described
from ._contestants import STEPS
from ._hlo import parse
from ._paths import Cost, collectives, heaviest, lightest, parts

SETTINGS = {"size": 14_700_000, "density": 0.01, "devices": 8}
# Growth that --check accepts, since compilers change their decisions about a fusion.
TOLERANCE = 1.1
_LIMITED = {"launches": "launches"} | {f"{x}_bytes": f"bytes {x}" for x in ("touched", "moved")}
PATTERN: reports.Pattern = {
    "jax": reports.text(),
    "size": reports.whole(1),
    "density": reports.number(0, 1),
    "device": {"devices": reports.whole(1)},
    "programs": [{"program": reports.text()} | dict.fromkeys(_LIMITED, [reports.whole(0, 2**62)])],
}


def contestants(size: int, density: float, devices: int) -> dict[str, Callable[[], Any]]:
    """For each program by name, a function that compiles it."""
    made: dict[str, Callable[[], Any]] = {}
    single, several = _described.mesh(1), _described.mesh(devices)
    for name, selector in selectors(density).items():
        made[f"select.{name}"] = partial(_described.compile_selector, selector, size, single)
    for name, step in STEPS.items():
        made[name] = partial(_described.compile_step, step, size, density, several)
    return made


def row(name: str, compiled: Any) -> dict[str, Any]:
    """The numbers of a compiled program, the lightest path before the heaviest."""
    program = parse(compiled.as_text())
    steady, most = lightest(program), heaviest(program)
    return {
        "program": name,
        "launches": [steady["launches"], most["launches"]],
        **{f"{x}_bytes": [steady[x], most[x]] for x in ("touched", "moved")},
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "waits": steady["waits"],
        "collectives": [steady["collectives"], collectives(program)],
        "sorts": steady["sorts"],
    }


def grown(rows: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> list[str]:
    """A line for each program whose steady step has become over 10 % heavier."""
    before, found = {row["program"]: row for row in recorded}, []
    for row in rows:
        name = row["program"]
        if name not in before:
            found.append(f"{name} is not in the file")
        for key, unit in _LIMITED.items() if name in before else ():
            now, old = row[key][0], before[name][key][0]
            if now > TOLERANCE * old:
                found.append(f"{name}: {now:,} {unit}, {old:,} before")
    return found


def breakdown(name: str, hlo: str) -> None:
    """Prints the launches of the steady step by scope and by the function they come from."""
    program, groups = parse(hlo), dict[tuple[str, str], Cost]()
    for line, cost in parts(program):
        # The first names belong to the jitted and mapped function, and are the same for all.
        words = line.text("op_name").rpartition("/")[0].split("/")
        scope = "/".join(x for x in words if x != "shard_map" and not x.startswith("jit("))
        group = scope or "-", program.sources.get(line.frame, "-")
        groups[group] = groups.get(group, Cost()) + cost
    order = sorted(groups.items(), key=lambda x: (-x[1]["launches"], -x[1]["touched"]))
    keys = ("launches", "touched", "moved", "waits", "collectives")
    rows = [{"scope": s, "function": f} | {x: cost[x] for x in keys} for (s, f), cost in order]
    show_rows(f"{name}: the steady step", rows)


def _settings(args: Any) -> dict[str, Any]:
    """Size, density and devices, and the recorded programs if --check names a file.

    The settings are then those in the file, since nothing else can be compared with it.
    """
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name)}
    if args.check is None:
        return SETTINGS | given
    recorded = reports.read(args.check, PATTERN, "benchmarks.gpu.programs")
    recorded |= {"devices": recorded["device"]["devices"]}
    for name, value in given.items():
        if value != recorded[name]:
            raise options.InputError(f"--{name} {value}: {args.check} has {recorded[name]}")
    return recorded


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the table, or a breakdown; status 1 if a program has grown."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least_one, help="n; {size} by default".format(**SETTINGS))
    add("--density", type=options.share, help="k / n; {density} by default".format(**SETTINGS))
    add("--devices", type=options.at_least_one, help="of the steps; 8 by default")
    add("--only", nargs="+", metavar="NAME", help="these programs, such as select.topk or ok_topk")
    add("--breakdown", metavar="NAME", help="where the launches of this program come from")
    add("--write", type=options.output, metavar="FILE", help="also write the numbers here")
    add("--check", type=Path, metavar="FILE", help="compare with the numbers written there")
    args = parser.parse_args(argv)
    settings = _settings(args)
    size, density, devices = (settings[name] for name in SETTINGS)
    known = contestants(size, density, devices)
    names = [args.breakdown] if args.breakdown else args.only or list(known)
    options.check_names(parser, args.only, known)
    if args.breakdown and args.breakdown not in known:
        parser.error(f"--breakdown {args.breakdown!r} is none of: {'; '.join(known)}")
    if args.breakdown:
        breakdown(args.breakdown, known[args.breakdown]().as_text())
        return 0
    rows = []
    for number, name in enumerate(names, 1):
        options.progress(f"{number}/{len(names)} {name}", last=number == len(names))
        rows.append(row(name, known[name]()))
    title = f"n = {size:,}, density {density:g}, {_described.NAME}, {devices} for the steps, "
    title += f"jax {jax.__version__}; compiled, not run"
    show_rows(title, rows)
    content = {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    content |= {"device": {"name": _described.NAME, "devices": devices}}
    content |= {"size": size, "density": density, "programs": rows}
    reports.write(args.write, content)
    if args.check is None:
        return 0
    if settings["jax"] != jax.__version__:
        print(f"{args.check} was written with jax {settings['jax']}, and this is {jax.__version__}")
    complaints = grown(rows, settings["programs"])
    print("\n".join(complaints) or f"nothing has grown by more than {TOLERANCE - 1:.0%}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
