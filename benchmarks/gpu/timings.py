"""Times selections and whole steps on a GPU, in less than ten minutes.

    python -m benchmarks.gpu.timings [--minutes 9] [--json gpu_timings.json]

On one GPU: every selector, beside lax.top_k; the whole step of error feedback of one worker; and
that of several simulated workers, who share the entries. In each round a contestant takes turns
with a device copy of n float32, which nothing that reads and writes n entries can beat: "share" is
the copy's time over the contestant's. A round is several calls that are queued and waited for
together; the table has the median, the quartiles and the least of the rounds, in milliseconds a
call. "launches" are the kernels that benchmarks.gpu.programs counts in the program that ran.

The most telling come first. What does not fit in the time is skipped and named, and the file is
written after each measurement. The time of a dense allreduce over a network is computed.
"""

import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from .._common import options
from .._common.display import show
from . import _contestants, _runs
from ._runs import Run
from ._session import Session

# The same n as in the counts of programs.py.
SIZE, DENSITY, WORKERS = 14_700_000, 0.01, 8
SELECTION, STEP, SIMULATED = "selection", "step, P = 1", "step, simulated P"
PARTS = (SELECTION, STEP, SIMULATED)
EMPTY, TOP_K = "empty kernels", "lax.top_k"
# What is measured before everything else.
FIRST = (
    EMPTY, TOP_K, "topk", "threshold_reuse", "dense", "ok_topk", "ok_topk_reuse", "agreed",
    "agreed_few", "sparse_adamw", "topk_a", "powersgd",
)  # fmt: skip
GBITS = (10, 25, 100)
HEAD = ("contestant", "ms", "quartiles", "least", "share", "launches")


def contestants(
    size: int, density: float, workers: int, seed: int
) -> tuple[Run, dict[tuple[str, str], Callable[[], Run]]]:
    """The copy, and what makes each contestant, by part and name, the most telling first."""
    data = _runs.gradients(size, seed)
    k = max(1, round(density * size))
    kth = _runs.top_k(data, k)
    magnitude = float(kth.call(0)[0][-1])
    made: dict[tuple[str, str], Callable[[], Run]] = {
        (SELECTION, EMPTY): _runs.launches,
        (SELECTION, TOP_K): lambda: kth,
    }
    for name, selector in _contestants.selectors(density, magnitude).items():
        made[SELECTION, name] = lambda selector=selector: _runs.selection(selector, data)
    for name, step in _contestants.steps().items():
        made[STEP, name] = lambda step=step: _runs.step(step, density, data)
        made[SIMULATED, name] = lambda step=step: _runs.simulated(step, density, data, workers)

    def rank(key: tuple[str, str]) -> tuple[bool, int]:
        return key[1] not in FIRST, PARTS.index(key[0])

    return _runs.copy(data), {key: made[key] for key in sorted(made, key=rank)}


def dense_on_networks(size: int, workers: int) -> list[dict[str, float]]:
    """The least time of a dense float32 allreduce: what each worker sends over its bandwidth."""
    sent = 2 * size * 4 * (workers - 1) / workers
    return [{"gbit_per_s": gbit, "ms": 8e3 * sent / (gbit * 1e9)} for gbit in GBITS]


def cells(row: dict[str, Any]) -> list[str]:
    """Those of a table, under ``HEAD``."""
    low, high = row["quartiles_ms"]
    return [
        row["contestant"],
        f"{row['median_ms']:.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{row['min_ms']:.3f}",
        f"{row['share_of_copy']:.1%}",
        "" if row["launches"] is None else str(row["launches"]),
    ]


def _show(content: dict[str, Any]) -> None:
    size, workers = content["size"], content["workers"]
    each = f"n = {size // workers:,} each"
    titles = {
        SELECTION: f"{SELECTION}, n = {size:,}",
        STEP: f"the whole step of one worker, n = {size:,}",
        SIMULATED: f"the steps of {workers} simulated workers together, {each}",
    }
    about = (
        f"density {content['density']:g}; {content['device']}, jax {content['jax']}; share of a "
        f"copy of {size:,} float32"
    )
    for part, title in titles.items():
        rows = [row for row in content["rows"] if row["part"] == part]
        if rows:
            show(f"{title}, {about}", HEAD, [cells(row) for row in rows])
    for row in content["rows"]:
        if row["contestant"] == EMPTY and row["launches"]:
            print(f"\na launch costs {1e3 * row['median_ms'] / row['launches']:.2f} us")
    show(
        f"COMPUTED, not measured: a dense allreduce of {size:,} float32 over {workers} workers",
        ["Gbit/s", "ms"],
        [[f"{x['gbit_per_s']:g}", f"{x['ms']:.1f}"] for x in content["computed_dense_allreduce"]],
    )
    for name in content["skipped"]:
        print(f"skipped, no time left: {name}")
    for name, reason in content["failed"].items():
        print(f"failed: {name}: {reason}")


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the tables; status 1 where a contestant failed."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least(1024), default=SIZE, help="n; %(default)s by default")
    add("--density", type=options.share, default=DENSITY)
    add("--workers", type=options.several, default=WORKERS, help="that are simulated")
    add("--rounds", type=options.several, default=30)
    add("--minutes", type=options.positive, default=9.0, help="after which nothing is begun")
    add("--only", nargs="+", metavar="NAME", help="these contestants, in all parts")
    add("--seed", type=int, default=0)
    add("--allow-cpu", action="store_true", help="run without a GPU, to try the program")
    add("--json", type=options.output, default=Path("gpu_timings.json"), metavar="FILE")
    args = parser.parse_args(argv)
    start = time.monotonic()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.allow_cpu:
        raise options.InputError(
            f"jax has no GPU here, only {device.platform}: install jax[cuda12] on a machine with "
            "one, or try the program with --allow-cpu --size 1e5"
        )
    known = [EMPTY, TOP_K, *_contestants.selectors(args.density), *_contestants.steps()]
    for name in args.only or ():
        if name not in known:
            raise options.InputError(f"no contestant {name!r}; there are {', '.join(known)}")
    base, made = contestants(args.size, args.density, args.workers, args.seed)
    content = {"device": device.device_kind, "platform": device.platform}
    content |= {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    content |= {"runtime": device.client.platform_version}
    content |= {name: getattr(args, name) for name in ("size", "density", "workers")}
    content |= {"computed_dense_allreduce": dense_on_networks(args.size, args.workers)}
    session = Session(
        base, content, args.json, rounds=args.rounds, start=start, seconds=60 * args.minutes
    )
    for (part, name), make in made.items():
        if not args.only or name in args.only:
            session.measure(part, name, make)
    session.finish()
    _show(session.content)
    return 1 if session.content["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
