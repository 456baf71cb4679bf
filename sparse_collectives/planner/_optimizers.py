"""Whole optimizers, as a user of `optax_ext` writes them, and predictions of their steps.

Rows are descriptions: this package does not import `optax_ext`. The computation of a worker is
measured and is everything in a step except waiting: error feedback, selection, merging, the
optimizer's arithmetic and the update. A test checks that the numbers equal the files in
`docs/data/`.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sparse_collectives.cost_model import ALGORITHMS, Workload, predict
from sparse_collectives.cost_model._gpu import DEFAULT, Program
from sparse_collectives.cost_model._implementation import bucket_count
from sparse_collectives.cost_model._types import Estimate, Network
from sparse_collectives.planner._planner import (
    BACKWARD_SHARE,
    CPU,
    MARGIN,
    LocalCost,
    Prediction,
)

# Processor seconds of a step for each parameter: `alone/adamw`, `sparse_adamw` and
# `powersgd1/adamw` of four workers on two cores, n = 14.7M, 1 Gbit/s; the median of the runs in
# docs/data/network_4*.json.
ADAMW, SPARSE_ADAMW, POWERSGD = 1.63e-9, 6.18e-9, 6.49e-9
# Estimated by the passes over n (benchmarks/local/passes.json), not measured.
SPARSE_SGD = SPARSE_ADAMW * 22.3 / 26.3
# AdamW alone reads four arrays of n floats and writes three, in one kernel.
_ADAMW_KERNEL = Program(1, 28.0)
# The words of PowerSGD depend on the shapes. With n in this many square matrices they are within
# 2 % of the words for the layers of VGG-16, with 14.7M and with 1M parameters.
_MATRICES = 32


class Optimizer(NamedTuple):
    """A whole optimizer as the planner offers it.

    Attributes:
      name: its name in the table.
      messages: the encoding of its messages.
      code: the expression that makes it, with fields for the density and the buckets.
      estimate: returns the cost of its exchange for a workload.
      cpu: processor seconds for each parameter.
      gpu: its kernels.
      adamw: whether it does AdamW's arithmetic.
      exchange: the allreduce in it, by which its steps to the same loss are known; None if they
        are not known.
      share: its share of the words of a dense allreduce in buckets, which can overlap with the
        backward pass; None if it is not such an allreduce.
      exact: whether no message is rounded.
    """

    name: str
    messages: str
    code: str
    estimate: Callable[[Workload], Estimate]
    cpu: float
    gpu: Program
    adamw: bool = True
    exchange: str | None = None
    share: float | None = None
    exact: bool = True

    @property
    def dense(self) -> bool:
        """Whether every entry is exchanged at each step, in float32."""
        return self.exchange == "dense" and self.exact


class Optimizers(NamedTuple):
    """All predictions of optimizers, and the choice.

    Attributes:
      predictions: fastest first; ``codec`` says how the messages are encoded.
      recommended: ``sparse_adamw``, unless it is less than ``MARGIN`` times as fast as a dense
        AdamW.
      ratio: the step of the fastest dense AdamW divided by the step of ``sparse_adamw``; None if
        ``sparse_adamw`` is not among the predictions or nothing is exchanged.
      others: AdamW after other exchanges, if the step is shorter than the recommended one, or
        longer by at most a factor of ``TIE``.
    """

    predictions: tuple[Prediction, ...]
    recommended: Prediction
    ratio: float | None
    others: tuple[Prediction, ...]


# The model cannot separate two steps that differ by less: its median error against measured
# steps is 21 % (docs/network.md).
TIE = 1.2


def _both(gpu: Program, other: Program) -> Program:
    return Program(gpu.launches + other.launches, gpu.bytes + other.bytes)


def _halved(workload: Workload) -> Estimate:
    return predict("dense_bucketed", _of_words(workload, math.ceil(workload.size / 2)))


def _of_words(workload: Workload, words: int) -> Workload:
    """A workload with messages of so many words, if it is exchanged densely."""
    return Workload(words, 1, workload.workers)


def _two_factors(workload: Workload) -> Estimate:
    """An allreduce for each of the thin factors of rank 1."""
    side = math.sqrt(workload.size / _MATRICES)
    each = predict("dense", _of_words(workload, math.ceil(_MATRICES * side))).expected
    return Estimate(each + each, each + each, each + each)


_BUCKETED = 'optax_ext.dense(axis="data", buckets={buckets})'
_HALF = 'optax_ext.dense(axis="data", buckets={buckets}, dtype="float16")'
_BEHIND = "optax.chain({}, optax.adamw(rate))"
_DENSE_ADAMW = _both(ALGORITHMS["dense"].gpu or DEFAULT, _ADAMW_KERNEL)

# A row for each way of getting updates from gradients.
OPTIMIZERS = (
    Optimizer(
        "sparse_adamw",
        "few bits",
        'optax_ext.sparse_adamw(rate, density={density}, axis="data")',
        lambda workload: predict("agreed(few)", workload),
        SPARSE_ADAMW,
        Program(91, 45.1),
        exchange="agreed(few)",
        exact=False,
    ),
    Optimizer(
        "sparse_sgd",
        "few bits",
        'optax_ext.sparse_sgd(rate, density={density}, axis="data")',
        lambda workload: predict("agreed(few)", workload),
        SPARSE_SGD,
        Program(88, 25.1),
        adamw=False,
        exact=False,
    ),
    Optimizer(
        "powersgd(1), adamw",
        "factors",
        _BEHIND.format('optax_ext.powersgd(1, axis="data")'),
        _two_factors,
        POWERSGD,
        # Compiled for rank 4.
        _both(Program(92, 70.0), _ADAMW_KERNEL),
    ),
    Optimizer(
        "dense, adamw",
        "float16",
        _BEHIND.format(_HALF),
        _halved,
        # Without the two casts, which were not measured.
        ADAMW,
        _DENSE_ADAMW,
        exchange="dense",
        share=0.5,
        exact=False,
    ),
    Optimizer(
        "dense_bucketed, adamw",
        "float32",
        _BEHIND.format(_BUCKETED),
        lambda workload: predict("dense_bucketed", workload),
        ADAMW,
        _DENSE_ADAMW,
        exchange="dense",
        share=1.0,
    ),
    Optimizer(
        "dense, adamw",
        "float32",
        _BEHIND.format('optax_ext.dense(axis="data", buckets=1)'),
        lambda workload: predict("dense", workload),
        ADAMW,
        _DENSE_ADAMW,
        exchange="dense",
    ),
)


def plan_optimizers(
    workload: Workload,
    network: Network,
    *,
    local: LocalCost = CPU,
    compute: float = 0.0,
    exact: bool = False,
    steps: Mapping[str, float] | None = None,
) -> Optimizers:
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
    rows = []
    for option in OPTIMIZERS:
        known: Mapping[str | None, float] = {option.exchange: 1.0}
        if steps is not None:
            known = {"dense": 1.0, **steps}
        if option.exchange in known and (option.exact or not exact):
            factor = known[option.exchange]
            rows.append((option, _predict(option, workload, network, local, compute, factor)))
    base = rows[-1][1]
    rows = [
        (option, row._replace(speedup=base.step / row.to_loss if row.step > 0 else 1.0))
        for option, row in sorted(rows, key=lambda pair: pair[1].to_loss)
    ]
    dense = next(row for option, row in rows if option.dense)
    sparse = next((row for _, row in rows if row.name == "sparse_adamw"), None)
    ratio, recommended, others = None, dense, ()
    if dense.exchange > 0:
        if sparse is not None:
            ratio = dense.to_loss / sparse.to_loss
            recommended = sparse if ratio >= MARGIN else dense
        others = tuple(
            row
            for option, row in rows
            if option.adamw and not option.dense and row is not recommended
            if row.to_loss <= TIE * recommended.to_loss
        )
    return Optimizers(tuple(row for _, row in rows), recommended, ratio, others)


def computed(option: Optimizer, size: int, local: LocalCost) -> float:
    """Seconds of a step's local work, for so many parameters."""
    if local.gpu:
        return option.gpu.seconds(size)
    return option.cpu * local.select / CPU.select * size * local.sharing


def _predict(
    option: Optimizer,
    workload: Workload,
    network: Network,
    local: LocalCost,
    compute: float,
    factor: float,
) -> Prediction:
    estimate = option.estimate(workload)
    exchange = estimate.expected.seconds(network)
    buckets = bucket_count(math.ceil((option.share or 1.0) * workload.size))
    busy = computed(option, workload.size, local)
    hidden = 0.0
    if option.share is not None:
        hidden = min(exchange * (buckets - 1) / buckets, compute * BACKWARD_SHARE)
    code = option.code.format(density=float(f"{workload.density:.6g}"), buckets=buckets)
    return Prediction(
        name=option.name,
        codec=option.messages,
        dense=option.dense,
        code=code,
        estimate=estimate,
        exchange=exchange,
        local=busy,
        hidden=hidden,
        step=compute + busy + exchange - hidden,
        steps=factor,
        speedup=math.nan,
    )
