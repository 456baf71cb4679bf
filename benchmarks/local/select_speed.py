"""The time of every selector, compared with the alternatives outside this library.

    python -m benchmarks.local.select_speed [--sizes 2**20 2**24] [--plot FILE.png]

Contestants run in one process on the same accumulator, and take turns in each round. The table
gives the time divided by the time of `lax.top_k(abs(acc), k)` in the same round: the median over
the rounds and the quartiles. A selector runs in its steady state: its thresholds come from steps on
similar data. The other contestants are `jnp.nonzero(size=k)` at the exact threshold,
`numpy.argpartition` and, if it is installed, `torch.topk`.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import Layout

from .._common import display, options, reports, timing
from .._common.contestants import selectors

try:
    import torch
except ImportError:
    torch = None

BASE = "lax.top_k"


def accumulators(size, seed):
    """Three similar accumulators: heavy-tailed, with a scale that differs by layer."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(rng.lognormal(0, 0.5, 32), -(-size // 32))[:size].astype(np.float32)
    return [rng.standard_t(5, size).astype(np.float32) * layer for _ in range(3)]


def outside(density, k, host):
    """The contestants from outside this library."""
    device = jnp.asarray(host)
    # Returns both results, since for only one of them XLA sorts all n entries, 15 times slower.
    top_k = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), k))
    threshold = top_k(device)[0][-1]
    nonzero = jax.jit(lambda x, t: jnp.nonzero(jnp.abs(x) >= t, size=k, fill_value=x.shape[0]))
    runs = {
        BASE: lambda: top_k(device),
        "jnp.nonzero(size=k)": lambda: nonzero(device, threshold),
        "numpy.argpartition": lambda: np.argpartition(np.abs(host), host.size - k)[-k:],
    }
    if torch is not None:
        tensor = torch.from_numpy(host)
        runs["torch.topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    return runs


def layout(size):
    """Matrices as in a transformer, of at most 2^22 entries, wide and tall in turn."""
    entries = min(size, 2**22)
    wide = 2 ** (entries.bit_length() // 2 + 1)
    shapes = ((entries // wide, wide), (wide, entries // wide))
    return Layout(tuple(shapes[i % 2] for i in range(size // entries)) or ((size,),))


def stepper(selector, data):
    """A function of no argument that takes one step, on the next array of the data."""

    @jax.jit
    def step(acc, state):
        coo, state, info = selector.select(acc, state)
        return (coo, info.selected), state

    run = timing.steady(step, selector.init(layout(data[0].shape[0])), data, before=4)
    turns = itertools.count(4)
    return lambda: jax.block_until_ready(run(next(turns)))[0][1]


def measure(size, density, rounds, seed):
    """A list of rows, one for each contestant."""
    k = max(1, round(density * size))
    host = accumulators(size, seed)
    data = [jnp.asarray(x) for x in host]
    runs = outside(density, k, host[0])
    # `threshold` at the exact k-th magnitude: compaction alone, the work that jnp.nonzero does.
    kth = float(np.partition(np.abs(host[0]), size - k)[size - k])
    for name, selector in selectors(density, kth).items():
        runs[f"select.{name}"] = stepper(selector, data)
    for run in runs.values():  # compile, and touch the memory
        jax.block_until_ready(run())
    selected = {}

    def count(name, result):
        if name.startswith("select."):
            selected[name] = int(result) / k

    turns = {name: lambda turn, run=run: run() for name, run in runs.items()}
    times = timing.in_turns(turns, rounds, seen=count)
    return [
        row | {"size": size, "density": density, "selected_over_k": selected.get(row["contestant"])}
        for row in timing.ratios(times, BASE)
    ]


def draw(rows, path):
    """Draws the ratio against n, one panel for each density."""
    given = {"ylabel": f"time / time of {BASE}", "xlabel": "n", "workers": True}
    panels = [
        {"title": f"density {density:g}", **given}
        | {"lines": display.lines_of(own, "contestant", "size", "ratio")}
        for density, own in display.grouped(rows, "density").items()
    ]
    display.draw(path, panels)


def power(text):
    """The type of a size: ``2**20``, ``1e6`` or a whole number."""
    base, _, exponent = text.partition("**")
    size = float(base) ** float(exponent or 1)
    if not 1 <= size < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not a size from 1 to 2**31 - 1")
    return int(size)


@options.program
def main(argv=None):
    """Prints the tables."""
    usual = {"densities": [0.001, 0.01, 0.1], "rounds": 9, "seed": 0}
    parser = options.parser_of(__doc__, "json", "plot", **usual)
    given = {"nargs": "+", "default": [2**20, 2**22, 2**24, 2**26]}
    parser.add_argument("--sizes", type=power, **given)
    args = parser.parse_args(argv)
    rows = []
    for size in args.sizes:
        for density in args.densities:
            found = measure(size, density, args.rounds, args.seed)
            title = f"n = {size:,}, density {density:g}; ratio to {BASE}"
            display.show_rows(title, found)
            rows += found
    content = {"backend": jax.default_backend(), "rounds": args.rounds, "rows": rows}
    reports.write(args.json, content)
    draw(rows, args.plot)


if __name__ == "__main__":
    raise SystemExit(main())
