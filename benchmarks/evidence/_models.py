"""What the papers say of clusters, as far as the alpha-beta model and counted words can."""

import dataclasses

from sparse_collectives import cost_model

from ..network import _volumes
from ..network.scaling import compare_words
from ._claims import Bound, Claim, Elsewhere
from ._runs import quiet
from ._words import words_of, words_of_ok_topk

OK_TOPK, MSTOPK, LIBRARY = "Ok-Topk", "MSTopK", "This library"
BERT, BERT_SELECTED = 133_547_324, 1_335_473
ARIES = cost_model.network("1.3us", "10GB/s")
COMPUTE = 0.3
# Eight GPUs of a node share one card of 25 Gbit/s.
NODES, INSIDE = 16, 8
CLOUD = cost_model.network(
    "25us", 25e9 / 8 / INSIDE, inner_latency="5us", inner_bandwidth="150GB/s"
)


def _bert(workers: int, name: str) -> float:
    load = cost_model.Workload(BERT, BERT_SELECTED, workers)
    return cost_model.paper_cost(name, load).upper.seconds(ARIES)


def _fastest(_seed: int, _quick: bool) -> dict[str, float]:
    others = ("dense", "topk_a", "topk_dsa", "gtopk", "gaussian_k")
    found = {}
    for computing, where in ((COMPUTE, ""), (0.0, "exchange alone: ")):
        ours = computing + _bert(256, "ok_topk")
        ratios = [(computing + _bert(256, name)) / ours for name in others]
        found[f"{where}next fastest / Ok-Topk"] = min(ratios)
        found[f"{where}slowest / Ok-Topk"] = max(ratios)
    return found


def _between_nodes(_seed: int, _quick: bool) -> dict[str, float]:
    found = _volumes.of_two_levels(1_000_000, 0.01, NODES, INSIDE)
    flat, tops = found["topk_a, flat"], found["hierarchical(topk_a)"][0]
    return {
        "flat / HiTopKComm": sum(flat) / tops,
        "only what crosses between nodes": flat[0] / tops,
        "2DTAR / HiTopKComm": found["torus_2d"][0] / tops,
    }


def _load(size: int) -> cost_model.Workload:
    return cost_model.Workload(size, size // 100, NODES * INSIDE, inner_size=INSIDE)


def _breakdown(_seed: int, _quick: bool) -> dict[str, float]:
    shares = {}
    for name, size in (("ResNet-50", 25_000_000), ("Transformer", 110_000_000)):
        cost = cost_model.paper_cost("hierarchical", _load(size)).upper
        outer = dataclasses.replace(cost, inner_messages=0, inner_words=0).seconds(CLOUD)
        shares[f"between nodes, {name}"] = outer / cost.seconds(CLOUD)
    return shares


def _aggregation(_seed: int, _quick: bool) -> dict[str, float]:
    load = _load(25_000_000)
    flat = cost_model.paper_cost("topk_a", load).upper.seconds(CLOUD)
    tree = cost_model.paper_cost("tree", load).upper.seconds(CLOUD)
    torus = cost_model.predict("torus_2d", load).upper.seconds(CLOUD)
    tops = cost_model.paper_cost("hierarchical", load).upper.seconds(CLOUD)
    return {
        "HiTopKComm / 2DTAR": tops / torus,
        "2DTAR / TreeAR": torus / tree,
        "TreeAR / NaiveAG": tree / flat,
    }


def _predicted_words(_seed: int, _quick: bool) -> dict[str, float]:
    with quiet():
        rows = compare_words(1_000_000, 0.01, [2, 4, 16, 64, 256])
    inside = [row for row in rows if 0.999 * row["best"] <= row["model"] <= 1.001 * row["worst"]]
    return {"share inside best and worst step": len(inside) / len(rows)}


def _table(_seed: int, _quick: bool) -> dict[str, float]:
    row = words_of_ok_topk(1_000_000, 0.01, 256)
    dense = words_of("dense", 1_000_000, 0.01, 256)
    assert dense is not None
    return {
        "even": row["even"]["of_bound"],
        "worst": row["worst"]["of_bound"],
        "dense": dense["worst"] / row["bound"],
    }


CLAIMS = (
    Claim(
        "ok-topk/fastest",
        "With 256 GPUs it is 3.29 to 12.95 times as fast as all others on BERT.",
        f"{OK_TOPK}, section 5.4.3, Figure 12",
        "3.29 to 12.95",
        "iterations with 300 ms of computing, the exchange by the paper's formulas with 1.3 us and "
        "10 GB/s: a model, without the time of selection and without stragglers",
        (Bound("next fastest / Ok-Topk", least=3.29), Bound("slowest / Ok-Topk", least=12.95)),
        _fastest,
        exact=True,
        elsewhere=Elsewhere(
            "of the exchange alone, which is 1.3 % of such an iteration",
            (
                Bound("exchange alone: next fastest / Ok-Topk", least=3.29),
                Bound("exchange alone: slowest / Ok-Topk", least=12.95),
            ),
        ),
    ),
    Claim(
        "mstopk/between-nodes",
        "In HiTopKComm a worker of 16 nodes of 8 gets 67.7 times less between the nodes than by an "
        "allgather of all selections.",
        f"{MSTOPK}, section 3, equations 3 and 9",
        "127 x 8 / 15",
        "n = 1e6, density 1 %, traced programs",
        (Bound("flat / HiTopKComm", 67.7, 67.8),),
        _between_nodes,
        exact=True,
    ),
    Claim(
        "mstopk/breakdown",
        "Most of the time of HiTopKComm is between the nodes.",
        f"{MSTOPK}, section 5.3, Figure 8",
        "above 0.5",
        "16 nodes of 8, 25 Gbit/s for a node and 150 GB/s inside, density 1 %: a model",
        (
            Bound("between nodes, ResNet-50", least=0.5),
            Bound("between nodes, Transformer", least=0.5),
        ),
        _breakdown,
        exact=True,
    ),
    Claim(
        "mstopk/aggregation",
        "HiTopKComm is faster than 2DTAR, that than TreeAR, and that than an allgather of all.",
        f"{MSTOPK}, section 5.3, Figure 7",
        "all below 1",
        "25M parameters, density 1 %, the same network: a model",
        (
            Bound("HiTopKComm / 2DTAR", most=1),
            Bound("2DTAR / TreeAR", most=1),
            Bound("TreeAR / NaiveAG", most=1),
        ),
        _aggregation,
        exact=True,
    ),
    Claim(
        "library/predicted-words",
        "The cost model predicts what the programs exchange.",
        f"{LIBRARY}, planner",
        "1",
        "five algorithms, P = 2 to 256, n = 1e6, density 1 %",
        (Bound("share inside best and worst step", least=1),),
        _predicted_words,
        exact=True,
    ),
    Claim(
        "library/volume",
        "With 256 workers a step takes 0.96 of the paper's bound, at worst 1.31; dense takes 33.3.",
        f"{LIBRARY}, README",
        "0.96, 1.31 and 33.3",
        "n = 1e6, density 1 %, traced programs",
        (Bound("even", most=0.965), Bound("worst", most=1.315), Bound("dense", 33.2, 33.4)),
        _table,
        exact=True,
    ),
)
