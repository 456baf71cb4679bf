"""Profiles selections and steps on a GPU by kernel, next to the predicted time.

    python -m benchmarks.gpu.kernels [--only NAME ...] [--json gpu_kernels.json]

Each program is compiled twice: as jax compiles it, which is timed, and without CUDA graphs, which
is profiled, since the profiler names the kernels of a graph by their nodes only. A row has the
kernel, how often a call launches it, its microseconds in a call, the bytes that it moves by the
count of benchmarks.gpu.programs, and the share of the memory's peak that these bytes are in that
time. The peak is what a copy of 1 GB reaches in the same run.

The first table has a row for each program: its time, the time of its kernels alone, and what the
planner's rule (4 us a launch, 2 TB/s) predicts. A large gap between the first two is time in which
the GPU waits. The programs "GPT-2, ..." are training steps of benchmarks.gpu.train_step. --texts
writes the compiled programs into a folder.
"""

import collections
import concurrent.futures
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from sparse_collectives import select

from .._common import options, reports
from .._common.display import show_rows
from . import _contestants as runs
from . import train_step
from ._contestants import STEPS
from ._hlo import parse
from ._paths import alone, lightest

SIZE, LARGE, DENSITY = 14_700_000, 100_000_000, 0.01
# The thresholds of a new state take some tens of steps to settle.
_CALLS, _ROUNDS, _WARM_UP = 10, 9, 40
# A graph of fewer operations is not made.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1_000_000}
# What the planner reckons with.
_LAUNCH, _BANDWIDTH = 4e-6, 2e12
GPT = ("AdamW alone", "sparse_adamw")
Call = Callable[[int], Any]


class Program:
    """A program in the form that is timed and the form that is profiled."""

    def __init__(self, name: str, make: Callable[[dict[str, Any]], tuple[Any, Call]]):
        """``make`` returns a compiled program, and a call of a turn, for compiler options."""
        self.name, self._make = name, make

    def compile(self) -> None:
        """Compiles both forms."""
        self.timed, self.call = self._make({})
        self.profiled, self.call_profiled = self._make(_NO_GRAPHS)


def _of_run(make: Callable[..., runs.Run]) -> Callable[[dict[str, Any]], tuple[Any, Call]]:
    def made(compiler: dict[str, Any]) -> tuple[Any, Call]:
        run = make(compiler=compiler)
        return run.compiled, run.call

    return made


def programs(size: int, large: int, density: float) -> list[Program]:
    """The selections and the steps of one worker."""
    data, more = runs.gradients(size), runs.gradients(large)
    k, many = max(1, round(density * size)), max(1, round(density * large))

    def kth(k: int, x: jax.Array) -> Any:
        return jax.lax.top_k(jnp.abs(x), k)

    made = {
        "select.topk": functools.partial(runs.selection, select.topk(density), data),
        "lax.top_k": functools.partial(runs.stateless, functools.partial(kth, k), data),
        f"select.topk, n = {large:,}": functools.partial(
            runs.selection, select.topk(density), more
        ),
        f"lax.top_k, n = {large:,}": functools.partial(
            runs.stateless, functools.partial(kth, many), more
        ),
    }
    for name in ("sparse_adamw", "partitioned_topk", "ok_topk", "ok_topk_reuse"):
        made[name] = functools.partial(runs.step, STEPS[name], density, data)
    return [Program(name, _of_run(make)) for name, make in made.items()]


def trainings(width: int, blocks: int, batch: int) -> list[Program]:
    """Training steps of a GPT, with and without an exchange."""
    heads, draw = max(1, width // 64), np.random.default_rng(1)
    shape = (3, batch, train_step.CONTEXT + 1)
    tokens = draw.integers(0, train_step.VOCABULARY, shape, np.int32)
    batches = [(jnp.asarray(x[:, :-1]), jnp.asarray(x[:, 1:])) for x in tokens]
    params = train_step.gpt(width, blocks)
    loss = functools.partial(train_step.loss, heads)

    def made(name: str, compiler: dict[str, Any]) -> tuple[Any, Call]:
        contestant = train_step.Contestant(name, loss, params, batches[0])
        contestant.compile(compiler)
        return contestant.compiled, lambda turn: contestant(batches[turn % len(batches)])

    return [Program(f"GPT-2, {name}", functools.partial(made, name)) for name in GPT]


def seconds_of_call(call: Call) -> list[float]:
    """The seconds of a call in each round, of several calls that are queued."""
    jax.block_until_ready([call(turn) for turn in range(_WARM_UP)][-1])
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call(turn) for turn in range(_CALLS)][-1])
        found.append((time.perf_counter() - start) / _CALLS)
    return found


def kernels_of(call: Call) -> dict[str, tuple[float, float]]:
    """For each kernel, the launches and the seconds of a call."""
    jax.block_until_ready([call(turn) for turn in range(_WARM_UP)][-1])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call(turn) for turn in range(_CALLS)][-1])
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(path))
    found: dict[str, list[float]] = collections.defaultdict(list)
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                found[str(stats.get("hlo_op") or event.name)].append(event.duration_ns * 1e-9)
    return {name: (len(x) / _CALLS, sum(x) / _CALLS) for name, x in found.items()}


def rows_of(compiled: Any, found: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """A row for each kernel, with the bytes and the source of the instruction of that name."""
    program = parse(compiled.as_text())
    known = {}
    for lines in program.computations.values():
        for line in lines.values():
            # A kernel has the name of its instruction, in the characters of C.
            for name in (line.name, line.name.replace(".", "_").replace("-", "_")):
                known[name] = lines, line
    rows = []
    for name, (launches, seconds) in sorted(found.items(), key=lambda x: -x[1][1]):
        row = {"kernel": name, "function": "-", "launches": launches, "us": 1e6 * seconds}
        row["moved_mb"] = 0.0
        if name in known:
            lines, line = known[name]
            row["function"] = program.sources.get(line.frame, "-")
            row["moved_mb"] = launches * alone(program, lines, line)["moved"] / 1e6
        row["tb_per_s"] = 1e-6 * row["moved_mb"] / seconds if seconds else 0.0
        rows.append(row)
    return rows


def by_function(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels added up by the function that they come from."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        found[row["function"]].update({key: row[key] for key in ("launches", "us", "moved_mb")})
    order = sorted(found.items(), key=lambda x: -x[1]["us"])
    return [{"function": name, **dict(sums)} for name, sums in order]


def peak_of(size: int = 250_000_000) -> float:
    """Bytes per second that a copy reads and writes."""
    x = jnp.arange(size, dtype=jnp.float32)
    copy = jax.jit(jnp.copy).lower(x).compile()
    return 8 * size / min(seconds_of_call(lambda _: copy(x)))


def profile(program: Program) -> dict[str, Any]:
    """The times, the prediction and the kernels of a program."""
    seconds = seconds_of_call(program.call)
    found = kernels_of(program.call_profiled)
    cost = lightest(parse(program.timed.as_text()))
    rows = rows_of(program.profiled, found)
    return {
        "program": program.name,
        "ms": 1e3 * statistics.median(seconds),
        "ms_range": [1e3 * min(seconds), 1e3 * max(seconds)],
        "kernels_ms": sum(row["us"] for row in rows) / 1e3,
        "launched": sum(row["launches"] for row in rows),
        "counted_launches": cost["launches"],
        "counted_moved_gb": cost["moved"] / 1e9,
        "predicted_ms": 1e3 * (_LAUNCH * cost["launches"] + cost["moved"] / _BANDWIDTH),
        "kernels": rows,
        "functions": by_function(rows),
    }


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = options.parser_of(__doc__, "json")
    add = parser.add_argument
    add("--size", type=options.at_least(1024), default=SIZE)
    add("--large", type=options.at_least(1024), default=LARGE, help="n of a second selection")
    add("--density", type=options.share, default=DENSITY)
    add("--width", type=options.several, default=768)
    add("--blocks", type=options.at_least_one, default=12)
    add("--batch", type=options.at_least_one, default=8)
    add("--texts", type=Path, metavar="FOLDER", help="write the compiled programs there")
    add("--only", nargs="+", metavar="NAME", help="programs whose name begins so")
    add("--rows", type=options.at_least_one, default=12, help="printed kernels of each program")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    content = {"device": device.device_kind, "jax": jax.__version__}
    content |= {"size": args.size, "density": args.density, "peak_tb_per_s": peak_of() / 1e12}
    found: list[dict[str, Any]] = []
    for make in (
        functools.partial(programs, args.size, args.large, args.density),
        functools.partial(trainings, args.width, args.blocks, args.batch),
    ):
        made = [x for x in make() if not args.only or x.name.startswith(tuple(args.only))]
        # A profile also shows a compilation at the same time, so all are compiled first.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(Program.compile, made))
        for program in made:
            options.say(program.name)
            found.append(profile(program))
            reports.write(args.json, content | {"programs": found})
            if args.texts:
                args.texts.mkdir(parents=True, exist_ok=True)
                path = args.texts / f"{program.name.replace(' ', '_')}.txt"
                path.write_text(program.profiled.as_text(), encoding="utf-8")
    keys = [key for key in found[0] if key not in ("kernels", "functions")]
    for one in found:
        title = f"{one['program']}: {len(one['kernels'])} kernels"
        show_rows(title, one["kernels"][: args.rows])
        show_rows(f"{one['program']}, by function", one["functions"][: args.rows])
    title = "n = {size:,}, {device}, jax {jax}; a copy reaches {peak_tb_per_s:.2f} TB/s"
    show_rows(title.format(**content), [{key: one[key] for key in keys} for one in found])


if __name__ == "__main__":
    sys.exit(main())
