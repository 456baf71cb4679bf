"""Times selections and whole steps on a GPU, in less than ten minutes.

    python -m benchmarks.gpu.timings [--minutes 9] [--json gpu_timings.json]

On one GPU it times every selector, next to lax.top_k; the whole step of error feedback of one
worker; and the step of several simulated workers, who share the entries. In each round a contestant
takes turns with a device copy of n float32, a lower limit for any program that reads and writes n
entries. The table shows the copy's time over the contestant's, and the median, the quartiles and
the least of the rounds, in milliseconds a call. A round is several calls that are queued, of which
the last is waited for. "launches" are the kernels that benchmarks.gpu.programs counts in the
program that ran.

The most informative contestants come first. Those for which the time is too short are skipped and
named, and the file is written after each measurement. The time of a dense allreduce over a network
is computed.
"""

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._common import options, reports, timing
from .._common.contestants import selectors
from .._common.display import show_rows
from . import _contestants as runs
from ._contestants import STEPS, Run

# The same n as in the counts of programs.py.
SIZE, DENSITY, WORKERS = 14_700_000, 0.01, 8
SELECTION, STEP, SIMULATED = "selection", "step, P = 1", "step, simulated P"
PARTS = (SELECTION, STEP, SIMULATED)
BASE, EMPTY, TOP_K = "copy", "empty kernels", "lax.top_k"
# The contestants that are measured first.
FIRST = (
    EMPTY, TOP_K, "topk", "threshold_reuse", "dense", "ok_topk", "ok_topk_reuse",
    "partitioned_topk", "partitioned_topk_few", "sparse_adamw", "topk_a", "powersgd",
)  # fmt: skip
# A step begins without thresholds and residuals, and copies its state at first.
_WARM_UP = 12
# Seconds of a round, and of all rounds of a contestant.
_ROUND, _ROUNDS = 0.02, 10.0
_CALLS = 20
GBITS = (10, 25, 100)
Made = Mapping[tuple[str, str], Callable[[], Run]]


def contestants(size: int, density: float, workers: int) -> tuple[Run, Made]:
    """The copy, and the factory of each contestant, by part and name, in the order to measure."""
    data, k = runs.gradients(size), max(1, round(density * size))
    kth = runs.stateless(lambda x: jax.lax.top_k(jnp.abs(x), k), data)
    magnitude = float(kth.call(0)[0][-1])
    made = {(SELECTION, EMPTY): _launches, (SELECTION, TOP_K): lambda: kth}
    for name, selector in selectors(density, magnitude).items():
        made[SELECTION, name] = partial(runs.selection, selector, data)
    for name, step in STEPS.items():
        made[STEP, name] = partial(runs.step, step, density, data)
        made[SIMULATED, name] = partial(runs.simulated, step, density, data, workers)
    order = sorted(made, key=lambda key: (key[1] not in FIRST, PARTS.index(key[0])))
    return runs.stateless(jnp.copy, data), {key: made[key] for key in order}


def _launches() -> Run:
    """A loop of kernels without work, whose time is the cost of its launches alone."""

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sin(y) + 1, x)

    return runs.stateless(loop, [jnp.zeros(256)])


def measure(
    base: Run, made: Made, rounds: int, end: float, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Times each next to the base, and begins none that may not be finished at ``end``.

    ``write`` gets all results after each of them, so that no result is lost.
    """
    found: dict[str, Any] = {"rows": [], "skipped": [], "failed": {}, "finished": False}
    longest = 0.0
    _warm(base)
    for (part, name), make in made.items():
        begin, what = time.monotonic(), f"{part}: {name}"
        # The next one may take as long as the longest so far.
        if begin + longest > end:
            found["skipped"].append(what)
            continue
        options.say(what)
        try:
            found["rows"].append({"part": part} | _row(base, name, make(), rounds))
        except Exception as error:  # One that does not fit in memory must not end the rest.
            found["failed"][what] = (str(error) or type(error).__name__).splitlines()[0]
        longest = max(longest, time.monotonic() - begin)
        write(found)
    found["finished"] = True
    write(found)
    return found


def _row(base: Run, name: str, run: Run, most: int) -> dict[str, Any]:
    _warm(run)
    single, _ = timing.seconds_of(run.call, 0)
    calls = min(_CALLS, max(1, int(_ROUND / single)))
    rounds = min(most, max(3, int(_ROUNDS / (calls * single))))
    turns = {BASE: partial(_repeated, base, calls), name: partial(_repeated, run, calls)}
    times = timing.in_turns(turns, rounds)
    each = {key: [s / calls for s in seconds] for key, seconds in times.items()}
    copy, row = timing.ratios(each, BASE)
    low, _, high = timing.quartiles(each[name])
    row |= {"min_ms": 1e3 * min(each[name]), "quartiles_ms": [1e3 * low, 1e3 * high]}
    row |= {"copy_ms": copy["median_ms"], "share_of_copy": 1 / row["ratio"]}
    row |= {"launches": run.launches() if jax.default_backend() == "gpu" else None}
    return row | {"rounds": rounds, "calls": calls}


def _warm(run: Run) -> None:
    for turn in range(_WARM_UP):
        jax.block_until_ready(run.call(turn))


def _repeated(run: Run, calls: int, turn: int) -> Any:
    """So many calls, of which only the last is waited for: the host must not set the pace."""
    return [run.call(turn + number) for number in range(calls)][-1]


def dense_on_networks(size: int, workers: int) -> list[dict[str, float]]:
    """The least time of a dense float32 allreduce: each worker's bytes over its bandwidth."""
    sent = 2 * size * 4 * (workers - 1) / workers
    return [{"gbit_per_s": gbit, "ms": 8e3 * sent / (gbit * 1e9)} for gbit in GBITS]


def _show(content: dict[str, Any]) -> None:
    title = "n = {size:,}, of {workers} simulated workers together, density {density:g}; "
    title += "{device}, jax {jax}; share of a copy of {size:,} float32"
    show_rows(title.format(**content), content["rows"])
    for row in content["rows"]:
        if row["contestant"] == EMPTY and row["launches"]:
            print(f"\na launch costs {1e3 * row['median_ms'] / row['launches']:.2f} us")
    title = "COMPUTED, not measured: a dense allreduce of {size:,} float32 over {workers} workers"
    computed = content["computed_dense_allreduce"]
    show_rows(title.format(**content), computed)
    for name in content["skipped"]:
        print(f"skipped, no time left: {name}")
    for name, reason in content["failed"].items():
        print(f"failed: {name}: {reason}")


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the tables; status 1 if a contestant failed."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least(1024), default=SIZE, help="n; %(default)s by default")
    add("--density", type=options.share, default=DENSITY)
    add("--workers", type=options.several, default=WORKERS, help="that are simulated")
    add("--rounds", type=options.several, default=30)
    add("--minutes", type=options.positive, default=9.0, help="after which nothing is begun")
    add("--only", nargs="+", metavar="NAME", help="these contestants, in all parts")
    add("--allow-cpu", action="store_true", help="run without a GPU, to try the program")
    add("--json", type=options.output, default=Path("gpu_timings.json"), metavar="FILE")
    args = parser.parse_args(argv)
    start = time.monotonic()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.allow_cpu:
        parser.error(
            f"jax has no GPU here, only {device.platform}: install jax[cuda12] on a machine with "
            "one, or try the program with --allow-cpu --size 1e5"
        )
    options.check_names(parser, args.only, [EMPTY, TOP_K, *selectors(args.density), *STEPS])
    base, made = contestants(args.size, args.density, args.workers)
    chosen = {key: make for key, make in made.items() if not args.only or key[1] in args.only}
    content = {"device": device.device_kind, "platform": device.platform}
    content |= {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    content |= {"runtime": device.client.platform_version}
    content |= {name: getattr(args, name) for name in ("size", "density", "workers")}
    content |= {"computed_dense_allreduce": dense_on_networks(args.size, args.workers)}

    def write(found: dict[str, Any]) -> None:
        minutes = (time.monotonic() - start) / 60
        reports.write(args.json, content | found | {"minutes": minutes})

    content |= measure(base, chosen, args.rounds, start + 60 * args.minutes, write)
    _show(content)
    return 1 if content["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
