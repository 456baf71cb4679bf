"""Ok-Topk: words and messages, read from traced programs or worked out from the formulas."""

import sparse_collectives as sc
from sparse_collectives import traffic

from ..network import _volumes
from ._claims import Bound, Claim, Elsewhere
from ._words import words_of, words_of_ok_topk

PAPER = "Ok-Topk"
SIZE, DENSITY = 1_000_000, 0.01
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 1024)
FEW = WORKERS[:4]
# k / P is 78 and more: with less, what chance adds to a share is as large as the share.
FAIR = (2, 4, 8, 16, 32, 64, 128)
SETTING = f"n = {SIZE:,}, density 1 %, P = {WORKERS[0]} to {WORKERS[-1]:,}, traced programs"


def _of_formula(name: str) -> dict[str, float]:
    """The least and the most of program / formula over P."""
    rows = [words_of(name, SIZE, DENSITY, p) for p in WORKERS]
    ratios = [row["worst"] / row["upper"] for row in rows if row]
    return {
        "least of program / formula": min(ratios),
        "most of program / formula": max(ratios),
        f"most of it with up to {FEW[-1]} workers": max(ratios[: len(FEW)]),
    }


def _bounds(_seed: int, _quick: bool) -> dict[str, float]:
    rows = [words_of_ok_topk(SIZE, DENSITY, p) for p in WORKERS]
    fair = rows[: len(FAIR)]
    return {
        "worst step / bound": max(row["worst"]["of_bound"] for row in rows),
        "the same, P to 128": max(row["worst"]["of_bound"] for row in fair),
        "even step / bound, P to 128": max(row["even"]["of_bound"] for row in fair),
        "surplus dealt out / bound, P to 128": max(row["spread"]["of_bound"] for row in fair),
    }


def _near_optimal(_seed: int, _quick: bool) -> dict[str, float]:
    # The lower bound is a third of the upper one.
    ratios = [3 * words_of_ok_topk(SIZE, DENSITY, p)["even"]["of_bound"] for p in WORKERS]
    return {
        "least of words / bound": min(ratios),
        "most of words / bound": max(ratios),
        "most of it, P to 128": max(ratios[: len(FAIR)]),
    }


def _flat(_seed: int, _quick: bool) -> dict[str, float]:
    found = {}
    for size, where in ((SIZE, ""), (10**8, "n = 1e8: ")):
        few, twice, many = (
            words_of_ok_topk(size, DENSITY, p)["even"]["words"] for p in (16, 32, 1024)
        )
        found[f"{where}words at P = 32 / P = 16"] = twice / few
        found[f"{where}words at P = 1,024 / P = 16"] = many / few
    return found


def _doubling(_seed: int, _quick: bool) -> dict[str, float]:
    rows = [words_of("topk_a", SIZE, DENSITY, p) for p in (16, 32)]
    few, many = (row["worst"] for row in rows if row)
    return {"words at P = 32 / P = 16": many / few}


def _topk_dsa(_seed: int, _quick: bool) -> dict[str, float]:
    rows = [words_of("dsar_split_allgather", SIZE, DENSITY, p) for p in WORKERS]
    found = [row for row in rows if row]
    ratios = [row["worst"] / row["upper"] for row in found]
    return {
        "least of best step / lower bound": min(row["best"] / row["lower"] for row in found),
        "most of worst step / upper bound": max(ratios),
        f"most of it with up to {FEW[-1]} workers": max(ratios[: len(FEW)]),
    }


def _above_dense(_seed: int, _quick: bool) -> dict[str, float]:
    rows = [words_of(name, SIZE, DENSITY, 256) for name in ("topk_a", "dense")]
    sparse, dense = (row["worst"] for row in rows if row)
    return {"words / dense": sparse / dense}


def _dissemination(_seed: int, _quick: bool) -> dict[str, float]:
    def last(size: int) -> float:
        traced = _volumes.trace(sc.allreduce.ssar_recursive_double(), size, 10_000, 128)
        return traffic.of_traced(traced).collectives[-1].words

    # Twice as long a vector, so that pairs are still the shorter form.
    return {"values at stage 7": last(2 * SIZE) / 2, "words of the message at n = 1e6": last(SIZE)}


def _messages(allreduce: sc.SparseAllreduce) -> tuple[float, float]:
    """The latencies of the best and the worst step with P = 256.

    An all_to_all has one for each partner, a permutation one, and what else there is log P.
    """
    traced = _volumes.trace(allreduce, SIZE, 10_000, 256)
    each = {"all_to_all": 255, "collective_permute": 1}
    best, worst = (
        sum(
            row.weight * each.get(row.kind, 8)
            for row in traffic.of_traced(traced, conditional=case).collectives
        )
        for case in ("best", "worst")
    )
    return best, worst


def _latency(_seed: int, _quick: bool) -> dict[str, float]:
    best, worst = _messages(sc.allreduce.ok_topk(density=DENSITY))
    return {
        "Ok-Topk": worst,
        "gTopk": _messages(sc.allreduce.gtopk(density=DENSITY))[1],
        "Ok-Topk, a step that balances nothing": best,
    }


def _repartition(_seed: int, _quick: bool) -> dict[str, float]:
    shares = []
    for workers in (16, 32, 64, 128):
        allreduce = sc.allreduce.ok_topk(density=DENSITY, regions="balanced")
        traced = _volumes.trace(allreduce, SIZE, 10_000, workers)
        found = traffic.of_traced(traced, conditional="best")
        parts = found.by_scope(depth=2).items()
        shares.append(sum(words for name, words in parts if "repartition" in name) / found.words)
    return {"most of a step's words": max(shares)}


def _spardl(_seed: int, _quick: bool) -> dict[str, float]:
    return _of_formula("spardl")


_EQUAL = (Bound("least of program / formula", 1, 1), Bound("most of program / formula", 1, 1))

CLAIMS = (
    Claim(
        "ok-topk/dense-words",
        "A dense allreduce takes 2n (P-1)/P words.",
        f"{PAPER}, Table 1",
        "2n (P-1)/P",
        SETTING,
        _EQUAL,
        lambda seed, quick: _of_formula("dense"),
        exact=True,
    ),
    Claim(
        "ok-topk/topk-a-words",
        "TopkA takes 2k (P-1) words.",
        f"{PAPER}, Table 1",
        "2k (P-1)",
        SETTING,
        _EQUAL,
        lambda seed, quick: _of_formula("topk_a"),
        exact=True,
    ),
    Claim(
        "ok-topk/gtopk-words",
        "gTopk takes 4k log P words, no more.",
        f"{PAPER}, Table 1",
        "4k log P",
        SETTING,
        (Bound("most of program / formula", most=1),),
        lambda seed, quick: _of_formula("gtopk"),
        exact=True,
    ),
    Claim(
        "ok-topk/upper-bound",
        "A step of Ok-Topk takes at most 6k (P-1)/P words.",
        f"{PAPER}, Table 1 and equation 3",
        "at most 1 of the bound",
        f"{SETTING}, slots and periodic work included",
        (Bound("worst step / bound", most=1),),
        _bounds,
        exact=True,
        elsewhere=Elsewhere(
            "with up to 128 workers, k / P from 78 on, in all steps but those in which few workers "
            "own nearly all entries",
            (
                Bound("even step / bound, P to 128", most=1),
                Bound("surplus dealt out / bound, P to 128", most=1),
            ),
        ),
    ),
    Claim(
        "ok-topk/near-optimal",
        "It is within three times the lower bound, 2k (P-1)/P.",
        f"{PAPER}, Theorem 3.1",
        "1 to 3",
        f"{SETTING}, entries spread evenly, slots included",
        (Bound("least of words / bound", least=1), Bound("most of words / bound", most=3)),
        _near_optimal,
        exact=True,
        elsewhere=Elsewhere(
            "with up to 128 workers, k / P from 78 on",
            (Bound("least of words / bound", least=1), Bound("most of it, P to 128", most=3)),
        ),
    ),
    Claim(
        "ok-topk/flat",
        "Its volume does not grow with P.",
        f"{PAPER}, section 3",
        "O(k)",
        f"n = {SIZE:,}, density 1 %, entries spread evenly; (P-1)/P alone is 1.03 and 1.07",
        (
            Bound("words at P = 32 / P = 16", most=1.05),
            Bound("words at P = 1,024 / P = 16", most=1.08),
        ),
        _flat,
        exact=True,
        elsewhere=Elsewhere(
            "from 16 to 32 workers with n = 1e8, where a worker's share is long",
            (Bound("n = 1e8: words at P = 32 / P = 16", most=1.05),),
        ),
    ),
    Claim(
        "ok-topk/topk-a-doubles",
        "That of TopkA doubles with P.",
        f"{PAPER}, Table 1",
        "2",
        f"n = {SIZE:,}, density 1 %",
        (Bound("words at P = 32 / P = 16", 1.9, 2.1),),
        _doubling,
        exact=True,
    ),
    Claim(
        "ok-topk/topk-dsa-words",
        "TopkDSA takes from 4k (P-1)/P to (2k + n) (P-1)/P words.",
        f"{PAPER}, Table 1",
        "inside both bounds",
        f"{SETTING}, slots included",
        (
            Bound("least of best step / lower bound", least=1),
            Bound("most of worst step / upper bound", most=1),
        ),
        _topk_dsa,
        exact=True,
        elsewhere=Elsewhere(
            f"with up to {FEW[-1]} workers; with more the slots take up to 1 %",
            (
                Bound("least of best step / lower bound", least=1),
                Bound(f"most of it with up to {FEW[-1]} workers", most=1),
            ),
        ),
    ),
    Claim(
        "ok-topk/topk-a-above-dense",
        "With 256 workers TopkA takes more than a dense allreduce.",
        f"{PAPER}, section 5.4.3, Figure 12",
        "kP/n = 2.56",
        f"n = {SIZE:,}, density 1 %, P = 256",
        (Bound("words / dense", 2.53, 2.59),),
        _above_dense,
        exact=True,
    ),
    Claim(
        "ok-topk/640000-values",
        "Recursive doubling of 10,000 of 1e6 values on 128 workers ends with 640,000 values.",
        f"{PAPER}, section 1",
        "640,000",
        "the message of stage 7, no index in common; at n = 1e6 our program then sends n values",
        (
            Bound("values at stage 7", 640_000, 640_000),
            Bound("words of the message at n = 1e6", 1e6, 1e6),
        ),
        _dissemination,
        exact=True,
    ),
    Claim(
        "control-flow/latency",
        "With 256 workers Ok-Topk has 528 latencies, gTopk 16.",
        "Control flow of Ok-Topk, section 7",
        "528 and 16",
        "the collectives of our traced programs: P - 1 latencies for an all_to_all, one for a "
        "permutation, log P for the others",
        (Bound("Ok-Topk", most=528), Bound("gTopk", most=16)),
        _latency,
        exact=True,
        elsewhere=Elsewhere(
            "for Ok-Topk in a step that balances nothing; what our gTopk delivers is gathered at "
            "its end",
            (Bound("Ok-Topk, a step that balances nothing", most=528),),
        ),
    ),
    Claim(
        "ok-topk/repartition",
        "Cutting the regions anew every 64 steps costs next to nothing.",
        f"{PAPER}, section 3.1.1",
        "negligible",
        f"n = {SIZE:,}, density 1 %, P = 16 to 128, balanced regions: share of a step's words",
        (Bound("most of a step's words", most=0.01),),
        _repartition,
        exact=True,
    ),
    Claim(
        "library/spardl-words",
        "`spardl` takes 4k (P-1)/P words, a third less than the bound of Ok-Topk.",
        "This library, allreduces",
        "4k (P-1)/P",
        "n = 1,000,000, density 1 %, P = 2 to 1,024, traced programs",
        (Bound("most of program / formula", most=1),),
        _spardl,
        exact=True,
        elsewhere=Elsewhere(
            f"with up to {FEW[-1]} workers; with more the slots take up to 3 %",
            (Bound(f"most of it with up to {FEW[-1]} workers", most=1),),
        ),
    ),
)
