"""The time of every selector, beside what a JAX user has without this library.

    python benchmarks/select_speed.py [--sizes 2**20 2**24] [--densities 0.01] [--plot FILE.png]

Contestants run in one process on the same accumulator, one after the other in
each round. The table gives the median over the rounds of the time divided by
that of `lax.top_k(abs(acc), k)` in the same round, and the quartiles. A selector
runs in its steady state: its thresholds come from steps on similar data. The
outside contestants are `jnp.nonzero(size=k)` at the exact threshold,
`numpy.argpartition` and, where it is installed, `torch.topk`.
"""

import argparse
import ast
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import Layout, select

try:
    import torch
except ImportError:
    torch = None

BASE = "lax.top_k"
# Those that do not have a density as their only argument.
SPECIAL = {"threshold", "adtopk_threshold", "layerwise"}


def accumulators(size, seed):
    """Three similar accumulators: heavy-tailed, of a scale that differs by layer."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(rng.lognormal(0, 0.5, 32), -(-size // 32))[:size].astype(np.float32)
    return [rng.standard_t(5, size).astype(np.float32) * layer for _ in range(3)]


def outside(density, k, host):
    """The contestants from elsewhere: functions of no argument."""
    device = jnp.asarray(host)
    # Both results whole: with a part of them XLA sorts all n, 15 times slower.
    top_k = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), k))
    threshold = top_k(device)[0][-1]
    nonzero = jax.jit(lambda x, t: jnp.nonzero(jnp.abs(x) >= t, size=k, fill_value=x.shape[0]))
    runs = {
        BASE: lambda: jax.block_until_ready(top_k(device)),
        "jnp.nonzero(size=k)": lambda: jax.block_until_ready(nonzero(device, threshold)),
        "numpy.argpartition": lambda: np.argpartition(np.abs(host), host.size - k)[-k:],
    }
    if torch is not None:
        tensor = torch.from_numpy(host)
        runs["torch.topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    return runs


def selectors(density):
    """Every selector whose one needed argument is a density, by name."""
    factories = {
        name: getattr(select, name)
        for name in select.__all__
        if name[0].islower() and name not in SPECIAL
    }
    made = {name: factory(density=density) for name, factory in factories.items()}
    made["adtopk_threshold"] = select.adtopk_threshold(density=density, steps=10**9, warmup=2)
    made["layerwise(topk)"] = select.layerwise(select.topk(density=density))
    return made


def layout(size):
    """Matrices as in a transformer, of at most 2^22 entries, wide and tall in turn."""
    entries = min(size, 2**22)
    wide = 2 ** (entries.bit_length() // 2 + 1)
    shapes = ((entries // wide, wide), (wide, entries // wide))
    return Layout(tuple(shapes[i % 2] for i in range(size // entries)) or ((size,),))


def stepper(selector, data):
    """A function of no argument that takes one step, on the next of the data."""
    step = jax.jit(selector.select)
    state = selector.init(layout(data[0].shape[0]))
    turn = 0

    def run():
        nonlocal state, turn
        coo, state, info = jax.block_until_ready(step(data[turn % len(data)], state))
        turn += 1
        return info.selected

    for _ in range(4):
        run()
    return run


def measure(size, density, rounds, seed):
    """A list of rows, one for each contestant."""
    k = max(1, round(density * size))
    host = accumulators(size, seed)
    data = [jnp.asarray(x) for x in host]
    runs = outside(density, k, host[0])
    made = selectors(density)
    # At the exact k-th magnitude: compaction alone, the work that jnp.nonzero does.
    kth = float(np.partition(np.abs(host[0]), size - k)[size - k])
    made["threshold"] = select.threshold(density=min(1.0, 1.5 * density), magnitude=kth)
    runs |= {f"select.{name}": stepper(s, data) for name, s in made.items()}
    for run in runs.values():  # compile, and touch the memory
        run()
    times = {name: [] for name in runs}
    selected = {}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            out = run()
            times[name].append(time.perf_counter() - start)
            if name.startswith("select."):
                selected[name] = int(out) / k
    rows = []
    for name, seconds in times.items():
        ratios = [s / b for s, b in zip(seconds, times[BASE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "contestant": name,
                "size": size,
                "density": density,
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "median_ms": 1e3 * statistics.median(seconds),
                "selected_over_k": selected.get(name),
            }
        )
    return rows


def show(rows):
    """Prints the rows of one size and density."""
    first = rows[0]
    print(f"\nn = {first['size']:,}, density {first['density']:g}")
    print(f"{'contestant':28} {'/ top_k':>8} {'quartiles':>16} {'ms':>9} {'selected/k':>11}")
    for row in rows:
        low, high = row["ratio_quartiles"]
        share = "" if row["selected_over_k"] is None else f"{row['selected_over_k']:.3f}"
        quartiles = f"{low:.3f} - {high:.3f}"
        print(
            f"{row['contestant']:28} {row['ratio']:8.3f} {quartiles:>16} "
            f"{row['median_ms']:9.2f} {share:>11}"
        )


def draw(rows, path):
    """Ratio against n, one panel for each density."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    densities = sorted({row["density"] for row in rows})
    figure, panels = plt.subplots(
        1, len(densities), figsize=(5 * len(densities), 4.5), sharey=True, layout="constrained"
    )
    for panel, density in zip(np.atleast_1d(panels), densities, strict=True):
        panel.set_prop_cycle(color=plt.colormaps["tab20"].colors)
        for name in dict.fromkeys(row["contestant"] for row in rows):
            line = [r for r in rows if r["contestant"] == name and r["density"] == density]
            style = "-" if name.startswith("select.") else "--"
            panel.plot(
                [r["size"] for r in line], [r["ratio"] for r in line], style, marker=".", label=name
            )
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xlabel="n", title=f"density {density:g}")
    np.atleast_1d(panels)[0].set_ylabel("time / time of lax.top_k")
    np.atleast_1d(panels)[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)


def main(argv=None):
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    power = lambda text: int(2 ** ast.literal_eval(text[3:])) if "**" in text else int(float(text))  # noqa: E731
    parser.add_argument("--sizes", type=power, nargs="+", default=[2**20, 2**22, 2**24, 2**26])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG")
    args = parser.parse_args(argv)
    rows = []
    for size in args.sizes:
        for density in args.densities:
            rows += measure(size, density, args.rounds, args.seed)
            show(rows[-sum(r["size"] == size and r["density"] == density for r in rows) :])
    if args.json:
        report = {"backend": jax.default_backend(), "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
