"""Whole optimizers, as a user of `optax_ext` writes them, and predictions of their steps.

They are descriptions: this package does not import `optax_ext`. The computation of a worker is
measured and is everything in a step except waiting: error feedback, selection, merging, the
optimizer's arithmetic and the update.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sparse_collectives.cost_model import Workload, predict
from sparse_collectives.cost_model._costs import Estimate, Network
from sparse_collectives.cost_model._formulas import bucket_count
from sparse_collectives.cost_model._numbers import NUMBERS, PROGRAMS, Program
from sparse_collectives.planner._ways import (
    CPU,
    MARGIN,
    TIE,
    LocalCost,
    Prediction,
    Way,
    fastest_first,
)

# The words of PowerSGD depend on the shapes. With n in this many square matrices they are within
# 2 % of the words for the layers of VGG-16, with 14.7M and with 1M parameters.
_MATRICES = 32
_SECONDS, _PASSES = NUMBERS["optimizers"], NUMBERS["passes"]
# Processor seconds for each parameter, and the step on a GPU. `sparse_sgd` is estimated by its
# passes over n, and a dense AdamW in float16 is without the casts, which were not measured.
_WORK: dict[str, tuple[float, Program]] = {
    "sparse_adamw": (_SECONDS["sparse_adamw"], PROGRAMS["sparse_adamw"]),
    "sparse_sgd": (
        _SECONDS["sparse_adamw"] * _PASSES["sparse_sgd"] / _PASSES["sparse_adamw"],
        PROGRAMS["sparse_sgd"],
    ),
    "powersgd": (_SECONDS["powersgd"], PROGRAMS["powersgd"].then(PROGRAMS["adamw"])),
    "dense": (_SECONDS["adamw"], PROGRAMS["dense"].then(PROGRAMS["adamw"])),
}


class OptimizerPlan(NamedTuple):
    """All predictions of optimizers, and the choice."""

    # Fastest first; ``codec`` says how the messages are encoded.
    predictions: tuple[Prediction, ...]
    # ``sparse_adamw``, unless it is less than ``MARGIN`` times as fast as a dense AdamW.
    recommended: Prediction
    # The step of the fastest dense AdamW divided by the step of ``sparse_adamw``; None if the
    # latter is not among the predictions or nothing is exchanged.
    ratio: float | None
    # AdamW after other exchanges, whose step is at most ``TIE`` times the recommended one.
    others: tuple[Prediction, ...]


def _dense_cost(name: str, workload: Workload, words: int) -> Estimate:
    return predict(name, Workload(words, 1, workload.workers))


def two_factors(workload: Workload) -> Estimate:
    """An allreduce for each of the thin factors of rank 1."""
    side = math.sqrt(workload.size / _MATRICES)
    each = _dense_cost("dense", workload, math.ceil(_MATRICES * side)).expected
    return Estimate(each + each, each + each, each + each)


def optimizers(workload: Workload, local: LocalCost) -> tuple[Way, ...]:
    """The optimizers that the planner offers, for a workload and a worker.

    The times of a core are scaled with the cost of selecting.
    """
    size, density = workload.size, float(f"{workload.density:.6g}")
    few = predict("partitioned_topk(few)", workload)

    def work(name: str) -> float:
        cpu, gpu = _WORK[name]
        if local.gpu:
            return gpu.seconds(size)
        return cpu * local.select / CPU.select * size * local.sharing

    def sparse(name: str, steps_of: str | None) -> Way:
        code = f'optax_ext.{name}(rate, density={density}, axis="data")'
        return Way(name, "few bits", code, few, work(name), steps_of, exact=False)

    def dense(name: str, codec: str, exchange: str, words: int, dtype: str = "") -> Way:
        buckets = bucket_count(words) if exchange == "dense_bucketed" else 1
        made = f'optax_ext.dense(axis="data", buckets={buckets}{dtype})'
        return Way(
            name,
            codec,
            f"optax.chain({made}, optax.adamw(rate))",
            _dense_cost(exchange, workload, words),
            work("dense"),
            steps_of="dense",
            buckets=buckets,
            exact=not dtype,
        )

    return (
        sparse("sparse_adamw", steps_of="partitioned_topk(few)"),
        sparse("sparse_sgd", steps_of=None),
        Way(
            "powersgd(1), adamw",
            "factors",
            'optax.chain(optax_ext.powersgd(1, axis="data"), optax.adamw(rate))',
            two_factors(workload),
            work("powersgd"),
        ),
        # A word holds two values.
        dense(
            "dense, adamw", "float16", "dense_bucketed", math.ceil(size / 2), ', dtype="float16"'
        ),
        dense("dense_bucketed, adamw", "float32", "dense_bucketed", size),
        dense("dense, adamw", "float32", "dense", size),
    )


def plan_optimizers(
    workload: Workload,
    network: Network,
    *,
    local: LocalCost = CPU,
    compute: float = 0.0,
    exact: bool = False,
    steps: Mapping[str, float] | None = None,
) -> OptimizerPlan:
    """Predicts every optimizer and recommends one.

    Args:
      workload: n, k and P; nodes are ignored.
      network: alpha and beta between workers.
      local: costs on the worker. The measured costs are multiplied by the ratio of these costs to
        the default.
      compute: seconds of forward and backward pass.
      exact: whether to leave out optimizers that round messages.
      steps: the steps to the same loss by the name of an allreduce, as in :func:`plan`; optimizers
        without a number are left out, except the dense ones.
    """
    ways = [way for way in optimizers(workload, local) if way.exact or not exact]
    rows = fastest_first(ways, ways[-1], network, compute, steps)
    dense = next(row for row in rows if row.dense)
    sparse = next((row for row in rows if row.name == "sparse_adamw"), None)
    if dense.exchange <= 0:
        return OptimizerPlan(rows, dense, None, ())
    ratio = None if sparse is None else dense.to_loss / sparse.to_loss
    chosen = dense if sparse is None or dense.to_loss / sparse.to_loss < MARGIN else sparse
    others = tuple(
        row
        for row in rows
        if row is not chosen and not row.dense and row.name != "sparse_sgd"
        if row.to_loss <= TIE * chosen.to_loss
    )
    return OptimizerPlan(rows, chosen, ratio, others)
