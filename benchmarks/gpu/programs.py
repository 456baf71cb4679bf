"""What XLA makes of selections and steps for an H100, on a machine without a GPU.

    python -m benchmarks.gpu.programs [--only NAME ...] [--write FILE] [--check FILE]

XLA compiles for a device that is described to it. This counts in the compiled program the kernels
that a step launches, the bytes that they touch (all operands, an upper bound) and move (of a
gather what it takes, of a scatter what it changes), the temporary memory, the conditionals and
loops for which the host may have to wait, and the collectives that are started. Steps run on the
given number of devices, selections on one. Of two numbers the first is the steady step, the
lightest path, and the second the heaviest path, or all collectives of the program. "sorts" are
launches that are tens of kernels each.

--check compares with what --write has written, and is status 1 where a steady step launches,
touches or moves over a tenth more. --breakdown shows where the launches of one program come from.
Nothing is run, and nothing is timed.
"""

import collections
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from .._common import options, reports
from .._common.display import show
from . import _compiled, _contestants, _described
from ._hlo import parse
from ._paths import Cost, Paths

SIZE, DENSITY, DEVICES = 14_700_000, 0.01, 8
# Growth that --check lets pass: compilers change their minds about a fusion.
TOLERANCE = 1.1
_LIMITED = {
    "launches": "launches",
    "touched_bytes": "bytes touched",
    "moved_bytes": "bytes moved",
}
HEAD = (
    *("program", "launches", "GB touched", "GB moved"),
    *("MB temporary", "waits", "collectives", "sorts"),
)
_count = reports.whole(0, 2**62)
PATTERN: reports.Pattern = {
    "jax": reports.text(),
    "size": reports.whole(1),
    "density": reports.number(0, 1),
    "device": {"devices": reports.whole(1)},
    "programs": [
        {
            "program": reports.text(),
            "launches": [_count],
            "touched_bytes": [_count],
            "moved_bytes": [_count],
        },
    ],
}


def contestants(size: int, density: float, devices: int) -> dict[str, Callable[[], Any]]:
    """A function that compiles it, for each program by name."""
    single, several = _described.mesh(1), _described.mesh(devices)
    of_selectors = {
        f"select.{name}": lambda selector=selector: _compiled.compile_selector(
            selector, size, single
        )
        for name, selector in _contestants.selectors(density).items()
    }
    of_steps = {
        name: lambda step=step: _compiled.compile_step(step, size, density, several)
        for name, step in _contestants.steps().items()
    }
    return of_selectors | of_steps


def cells(row: dict[str, Any]) -> list[str]:
    """Those of the table, under ``HEAD``."""
    return [
        row["program"],
        " .. ".join(f"{x:,}" for x in row["launches"]),
        " .. ".join(f"{x / 1e9:.2f}" for x in row["touched_bytes"]),
        " .. ".join(f"{x / 1e9:.2f}" for x in row["moved_bytes"]),
        f"{row['temporary_bytes'] / 1e6:,.0f}",
        str(row["waits"]),
        "{} of {}".format(*row["collectives"]) if row["collectives"][1] else "",
        str(row["sorts"] or ""),
    ]


def grown(rows: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> list[str]:
    """A line for each program whose steady step has become more than a tenth heavier."""
    before = {row["program"]: row for row in recorded}
    found = []
    for row in rows:
        old = before.get(row["program"])
        if old is None:
            found.append(f"{row['program']} is not in the file")
            continue
        for key, unit in _LIMITED.items():
            if row[key][0] > TOLERANCE * old[key][0]:
                found.append(f"{row['program']}: {row[key][0]:,} {unit}, {old[key][0]:,} before")
    return found


def breakdown(name: str, hlo: str) -> None:
    """Prints the launches of the steady step by scope and by the function they come from."""
    program = parse(hlo)
    groups: dict[tuple[str, str], Cost] = collections.defaultdict(Cost)
    for part in Paths(program).parts():
        source = program.sources.get(part.instruction.frame, "")
        # Its first names are those of the jitted and mapped function, the same for all.
        scope = "/".join(
            word
            for word in part.instruction.scope.split("/")
            if word != "shard_map" and not word.startswith("jit(")
        )
        groups[scope, source] += part.cost * part.times
    order = sorted(groups.items(), key=lambda item: (-item[1].launches, -item[1].touched))
    show(
        f"{name}: the steady step",
        ["scope", "function", "launches", "MB touched", "MB moved", "waits", "collectives"],
        [
            [
                scope or "-",
                source or "-",
                str(cost.launches),
                f"{cost.touched / 1e6:.1f}",
                f"{cost.moved / 1e6:.1f}",
                str(cost.waits or ""),
                str(cost.collectives or ""),
            ]
            for (scope, source), cost in order
        ],
    )


def _settings(args: Any) -> dict[str, Any]:
    """Size, density and devices, and the recorded programs where there is a file of them.

    They are then those of the file, for nothing else can be compared with it.
    """
    settings = {"size": SIZE, "density": DENSITY, "devices": DEVICES, "programs": None}
    given = {name: getattr(args, name) for name in settings if getattr(args, name, None)}
    if args.check is None:
        return settings | given
    recorded = reports.read(args.check, PATTERN, "benchmarks.gpu.programs")
    settings = recorded | {"devices": recorded["device"]["devices"]}
    for name, value in given.items():
        if value != settings[name]:
            raise options.InputError(f"--{name} {value}: {args.check} has {settings[name]}")
    return settings


def _chosen(names: list[str] | None, known: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise options.InputError(f"no program {unknown[0]!r}; there are {', '.join(known)}")
    return {name: known[name] for name in names or known}


def _measured(chosen: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    rows = []
    for number, (name, make) in enumerate(chosen.items(), 1):
        options.progress(f"{number}/{len(chosen)} {name}", last=number == len(chosen))
        rows.append(_compiled.row(name, make()))
    return rows


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the table, or a breakdown; status 1 where a program has grown."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least_one, help=f"n; {SIZE} by default")
    add("--density", type=options.share, help=f"k / n; {DENSITY} by default")
    add("--devices", type=options.at_least_one, help=f"of the steps; {DEVICES} by default")
    add("--only", nargs="+", metavar="NAME", help="these programs, such as select.topk or ok_topk")
    add("--breakdown", metavar="NAME", help="where the launches of this program come from")
    add("--write", type=options.output, metavar="FILE", help="also write the numbers here")
    add("--check", type=Path, metavar="FILE", help="compare with the numbers written there")
    args = parser.parse_args(argv)
    settings = _settings(args)
    size, density, devices = (settings[name] for name in ("size", "density", "devices"))
    # The plugin would look for a driver, and jax for a GPU: neither is needed to compile.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    known = contestants(size, density, devices)
    if args.breakdown:
        make = _chosen([args.breakdown], known)[args.breakdown]
        breakdown(args.breakdown, make().as_text())
        return 0
    rows = _measured(_chosen(args.only, known))
    show(
        f"n = {size:,}, density {density:g}, {_described.NAME}, {devices} for the steps, "
        f"jax {jax.__version__}; compiled, not run",
        HEAD,
        [cells(row) for row in rows],
    )
    content = {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "size": size,
        "density": density,
        "device": _described.description(devices),
        "programs": rows,
    }
    reports.write(args.write, content)
    return 0 if args.check is None else _compare(args.check, settings, rows)


def _compare(path: Path, recorded: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    if recorded["jax"] != jax.__version__:
        print(f"{path} was written with jax {recorded['jax']}, and this is {jax.__version__}")
    complaints = grown(rows, recorded["programs"])
    print("\n".join(complaints) or f"nothing has grown by more than {TOLERANCE - 1:.0%}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
