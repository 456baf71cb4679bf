"""Ok-Topk: words and messages, read from traced programs or computed from the formulas."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc
from sparse_collectives import traffic

from ..network import _volumes
from ..network import traffic as program
from ..training._replay import on_workers
from ._code import Points

SIZE, DENSITY = 1_000_000, 0.01
SELECTED = round(DENSITY * SIZE)
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 1024)
# How many of them are at most 16, and at most 128, which keeps k / P at 78 or more. Below that,
# the random excess of a share is as large as the share.
FEW, FAIR = 4, 7


@functools.cache
def words_of(name: str, workers: int, density: float = DENSITY) -> dict[str, Any] | None:
    """As `benchmarks.network._volumes.of_algorithm`; callers must not change the result."""
    return _volumes.of_algorithm(name, SIZE, density, workers)


@functools.cache
def words_of_ok_topk(workers: int, size: int = SIZE) -> dict[str, Any]:
    """As `benchmarks.network.traffic.of_ok_topk` with exact pairs; not to be changed."""
    return program.of_ok_topk(size, DENSITY, workers, "raw")


def rows_of(
    name: str, workers: Sequence[int] = WORKERS, density: float = DENSITY
) -> list[dict[str, Any]]:
    """The words of an algorithm, for each number of workers that it supports."""
    return [row for p in workers if (row := words_of(name, p, density))]


def least_and_most(what: str, values: Sequence[float]) -> dict[str, float]:
    """The two numbers of a claim of a range."""
    return {f"least of {what}": min(values), f"most of {what}": max(values)}


def _of_formula(name: str) -> dict[str, float]:
    """The least and the most of program / formula over P."""
    ratios = [row["worst"] / row["upper"] for row in rows_of(name)]
    few = {"most of it with up to 16 workers": max(ratios[:FEW])}
    return least_and_most("program / formula", ratios) | few


def _bounds() -> dict[str, float]:
    def most(case: str, workers: Sequence[int]) -> float:
        return max(words_of_ok_topk(p)[case]["of_bound"] for p in workers)

    return {
        "worst step / bound": most("worst", WORKERS),
        "the same, P to 128": most("worst", WORKERS[:FAIR]),
        "even step / bound, P to 128": most("even", WORKERS[:FAIR]),
        "surplus dealt out / bound, P to 128": most("spread", WORKERS[:FAIR]),
    }


def _published_bound() -> dict[str, float]:
    """The bound of the published algorithm, plus line 10, which equation 3 leaves out.

    Every tau' steps all sums are gathered: the pairs of a union as large as section 5.2 reports.
    """
    found = {}
    for name, union, density, workers in (("VGG-16", 0.132, 0.01, 16), ("LSTM", 0.345, 0.02, 32)):
        others = (workers - 1) / workers
        line_10 = 2 * union / density * others / 32
        found[f"with line 10 / bound, {name}"] = 1 + line_10 / (6 * others)
    return found | _bounds()


def _near_optimal() -> dict[str, float]:
    # The lower bound is a third of the upper one.
    ratios = [3 * words_of_ok_topk(p)["even"]["of_bound"] for p in WORKERS]
    return least_and_most("words / bound", ratios) | {"most of it, P to 128": max(ratios[:FAIR])}


def _flat() -> dict[str, float]:
    found = {}
    for size, where in ((SIZE, ""), (10**8, "n = 1e8: ")):
        few, twice, many = (words_of_ok_topk(p, size)["even"]["words"] for p in (16, 32, 1024))
        found[f"{where}words at P = 32 / P = 16"] = twice / few
        found[f"{where}words at P = 1,024 / P = 16"] = many / few
    return found


def _doubling() -> dict[str, float]:
    few, many = (row["worst"] for row in rows_of("topk_a", (16, 32)))
    return {"words at P = 32 / P = 16": many / few}


def _topk_dsa() -> dict[str, float]:
    rows = rows_of("dsar_split_allgather")
    ratios = [row["worst"] / row["upper"] for row in rows]
    return {
        "least of best step / lower bound": min(row["best"] / row["lower"] for row in rows),
        "most of worst step / upper bound": max(ratios),
        "most of it with up to 16 workers": max(ratios[:FEW]),
    }


def _above_dense() -> dict[str, float]:
    (sparse,), (dense,) = (rows_of(name, (256,)) for name in ("topk_a", "dense"))
    return {"words / dense": sparse["worst"] / dense["worst"]}


def _dissemination() -> dict[str, float]:
    def last(size: int) -> float:
        traced = _volumes.trace(sc.allreduce.published.ssar_recursive_double(), size, SELECTED, 128)
        return traffic.of_traced(traced).collectives[-1].words

    # A vector twice as long, so that pairs are still the shorter form.
    return {"values at stage 7": last(2 * SIZE) / 2, "words of the message at n = 1e6": last(SIZE)}


def _messages(allreduce: sc.SparseAllreduce, case: str) -> float:
    """The latencies of the best or the worst step with P = 256.

    An all_to_all has one for each partner, a permutation has one, and any other has log P.
    """
    found = traffic.of_traced(_volumes.trace(allreduce, SIZE, SELECTED, 256), conditional=case)
    each = {"all_to_all": 255, "collective_permute": 1}
    return sum(row.weight * each.get(row.kind, 8) for row in found.collectives)


def _latency() -> dict[str, float]:
    ok_topk = sc.allreduce.ok_topk(density=DENSITY)
    return {
        "Ok-Topk": _messages(ok_topk, "worst"),
        "gTop-k": _messages(sc.allreduce.published.gtopk(density=DENSITY), "worst"),
        "Ok-Topk, a step that balances nothing": _messages(ok_topk, "best"),
    }


def _repartition() -> dict[str, float]:
    shares = []
    allreduce = sc.allreduce.ok_topk(density=DENSITY, regions="balanced")
    for workers in (16, 32, 64, 128):
        traced = _volumes.trace(allreduce, SIZE, SELECTED, workers)
        found = traffic.of_traced(traced, conditional="best")
        parts = found.by_scope(depth=2).items()
        shares.append(sum(words for name, words in parts if "repartition" in name) / found.words)
    return {"most of a step's words": max(shares)}


def _table() -> dict[str, float]:
    row, (dense,) = words_of_ok_topk(256), rows_of("dense", (256,))
    found = {case: row[case]["of_bound"] for case in ("even", "worst")}
    return found | {"dense": dense["worst"] / row["bound"]}


def _line(name: str) -> Points:
    found = [(row["workers"], row["worst"] / SELECTED) for row in rows_of(name)]
    return tuple(np.array(found).T)


def _line_of_ok_topk(case: str) -> Points:
    y = [words_of_ok_topk(p)[case]["words"] for p in WORKERS]
    return np.array(WORKERS), np.array(y) / SELECTED


def _bound() -> Points:
    workers = np.array(WORKERS)
    return workers, 6 * (workers - 1) / workers


# Theorem 3.1: the case in which its lower bound is reached. Everything that worker i selects is in
# region i, and each region has k/P of the k largest sums. Then nothing has to be reduced, and an
# allgather of k pairs is enough: 2k (P-1)/P words. ``ReduceInfo.useful`` counts the words that the
# workers put into their messages, because static slots are made for all cases. The default slots
# of a region cannot hold all k entries of a worker, so they are larger here.


def selections(workers: int) -> sc.PaddedCOO:
    """The k entries of worker i in region i; each region has k/P of the k largest sums."""
    k, width = SELECTED, SIZE // workers
    indices = np.arange(k) * width // k + np.arange(workers)[:, None] * width
    # By rank, and slightly different from values of the same rank elsewhere. The ranks are mixed,
    # so that magnitudes do not fall along a region.
    rank = np.random.default_rng(0).permutation(k)
    values = 1 + (k - rank + np.arange(workers)[:, None] / workers) / k
    return sc.PaddedCOO(jnp.asarray(values, jnp.float32), jnp.asarray(indices, jnp.int32), SIZE)


def _tight() -> dict[str, float]:
    useful, received, shares = [], [], []
    allreduce = sc.allreduce.ok_topk(density=DENSITY, regions="equal", slack=math.inf)
    for workers in (4, 16):
        bound, coo = 2 * SELECTED * (workers - 1) / workers, selections(workers)
        largest = np.asarray(coo.indices).ravel()[np.argsort(-np.asarray(coo.values).ravel())]
        step, state = on_workers(allreduce, workers, dense=False), allreduce.init(SIZE, workers)
        # The first step has no threshold yet.
        for _ in range(2):
            _, total, _, state, info = step(coo, state)
        delivered = np.asarray(total.indices[0])[np.asarray(total.values[0]) != 0]
        useful.append(float(info.useful.mean()) / bound)
        received.append(float(info.words[0]) / bound)
        shares.append(np.intersect1d(delivered, largest[:SELECTED]).size / SELECTED)
    return least_and_most("filled words / bound", useful) | {
        "words with padding / bound": max(received),
        "of the k largest sums delivered": min(shares),
    }
