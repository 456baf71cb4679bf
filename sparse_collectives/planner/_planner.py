"""Which allreduce is fastest for a model, a network and a number of workers."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparse_collectives.cost_model import (
    ALGORITHMS,
    Algorithm,
    Workload,
    _gpu,
    predict,
)
from sparse_collectives.cost_model._codecs import CODECS, codec_sizes, has_room
from sparse_collectives.cost_model._implementation import bucket_count
from sparse_collectives.cost_model._types import Estimate, Network

# A sparse step costs convergence and memory, and the model is not exact. To be recommended,
# it has to be faster than a dense one by this factor.
MARGIN = 1.1
# The part of a training step during which gradients appear: a backward pass costs
# about twice a forward pass.
BACKWARD_SHARE = 2 / 3


class LocalCost(NamedTuple):
    """The cost of a worker's computation, without the exchange.

    Attributes:
      select: seconds per gradient component, for error feedback, selection and the
        update.
      merge: seconds per received pair.
      gpu: whether the worker is a GPU, whose steps are counted in launches and bytes; ``select``
        and ``merge`` are then added.
      sharing: workers for each core, which take turns on it, at least 1.
    """

    select: float
    merge: float
    gpu: bool = False
    sharing: float = 1.0

    def seconds(self, program: _gpu.Program | None, entries: float, pairs: float) -> float:
        """Seconds of a step of an algorithm that selects from so many entries.

        Args:
          program: the step on a GPU; None if it was not compiled.
          entries: the number of entries from which a worker selects.
          pairs: the number of pairs that it receives.
        """
        given = (self.select * entries + self.merge * pairs) * self.sharing
        return given + ((program or _gpu.DEFAULT).seconds(entries) if self.gpu else 0.0)


# `benchmarks.local.step_cost`: a whole step with ok_topk takes about 3 ns a component on
# two CPU cores, n = 14.7M. A scatter-add of pairs into n floats takes 2 to 7 ns a
# pair on the same machine.
CPU = LocalCost(3e-9, 6e-9)
# Read from compiled programs; an H200 took 0.8 to 1.3 times as long (docs/gpu.md).
GPU = LocalCost(0.0, 0.0, gpu=True)


class Prediction(NamedTuple):
    """The predicted times of one option.

    Attributes:
      name: the name of the algorithm.
      codec: its encoding.
      dense: whether nothing is selected.
      code: the expression that makes it.
      estimate: bounds and expectation of the exchange.
      exchange: seconds of the exchange, expected.
      local: seconds of selection and merging.
      hidden: seconds of the exchange that can overlap with the computation.
      step: seconds of a step: computation, local work and the exchange that is not hidden.
      steps: steps to the same loss, as a multiple of the steps of a dense run; 1 if no factors
        were given.
      speedup: the time of ``dense`` divided by the time of this option, for a step or to the
        same loss.
    """

    name: str
    codec: str
    dense: bool
    code: str
    estimate: Estimate
    exchange: float
    local: float
    hidden: float
    step: float
    steps: float
    speedup: float

    @property
    def to_loss(self) -> float:
        """Seconds to the loss of a dense step."""
        return self.step * self.steps


class Plan(NamedTuple):
    """All predictions, and the choice.

    Attributes:
      workload: n, k, P.
      network: alpha and beta.
      local: costs on the worker.
      compute: seconds of forward and backward pass.
      predictions: fastest first.
      crowded: encodings left out, because the gaps at this density need more escapes than
        they have room for.
      to_loss: whether the order is by the time to the same loss instead of the time of a step.
      unknown: algorithms left out, because the number of their steps was not given.
      recommended: the fastest; dense unless a sparse one is faster by ``MARGIN``.
      reason: one sentence.
    """

    workload: Workload
    network: Network
    local: LocalCost
    compute: float
    predictions: tuple[Prediction, ...]
    crowded: tuple[str, ...]
    to_loss: bool
    unknown: tuple[str, ...]
    recommended: Prediction
    reason: str


def plan(
    workload: Workload,
    network: Network,
    *,
    local: LocalCost = CPU,
    compute: float = 0.0,
    codecs: Iterable[str] | None = None,
    names: Iterable[str] | None = None,
    steps: Mapping[str, float] | None = None,
) -> Plan:
    """Predicts every option and recommends one.

    The inputs and results are plain numbers, so workers that call it with the same
    arguments choose the same option. Cost: microseconds per option, and O(P) for a ring.

    Args:
      workload: n, k, P, and the workers of a node.
      network: alpha and beta.
      local: costs on the worker.
      compute: seconds of forward and backward pass, with which a bucketed exchange can
        overlap.
      codecs: names of the codecs to consider. None: all.
      names: names of the algorithms to consider, in addition to ``dense``. None: all.
      steps: by the name of an algorithm, the steps that it needs to the same loss as a
        multiple of the steps of a dense run (`benchmarks.learning`). Sparse algorithms
        that are missing are left out. None: the times of single steps are compared.

    Returns:
      A :class:`Plan`.

    Raises:
      ValueError: a name is unknown, or a factor is not a positive number.
    """
    offered = {name: row for name, row in ALGORITHMS.items() if row.planned}
    known = list(offered)
    names = known if names is None else ["dense", *names]
    codecs = tuple(CODECS) if codecs is None else tuple(codecs)
    _check_known("names", names, known)
    _check_known("codecs", codecs, list(CODECS))
    crowded = tuple(c for c in codecs if not has_room(codec_sizes(c), workload.density))
    _check_steps(steps, known)
    arguments = (workload, network, local, compute)
    base = _predict(offered["dense"], "raw", *arguments, math.nan)
    chosen = [
        row
        for name, row in offered.items()
        if name in names and (not row.two_level or workload.inner_size > 1)
    ]
    unknown = [r.name for r in chosen if steps is not None and not r.dense and r.name not in steps]
    predictions = []
    for row in chosen:
        if row.name in unknown:
            continue
        factor = 1.0 if steps is None or row.dense else steps[row.name]
        for codec in row.codecs:
            if row.dense or (codec in codecs and codec not in crowded):
                predictions.append(_predict(row, codec, *arguments, base.step, factor))
    predictions.sort(key=lambda row: row.to_loss)
    recommended, reason = _recommend(predictions)
    return Plan(
        *arguments,
        tuple(predictions),
        crowded,
        steps is not None,
        tuple(unknown),
        recommended,
        reason,
    )


def _predict(
    row: Algorithm,
    codec: str,
    workload: Workload,
    network: Network,
    local: LocalCost,
    compute: float,
    base: float,
    steps: float = 1.0,
) -> Prediction:
    estimate = predict(row.name, workload, codec)
    exchange = estimate.expected.seconds(network)
    # After a reduce-scatter within the node, a worker selects from its shard only.
    share = workload.inner_size if row.two_level else 1
    busy = 0.0
    if not row.dense:
        busy = local.seconds(row.gpu, workload.size / share, estimate.expected.pairs)
    hidden = 0.0
    if row.overlaps:
        # The last bucket is ready when the computation is over.
        buckets = bucket_count(workload.size)
        hidden = min(exchange * (buckets - 1) / buckets, compute * BACKWARD_SHARE)
    step = compute + busy + exchange - hidden
    return Prediction(
        name=row.name,
        codec=codec,
        dense=row.dense,
        code=row.code(workload, codec),
        estimate=estimate,
        exchange=exchange,
        local=busy,
        hidden=hidden,
        step=step,
        steps=steps,
        speedup=base / (step * steps) if step > 0 else 1.0,
    )


def _recommend(predictions: list[Prediction]) -> tuple[Prediction, str]:
    dense = next(row for row in predictions if row.dense)
    sparse = next((row for row in predictions if not row.dense), None)
    if sparse is None:
        return dense, "there is no sparse algorithm to compare with"
    if dense.exchange <= 0:
        return dense, "one worker exchanges nothing"
    ratio = dense.to_loss / sparse.to_loss
    if ratio >= MARGIN:
        return sparse, f"{ratio:.2f} times as fast as {dense.name}"
    return dense, f"{sparse.name} ({sparse.codec}) is only {ratio:.2f} times as fast"


def _check_steps(steps: Mapping[str, float] | None, known: list[str]) -> None:
    for name, factor in (steps or {}).items():
        _check_known("steps", [name], known)
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not 0 < factor < math.inf:
            raise ValueError(
                f"steps[{name!r}] must be a positive number, the steps to the same loss as a "
                f"multiple of the steps of a dense run, got {factor!r}."
            )


def _check_known(name: str, given: Iterable[str], known: list[str]) -> None:
    for value in given:
        if value not in known:
            raise ValueError(f"{name} must be among {', '.join(known)}, got {value!r}.")
