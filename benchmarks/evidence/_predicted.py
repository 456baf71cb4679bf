"""Claims of the papers about clusters, checked by the alpha-beta model and counted words."""

import dataclasses
import functools

import numpy as np

from sparse_collectives import cost_model, planner
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.planner._ways import GPU, Prediction

from ..network import _volumes
from ..network.scaling import compare_words
from ._code import Points
from ._runs import quiet

BERT, BERT_SELECTED = 133_547_324, 1_335_473
# Seconds of a step without the exchange.
COMPUTE = 0.3
# A supercomputer's network, from section 5.2 of SparCML.
ARIES = cost_model.network("1.3us", "10GB/s")
ETHERNET = cost_model.network("25us", "25Gbit")
GIGABIT = cost_model.network("50us", "1Gbit")
# Eight GPUs of a node share one card of 25 Gbit/s.
NODES, INSIDE = 16, 8
CLOUD = cost_model.network(
    "25us", 25e9 / 8 / INSIDE, inner_latency="5us", inner_bandwidth="150GB/s"
)
# The papers' names, and the names in `cost_model`.
STEPS = {
    "Dense": "dense",
    "DenseOvlp": "dense_bucketed",
    "TopkA": "topk_a",
    "TopkDSA": "dsar_split_allgather",
    "gTopk": "gtopk",
    "Ok-Topk": "ok_topk",
}
WORKERS = (16, 32, 64, 128, 256)
# Workers in the breakdown.
FEW, MANY = 32, 256
BARS = tuple(f"{name}, {workers}" for workers in (FEW, MANY) for name in STEPS)
# From section 8.1 of SparCML: 16M values, 0.781 % of them on each node, or 8 nodes.
VALUES, SHARE, FEW_NODES = 2**24, 0.00781, 8


def _fastest() -> dict[str, float]:
    load = cost_model.Workload(BERT, BERT_SELECTED, 256)
    names = ("ok_topk", "dense", "topk_a", "topk_dsa", "gtopk", "gaussian_k")
    exchanges = [cost_model.paper_cost(name, load).upper.seconds(ARIES) for name in names]
    found = {}
    for computing, where in ((COMPUTE, ""), (0.0, "exchange alone: ")):
        ours, *others = (computing + seconds for seconds in exchanges)
        found[f"{where}next fastest / Ok-Topk"] = min(others) / ours
        found[f"{where}slowest / Ok-Topk"] = max(others) / ours
    ours, *others = exchanges
    # The computing c with (c + other) / (c + ours) = the end of the range.
    for other, end in ((min(others), 3.29), (max(others), 12.95)):
        found[f"ms of computing for {end}"] = 1e3 * (other - end * ours) / (end - 1)
    return found


def _between_nodes() -> dict[str, float]:
    found = _volumes.of_two_levels(1_000_000, 0.01, NODES, INSIDE)
    flat, tops = found["topk_a, flat"], found["hierarchical(topk_a)"][0]
    return {"flat / HiTopKComm": sum(flat) / tops}


def _load(size: int) -> cost_model.Workload:
    return cost_model.Workload(size, size // 100, NODES * INSIDE, inner_size=INSIDE)


def _breakdown() -> dict[str, float]:
    sizes, shares = {"ResNet-50": 25_000_000, "Transformer": 110_000_000}, {}
    for name, size in sizes.items():
        cost = cost_model.paper_cost("hierarchical", _load(size)).upper
        outer = dataclasses.replace(cost, inner_messages=0, inner_words=0).seconds(CLOUD)
        shares[f"between nodes, {name}"] = outer / cost.seconds(CLOUD)
    return shares


def _aggregation() -> dict[str, float]:
    load, names = _load(25_000_000), ("topk_a", "tree", "hierarchical")
    flat, tree, tops = (cost_model.paper_cost(x, load).upper.seconds(CLOUD) for x in names)
    torus = cost_model.predict("torus_2d", load).upper.seconds(CLOUD)
    return {
        "HiTopKComm / 2DTAR": tops / torus,
        "2DTAR / TreeAR": torus / tree,
        "TreeAR / NaiveAG": tree / flat,
    }


def _predicted_words() -> dict[str, float]:
    with quiet():
        rows = compare_words(1_000_000, 0.01, [2, 4, 16, 64, 256])
    inside = [row for row in rows if 0.999 * row["best"] <= row["model"] <= 1.001 * row["worst"]]
    return {"share inside best and worst step": len(inside) / len(rows)}


def _seconds(name: str, selected: int, nodes: int, network: Network) -> float:
    load = cost_model.Workload(VALUES, selected, nodes)
    return cost_model.predict(name, load).expected.seconds(network)


def _order() -> dict[str, float]:
    """Modelled seconds of the three algorithms at three densities, as ratios."""
    double, split = "ssar_recursive_double", "ssar_split_allgather"
    cases = {
        "50 entries: doubling / split": (double, split, 50),
        "0.6 %: split / doubling": (split, double, 100_000),
        "24 %: DSAR / split": ("dsar_split_allgather", split, 4_000_000),
    }
    return {
        name: _seconds(one, k, FEW_NODES, ARIES) / _seconds(other, k, FEW_NODES, ARIES)
        for name, (one, other, k) in cases.items()
    }


def _ring() -> dict[str, float]:
    """Modelled seconds of a dense ring, over the fastest sparse algorithm and over fewer nodes."""

    def ring(nodes: int) -> float:
        load = cost_model.Workload(VALUES, int(SHARE * VALUES), nodes)
        return cost_model.paper_cost("dense", load).upper.seconds(ARIES)

    sparse = ("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
    found = {}
    for nodes in (2, FEW_NODES):
        fastest = min(_seconds(name, int(SHARE * VALUES), nodes, ARIES) for name in sparse)
        found[f"{nodes} nodes: ring / fastest"] = ring(nodes) / fastest
    return found | {"ring, 256 nodes / 8": ring(256) / ring(FEW_NODES)}


@functools.cache
def step_of(name: str, workers: int) -> Prediction:
    """A step of BERT's size at 1 % on GPUs, as the planner predicts it."""
    load = cost_model.Workload(BERT, BERT_SELECTED, workers)
    given = {"local": GPU, "compute": COMPUTE, "codecs": ["raw"], "names": [STEPS[name]]}
    plan = planner.plan(load, ETHERNET, **given)
    return next(row for row in plan.predictions if row.name == STEPS[name])


def _steps(name: str) -> Points:
    return np.array(WORKERS), 1e3 * np.array([step_of(name, p).step for p in WORKERS])


def _part(name: str) -> Points:
    """One part of each bar."""
    steps = [step_of(x, workers) for workers in (FEW, MANY) for x in STEPS]
    parts = {
        "computation": [COMPUTE for _ in steps],
        "communication": [step.exchange - step.hidden for step in steps],
        "sparsification": [step.local for step in steps],
    }
    return np.arange(len(steps)), 1e3 * np.array(parts[name])


def _by_nodes(name: str) -> Points:
    nodes = 2 ** np.arange(1, 8)
    seconds = [_seconds(name, round(SHARE * VALUES), int(p), ARIES) for p in nodes]
    return nodes, 1e3 * np.array(seconds)


def _by_density(name: str) -> Points:
    densities = np.geomspace(1e-5, 0.3, 24)
    selected = [max(1, round(float(density) * VALUES)) for density in densities]
    seconds = [_seconds(name, k, FEW_NODES, GIGABIT) for k in selected]
    return 100 * densities, 1e3 * np.array(seconds)
