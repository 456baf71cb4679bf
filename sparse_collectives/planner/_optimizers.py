"""Complete optimizers, as a user of `optax_ext` writes them, and predictions of their steps.

They are descriptions: this package does not import `optax_ext`. The computation of a worker is
measured and is everything in a step except waiting: error feedback, selection, merging, the
optimizer's arithmetic and the update.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sparse_collectives import _validation
from sparse_collectives.allreduce._parts._few_bits import FewBits
from sparse_collectives.cost_model import Workload, predict
from sparse_collectives.cost_model._codecs import codec_sizes
from sparse_collectives.cost_model._costs import Estimate, Network
from sparse_collectives.cost_model._formulas import bucket_count, evaluate, sum_of_all
from sparse_collectives.cost_model._numbers import NUMBERS, PROGRAMS, Program
from sparse_collectives.planner._ways import (
    CPU,
    MARGIN,
    TIE,
    LocalCost,
    Prediction,
    Way,
    fastest_first,
    unless_clearly_slower,
)

# The words of PowerSGD depend on the shapes. With n in this many square matrices they are within
# 2 % of the words for the layers of VGG-16, with 14.7M and with 1M parameters.
_MATRICES = 32
_SECONDS, _PASSES = NUMBERS["optimizers"], NUMBERS["passes"]
# Messages of the sparse optimizers: the name of the exchange, and the argument for it.
SUMS, CODES = "few bits", "1, 3 bits"
_EXCHANGES = {
    SUMS: ("partitioned_topk(few)", ""),
    CODES: ("partitioned_topk(1, 3)", ", allreduce=sc.allreduce.partitioned_topk(bits=(1, 3))"),
}
_OF_SUMS = NUMBERS["few_bits"]["of_sums"]
# `sparse_sgd` is estimated by its passes over n.
_SPARSE = {"sparse_adamw": 1.0, "sparse_sgd": _PASSES["sparse_sgd"] / _PASSES["sparse_adamw"]}
# Processor seconds for each parameter, and the step on a GPU. A dense AdamW in float16 is without
# the casts, which were not measured.
_WORK: dict[str, tuple[float, Program]] = {
    **{
        f"{name}, {messages}": (share * of_sums * _SECONDS["sparse_adamw"], PROGRAMS[name + kind])
        for name, share in _SPARSE.items()
        for messages, of_sums, kind in ((SUMS, 1.0, ""), (CODES, _OF_SUMS, "(1, 3)"))
    },
    "quantized": (_SECONDS["quantized"], PROGRAMS["quantized"].then(PROGRAMS["adamw"])),
    "powersgd": (_SECONDS["powersgd"], PROGRAMS["powersgd"].then(PROGRAMS["adamw"])),
    "dense": (_SECONDS["adamw"], PROGRAMS["dense"].then(PROGRAMS["adamw"])),
}


class OptimizerPlan(NamedTuple):
    """All predictions of optimizers, and the choice."""

    # Fastest first; ``codec`` says how the messages are encoded.
    predictions: tuple[Prediction, ...]
    # ``sparse_adamw`` with its default exchange, or with another one that is ``MARGIN`` times as
    # fast; dense, if it is less than ``MARGIN`` times as fast as a dense AdamW.
    recommended: Prediction
    # The step of the fastest dense AdamW divided by the step of this ``sparse_adamw``; None if
    # there is none among the predictions or nothing is exchanged.
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


def all_in_codes(workload: Workload) -> Estimate:
    """The exchange of ``optax_ext.quantized()``."""
    return evaluate(sum_of_all(FewBits(2, 4)), workload, codec_sizes("raw"))


def sparse(
    name: str,
    messages: str,
    workload: Workload,
    local: LocalCost,
    *,
    axis: str = "data",
    every: int = 1,
) -> Way:
    """A sparse optimizer with messages of a kind, which exchanges after every H steps."""
    exchange, more = _EXCHANGES[messages]
    more = ("" if every == 1 else f", every={every}") + more
    density = float(f"{workload.density:.6g}")
    return Way(
        name,
        messages,
        f'optax_ext.{name}(rate, density={density}, axis="{axis}"{more})',
        predict(exchange, workload),
        _work(f"{name}, {messages}", workload.size, local),
        steps_of=exchange if name == "sparse_adamw" else None,
        every=every,
        exact=False,
    )


def _work(name: str, size: int, local: LocalCost) -> float:
    cpu, gpu = _WORK[name]
    if local.gpu:
        return gpu.seconds(size)
    return cpu * local.select / CPU.select * size * local.sharing


def optimizers(workload: Workload, local: LocalCost) -> tuple[Way, ...]:
    """The optimizers that the planner offers, for a workload and a worker.

    The times of a core are scaled with the cost of selecting.
    """
    size = workload.size

    def dense(name: str, codec: str, exchange: str, words: int, dtype: str = "") -> Way:
        buckets = bucket_count(words) if exchange == "dense_bucketed" else 1
        made = f'optax_ext.dense(axis="data", buckets={buckets}{dtype})'
        return Way(
            name,
            codec,
            f"optax.chain({made}, optax.adamw(rate))",
            _dense_cost(exchange, workload, words),
            _work("dense", size, local),
            steps_of="dense",
            buckets=buckets,
            exact=not dtype,
        )

    return (
        *(sparse(name, messages, workload, local) for name in _SPARSE for messages in _EXCHANGES),
        Way(
            "powersgd(1), adamw",
            "factors",
            'optax.chain(optax_ext.powersgd(1, axis="data"), optax.adamw(rate))',
            two_factors(workload),
            _work("powersgd", size, local),
        ),
        Way(
            "quantized, adamw",
            "2, 4 bits",
            'optax.chain(optax_ext.quantized(axis="data"), optax.adamw(rate))',
            all_in_codes(workload),
            _work("quantized", size, local),
            exact=False,
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

    Raises:
      ValueError: ``compute`` is negative.
    """
    compute = _validation.check_number("compute", compute, 0.0, math.inf)
    ways = [way for way in optimizers(workload, local) if way.exact or not exact]
    rows = fastest_first(ways, ways[-1], network, compute, steps)
    dense = next(row for row in rows if row.dense)
    sparse = next((row for row in rows if row.name == "sparse_adamw"), None)
    if sparse is not None:
        of_sums = (row for row in rows if (row.name, row.codec) == (sparse.name, SUMS))
        sparse = unless_clearly_slower(next(of_sums, None), sparse)
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
