"""Times of steps and exchanges as the alpha-beta model predicts them, for the figures."""

from collections.abc import Callable

import numpy as np

from sparse_collectives import cost_model, planner
from sparse_collectives.planner import Prediction
from sparse_collectives.planner._planner import GPU

from ._curves import Curve, Points
from ._models import BERT, BERT_SELECTED, COMPUTE
from ._sparcml_words import ARIES

# Names of the papers, and of `cost_model`.
STEPS = {
    "Dense": "dense",
    "DenseOvlp": "dense_bucketed",
    "TopkA": "topk_a",
    "TopkDSA": "dsar_split_allgather",
    "gTopk": "gtopk",
    "Ok-Topk": "ok_topk",
}
ETHERNET = cost_model.network("25us", "25Gbit")
WORKERS = (16, 32, 64, 128, 256)
# Of the breakdown.
FEW, MANY = 32, 256
BARS = tuple(f"{name}, {workers}" for workers in (FEW, MANY) for name in STEPS)
EXCHANGES = {
    "dense allreduce": "dense",
    "SSAR_Recursive_double": "ssar_recursive_double",
    "SSAR_Split_allgather": "ssar_split_allgather",
    "DSAR_Split_allgather": "dsar_split_allgather",
    "sparse ring": "ring_sparse",
}
# Of section 8.1 of SparCML: 16M values, 0.781 % of them on each node, or 8 nodes.
VALUES, SHARE, NODES = 2**24, 0.00781, 8
GIGABIT = cost_model.network("50us", "1Gbit")
DENSITIES = np.geomspace(1e-5, 0.3, 24)


def step_of(name: str, workers: int) -> Prediction:
    """A step of BERT's size at 1 %, on GPUs, as the planner has it."""
    load = cost_model.Workload(BERT, BERT_SELECTED, workers)
    given = {"local": GPU, "compute": COMPUTE, "codecs": ["raw"], "names": [STEPS[name]]}
    plan = planner.plan(load, ETHERNET, **given)
    return next(row for row in plan.predictions if row.name == STEPS[name])


def _step(name: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        return np.array(WORKERS), 1e3 * np.array([step_of(name, p).step for p in WORKERS])

    return measure


def _part(seconds: Callable[[Prediction], float]) -> Callable[[int, bool], Points]:
    """One part of each bar."""

    def measure(_seed: int, _quick: bool) -> Points:
        steps = [step_of(name, workers) for workers in (FEW, MANY) for name in STEPS]
        return np.arange(len(steps)), 1e3 * np.array([seconds(step) for step in steps])

    return measure


def _milliseconds(name: str, density: float, nodes: int, network: cost_model.Network) -> float:
    load = cost_model.Workload(VALUES, max(1, round(density * VALUES)), nodes)
    return 1e3 * cost_model.predict(name, load).expected.seconds(network)


def _by_nodes(name: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        nodes = 2 ** np.arange(1, 8)
        return nodes, np.array([_milliseconds(name, SHARE, int(p), ARIES) for p in nodes])

    return measure


def _by_density(name: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        y = [_milliseconds(name, float(d), NODES, GIGABIT) for d in DENSITIES]
        return 100 * DENSITIES, np.array(y)

    return measure


CURVES = (
    *(Curve("weak_scaling", name, _step(name), exact=True) for name in STEPS),
    Curve("breakdown", "computation", _part(lambda _: COMPUTE), exact=True),
    Curve("breakdown", "communication", _part(lambda row: row.exchange - row.hidden), exact=True),
    Curve("breakdown", "sparsification", _part(lambda row: row.local), exact=True),
    *(
        Curve("reduction_nodes", line, _by_nodes(name), exact=True)
        for line, name in EXCHANGES.items()
    ),
    *(
        Curve("reduction_density", line, _by_density(name), exact=True)
        for line, name in EXCHANGES.items()
    ),
)
