"""Words that each worker receives per step: Ok-Topk, TopkA and dense.

Volumes are read from the lowered programs (`sparse_collectives.traffic`), with
padding and with periodic work averaged in. Nothing runs, so that the numbers
have no spread and any number of workers works on one machine.

    python benchmarks/traffic.py --params 1e6 --density 0.01 --json traffic.json
    python benchmarks/traffic.py --params 1e8 --workers 16 64 256 1024 --codec narrow8
"""

import argparse
import json
import math
import sys

import jax

import sparse_collectives
from sparse_collectives import traffic, wire
from sparse_collectives.allreduce import ok_topk

AXIS = "workers"

# How far the selected entries are from an even spread over the workers.
CASES = {
    "even": {"conditional": "best"},
    "neighbours": {"frequencies": {"balance": (0, 1, 0, 0)}},
    "spread": {"frequencies": {"balance": (0, 0, 1, 0)}},
    "worst": {"conditional": "worst"},
}

CODECS = {
    "raw": wire.raw,
    "bf16": wire.bf16,
    "narrow16": wire.narrow16,
    "narrow8": wire.narrow8,
    "qsgd8": lambda: wire.qsgd(bits=8),
    "qsgd4": lambda: wire.qsgd(bits=4),
    "qsgd2": lambda: wire.qsgd(bits=2),
}


def parse_args():
    """Command-line options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[2, 4, 8, 16, 64, 256], metavar="P"
    )
    parser.add_argument("--params", type=float, default=1e6, metavar="N")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument(
        "--codec", choices=CODECS, default="raw", help="encoding of the messages of Ok-Topk"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    if min(args.workers) < 2:
        parser.error("--workers: a volume needs at least 2 workers")
    if not 0 < args.density <= 1:
        parser.error("--density: expected a number in (0, 1]")
    if args.params < 1:
        parser.error("--params: expected at least 1")
    return args


def measure(size, density, workers, codec):
    """Words received per worker and step, as a nested dictionary."""
    k = max(1, math.ceil(size * density))
    bound = 6 * k * (workers - 1) / workers
    mesh = {"axis": AXIS, "axis_size": workers}
    dense = traffic.of_function(
        lambda x: jax.lax.psum(x, AXIS), jax.ShapeDtypeStruct((size,), "float32"), **mesh
    )
    # TopkA: every worker receives the k pairs of every other.
    topk_a = traffic.of_function(
        lambda pairs: jax.lax.all_gather(pairs, AXIS),
        jax.ShapeDtypeStruct((2, k), "int32"),
        **mesh,
    )
    row = {
        "workers": workers,
        "k": k,
        "bound": bound,
        "dense": dense.words,
        "topk_a": topk_a.words,
    }
    for case, options in CASES.items():
        measured = traffic.of_allreduce(
            ok_topk(density=density, codec=CODECS[codec]()),
            size=size,
            capacity=k,
            **mesh,
            **options,
        )
        row[f"ok_topk_{case}"] = {
            "words": measured.words,
            "of_bound": measured.words / bound,
            "of_k": measured.words / (bound / 6),
            "of_dense": measured.words / dense.words,
            "of_topk_a": measured.words / topk_a.words,
            "phases": measured.by_scope(depth=2),
        }
    return row


def show(title, head, lines):
    """Prints a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        for line in (head, *lines):
            print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    # A file or a pipe has no width of its own; 80 columns would cut the numbers.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def volumes(rows):
    """Header and lines: words, and in brackets the share of the bound."""
    head = ["P", "bound", "dense", "TopkA", *(f"Ok-Topk, {case}" for case in CASES)]
    lines = []
    for row in rows:
        line = [str(row["workers"])]
        line += [f"{row['bound']:,.0f}"]
        for name in ("dense", "topk_a"):
            line.append(f"{row[name]:,.0f} ({row[name] / row['bound']:.2f})")
        for case in CASES:
            measured = row[f"ok_topk_{case}"]
            line.append(f"{measured['words']:,.0f} ({measured['of_bound']:.2f})")
        lines.append(line)
    return head, lines


def by_codec(rows):
    """Words as a multiple of k (P-1)/P: 2 is the lower bound of exact pairs."""
    lines = [
        [str(row["workers"]), *(f"{row[f'ok_topk_{case}']['of_k']:.3f}" for case in CASES)]
        for row in rows
    ]
    return ["P", *CASES], lines


def phases(rows, case):
    """Each phase as a share of the bound."""
    names = list(dict.fromkeys(p for r in rows for p in r[f"ok_topk_{case}"]["phases"]))
    lines = [
        [
            str(row["workers"]),
            *(
                f"{row[f'ok_topk_{case}']['phases'].get(name, 0) / row['bound']:.4f}"
                for name in names
            ),
        ]
        for row in rows
    ]
    return ["P", *(name.removeprefix("ok_topk/") or "-" for name in names)], lines


def main():
    """Measures, prints, and writes the JSON file where one is asked for."""
    args = parse_args()
    size = round(args.params)
    rows = [measure(size, args.density, workers, args.codec) for workers in args.workers]
    show(
        f"Words received per worker and step (share of the bound 6k(P-1)/P);"
        f" n = {size:,}, density {args.density:g}, k = {rows[0]['k']:,}, codec {args.codec}",
        *volumes(rows),
    )
    show("Ok-Topk: words as multiples of k(P-1)/P", *by_codec(rows))
    for case in CASES:
        show(f"Ok-Topk, {case}: phases as shares of the bound", *phases(rows, case))
    if args.json:
        report = {
            "params": size,
            "density": args.density,
            "codec": args.codec,
            "jax": jax.__version__,
            "sparse_collectives": getattr(sparse_collectives, "__version__", None),
            "rows": rows,
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
