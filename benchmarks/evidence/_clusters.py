"""Claims about clusters of GPUs: the papers' formulas, and selections that a GPU has timed.

A step is computing, a selection and an exchange, one after the other. More computing takes every
ratio nearer to 1, so a step without any has the largest ratios that a claim can have.
"""

from sparse_collectives import cost_model
from sparse_collectives.cost_model._costs import Network

from ._measured import read
from ._predicted import ARIES, BERT, BERT_SELECTED, COMPUTE, GIGABIT

# The selections of the contestants in docs/data/gpu_timings.json.
_SELECTIONS = {
    "topk_a": "lax.top_k",
    "topk_dsa": "lax.top_k",
    "gtopk": "lax.top_k",
    "gaussian_k": "dgc",
    "ok_topk": "threshold_reuse",
}
# Ok-Topk, Table 2 and Figure 8: VGG-16 on Cifar-10, 2 %, 32 GPUs with 16 images each.
_VGG, _VGG_DENSITY, _VGG_WORKERS, _IMAGES = 14_728_266, 0.02, 32, 16
# A pass over an image of 32 x 32, its gradient two more, and half of the peak of a P100.
_VGG_FLOPS, _P100 = 3 * 2 * 0.313e9, 0.5 * 10.6e12
# ADTopk, Table 1, from MB; section 6: one GPU in each node, or four that share a card.
_ADTOPK_MODELS = {"ResNet-101": 170, "VGG-19": 548, "LSTM": 328, "BERT-base": 420}
_RESNET_50 = 98_000_000 // 4
# The exchange and the selection of ADTopk and of two others that a GPU has timed.
_ADTOPK = ("topk_a", "adtopk")
_OTHERS = {"DGC": ("topk_a", "dgc"), "OkTopk": ("ok_topk", "threshold_reuse")}
# SparCML, section 8.4: ResNet-50, 99 % of the entries left out, seconds of an epoch.
_NODES, _EPOCH, _ROWS, _BATCH = 64, 2071, 1_281_167, 256


def _selection(contestant: str, size: int) -> float:
    """Seconds of a selection on a GPU, which are in proportion to the size."""
    timed = read("gpu_timings.json")
    (row,) = [row for row in timed["rows"] if row["contestant"] == contestant]
    return 1e-3 * row["median_ms"] * size / timed["size"]


def _exchange(name: str, size: int, density: float, workers: int, network: Network) -> float:
    load = cost_model.Workload(size, round(density * size), workers)
    return cost_model.paper_cost(name, load).upper.seconds(network)


def _vgg_time() -> dict[str, float]:
    """The step of each contestant over the step of Ok-Topk, with computing and without."""
    found = {}
    for computing, where in ((_IMAGES * _VGG_FLOPS / _P100, ""), (0.0, "without computing: ")):
        steps = {
            name: computing
            + _exchange(name, _VGG, _VGG_DENSITY, _VGG_WORKERS, ARIES)
            + (_selection(_SELECTIONS[name], _VGG) if name in _SELECTIONS else 0)
            for name in ("dense", *_SELECTIONS)
        }
        ours = steps.pop("ok_topk")
        found[f"{where}next fastest / Ok-Topk"] = min(steps.values()) / ours
        found[f"{where}slowest / Ok-Topk"] = max(steps.values()) / ours
    return found


def _weak_scaling() -> dict[str, float]:
    """The step of 32 workers over the step of 256, of BERT with Ok-Topk and with TopkA."""
    found = {}
    for name, label in (("ok_topk", "Ok-Topk"), ("topk_a", "TopkA")):
        few, many = (
            COMPUTE
            + _selection(_SELECTIONS[name], BERT)
            + _exchange(name, BERT, BERT_SELECTED / BERT, workers, ARIES)
            for workers in (32, 256)
        )
        found[f"efficiency of {label}"] = few / many
    return found


def _over_adtopk(size: int, density: float, workers: int, network: Network) -> dict[str, float]:
    """The step of others without computing, over the step of ADTopk."""

    def step(exchange: str, contestant: str) -> float:
        sent = _exchange(exchange, size, density, workers, network)
        return sent + _selection(contestant, size)

    ours = step(*_ADTOPK)
    return {name: step(*other) / ours for name, other in _OTHERS.items()}


def _of_a_card(gbit: float, sharing: int = 1) -> Network:
    return cost_model.network("25us", f"{gbit / sharing}Gbit")


def _adtopk_throughput() -> dict[str, float]:
    """The least and the most over four models and 8 to 64 GPUs, four on a card of 32 Gbit/s."""
    ratios = [
        ratio
        for megabytes in _ADTOPK_MODELS.values()
        for workers in (8, 16, 32, 64)
        for ratio in _over_adtopk(
            megabytes * 1_000_000 // 4, 0.01, workers, _of_a_card(32, 4)
        ).values()
    ]
    return {"least of others / ADTopk": min(ratios), "most of others / ADTopk": max(ratios)}


def _adtopk_bandwidth() -> dict[str, float]:
    return {
        f"{gbit} Gbit/s: next fastest / ADTopk": min(
            _over_adtopk(_RESNET_50, 0.01, 8, _of_a_card(gbit)).values()
        )
        for gbit in (1, 10, 25)
    }


def _adtopk_density() -> dict[str, float]:
    return {
        f"{density:.0%}: next fastest / ADTopk": min(
            _over_adtopk(_RESNET_50, density, 8, _of_a_card(25)).values()
        )
        for density in (0.1, 0.05, 0.01)
    }


def _resnet_50() -> dict[str, float]:
    """What an epoch gains from the sparse exchange, on Aries and on a network that is slower."""
    size = 25_600_000
    load = cost_model.Workload(size, size // 100, _NODES)
    steps = _ROWS / _BATCH
    found = {"density of the sums": 1 - (1 - 0.01) ** _NODES}
    for network, where in ((ARIES, "epoch"), (GIGABIT, "exchange at 1 Gbit/s")):
        dense = cost_model.paper_cost("dense", load).upper.seconds(network)
        sparse = cost_model.predict("dsar_split_allgather", load).expected.seconds(network)
        spared = steps * (dense - sparse)
        found[f"{where}, dense / sparse"] = (
            _EPOCH / (_EPOCH - spared) if network is ARIES else dense / sparse
        )
    return found
