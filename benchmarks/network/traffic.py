"""Words that each worker receives per step, for every allreduce, against the papers' formulas.

Volumes are read from the traced programs (`sparse_collectives.traffic`), with padding and with
periodic work averaged in. Nothing runs, so that the numbers have no spread and any number of
workers works on one machine. Four sections:

    algorithms  every allreduce, with the bounds of Table 1 of Ok-Topk and section 5.3 of SparCML
    ok_topk     the cases of its balancing, and its phases, as shares of the bound 6k(P-1)/P
    flatness    Ok-Topk at n = 1e8 from P = 16 to 1,024, by encoding
    bound       when the paper's bound holds, over n and P, by the unevenness to be balanced

    python -m benchmarks.network.traffic --json traffic.json
    python -m benchmarks.network.traffic --sections ok_topk --params 1e8 --codec narrow8
"""

import functools
import itertools

import jax

import sparse_collectives
from sparse_collectives import traffic, wire
from sparse_collectives.allreduce import ok_topk

from .._common import options, reports
from .._common.display import show_crossed, show_rows
from . import _volumes

WORKERS = [2, 3, 4, 6, 8, 12, 16, 48, 64, 100, 256, 384, 1024]
# How far the selected entries are from an even spread over the workers.
CASES = {
    "even": {"conditional": "best"},
    "neighbours": {"frequencies": {"balance": (0, 1, 0, 0)}},
    "spread": {"frequencies": {"balance": (0, 0, 1, 0)}},
    "worst": {"conditional": "worst"},
}
CODECS = {
    name: getattr(wire, name) for name in ("raw", "elias_fano", "bf16", "narrow16", "narrow8")
}
CODECS |= {f"qsgd{bits}": functools.partial(wire.qsgd, bits=bits) for bits in (8, 4, 2)}
# The limits of a step of Ok-Topk, as multiples of k (P-1)/P: the paper's bound, and our targets
# for pairs in fewer bits.
FLAT_SIZE, FLAT_WORKERS = 10**8, (16, 64, 256, 1024)
FLAT_BOUNDS = {"raw": 6.0, "narrow16": 3.0, "narrow8": 1.6}
# Entries, and workers, of the section "bound".
GRID = {10**5: (4, 16, 32, 64), 10**6: (4, 16, 64, 256, 1024), 10**7: (4, 64, 1024)}


def of_ok_topk(size, density, workers, codec):
    """Words and phases of each case, from one traced program."""
    k, program = _traced(size, density, workers, codec)
    row = {"workers": workers, "k": k, "bound": 6 * k * (workers - 1) / workers}
    for case, choice in CASES.items():
        measured = traffic.of_traced(program, **choice)
        row[case] = {
            "words": measured.words,
            "of_bound": measured.words / row["bound"],
            "of_k": 6 * measured.words / row["bound"],
            "phases": measured.by_scope(depth=2),
        }
    return row


def _traced(size, density, workers, codec):
    """k, and one traced step of Ok-Topk."""
    k = max(1, round(size * density))
    allreduce = ok_topk(density=density, codec=CODECS[codec]())
    return k, _volumes.trace(allreduce, size, k, workers)


def algorithms(args):
    """Every allreduce over P: words of the worst step, and of the best, as multiples of k."""
    cases = itertools.product(_volumes.ALGORITHMS, args.workers)
    found = [_volumes.of_algorithm(name, args.params, args.density, p) for name, p in cases]
    rows = [row for row in found if row is not None]
    for case in ("worst", "best"):

        def cell(row, case=case):
            return f"{row[case] / row['k']:,.3g}"

        title = f"Words received per worker, {case} step, in k; n = {args.params:,}"
        show_crossed(f"{title}, density {args.density:g}", rows, "algorithm", "workers", cell)
    return rows


def cases(args):
    """Ok-Topk: each case and each phase as shares of the bound, and as multiples of k(P-1)/P."""
    given = args.density, args.codec
    rows = [of_ok_topk(args.params, given[0], workers, *given[1:]) for workers in args.workers]
    title = "Ok-Topk, words as shares of 6k(P-1)/P, and as multiples of k(P-1)/P"
    title += f"; n = {args.params:,}, " + "density {:g}, codec {}".format(*given)
    show_rows(title, rows)
    return rows


def flatness(args):
    """Ok-Topk at n = 1e8: multiples of k(P-1)/P, and how far they are from constant."""
    rows = []
    for codec in CODECS:
        bound = FLAT_BOUNDS.get(codec)
        found = [of_ok_topk(FLAT_SIZE, args.density, p, codec) for p in FLAT_WORKERS]
        for case in CASES:
            of_k = [row[case]["of_k"] for row in found]
            row = {"codec": codec, "case": case, "of_k": of_k, "bound": bound}
            row["max/min - 1"] = max(of_k) / min(of_k) - 1
            rows.append(row | {"max/bound": max(of_k) / bound if bound else None})
    title = f"Ok-Topk, multiples of k(P-1)/P at n = {FLAT_SIZE:,}, density {args.density:g}"
    show_rows(f"{title}; P = {', '.join(map(str, FLAT_WORKERS))}", rows)
    return rows


def bound(args):
    """Ok-Topk over n and P, in multiples of k(P-1)/P; the paper's bound is 6."""
    rows = []
    for size, workers in ((size, workers) for size, counts in GRID.items() for workers in counts):
        k, program = _traced(size, args.density, workers, "raw")
        unit = k * (workers - 1) / workers
        row = {"params": size, "workers": workers, "of_a_worker": k / workers}
        for case, choice in CASES.items():
            row[case] = traffic.of_traced(program, **choice).words / unit
        row["rounds"] = _by_rounds(program) / unit
        rows.append(row)
    title = f"Ok-Topk, multiples of k(P-1)/P, density {args.density:g}; `rounds`: no window fits"
    show_rows(title, rows)
    return rows


def _by_rounds(program):
    """Words of an even step that finds the global threshold by rounds of histograms."""
    even = {"balance": (1, 0, 0, 0)}
    try:
        # The first branch of a conditional is the one for "no".
        return traffic.of_traced(program, frequencies=even | {"delivery": (1, 0)}).words
    except ValueError:  # There are no windows, so it always does.
        return traffic.of_traced(program, frequencies=even).words


SECTIONS = {"algorithms": algorithms, "ok_topk": cases, "flatness": flatness, "bound": bound}


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, prints, and writes the requested file."""
    usual = {"workers": WORKERS, "params": 1_000_000, "density": 0.01}
    usual |= {"sections": (list(SECTIONS), None, SECTIONS)}
    usual |= {"codec": ("raw", "encoding in the section ok_topk", CODECS)}
    args = options.parser_of(__doc__, "json", **usual).parse_args(argv)
    report = {name: getattr(args, name) for name in ("params", "density", "codec")}
    report |= {"jax": jax.__version__, "sparse_collectives": sparse_collectives.__version__}
    found = {name: run(args) for name, run in SECTIONS.items() if name in args.sections}
    reports.write(args.json, report | found)


if __name__ == "__main__":
    raise SystemExit(main())
