"""Which allreduce is fastest for a model, a network and a number of workers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sparse_collectives import _validation
from sparse_collectives.cost_model import ALGORITHMS, Algorithm, Workload, predict
from sparse_collectives.cost_model._codecs import CODECS, codec_sizes, has_room
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.cost_model._formulas import bucket_count
from sparse_collectives.planner._ways import (
    CPU,
    MARGIN,
    LocalCost,
    Prediction,
    Way,
    fastest_first,
    unless_clearly_slower,
)


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
      ValueError: a name is unknown, a factor is not a positive number, or ``compute`` is negative.
    """
    compute = _validation.check_number("compute", compute, 0.0, math.inf)
    offered = {name: row for name, row in ALGORITHMS.items() if row.planned}
    names = tuple(offered) if names is None else ("dense", *names)
    codecs = tuple(CODECS) if codecs is None else tuple(codecs)
    check_known("names", names, offered)
    check_known("codecs", codecs, CODECS)
    _check_steps(steps, offered)
    crowded = tuple(c for c in codecs if not has_room(codec_sizes(c), workload.density))
    rows = [
        row
        for name, row in offered.items()
        if name in names and (not row.two_level or workload.inner_size > 1)
    ]
    ways = [
        _way(row, codec, workload, local)
        for row in rows
        for codec in row.codecs
        if row.dense or (codec in codecs and codec not in crowded)
    ]
    # The first way is `dense`.
    predictions = fastest_first(ways, ways[0], network, compute, steps)
    sparse = [row.name for row in rows if not row.dense]
    return Plan(
        workload,
        network,
        local,
        compute,
        predictions,
        crowded,
        steps is not None,
        () if steps is None else tuple(name for name in sparse if name not in steps),
        *_recommend(predictions),
    )


def _way(row: Algorithm, codec: str, workload: Workload, local: LocalCost) -> Way:
    estimate = predict(row.name, workload, codec)
    # After a reduce-scatter within the node, a worker selects from its shard only.
    entries = workload.size / (workload.inner_size if row.two_level else 1)
    return Way(
        name=row.name,
        codec=codec,
        code=row.code(workload, codec),
        estimate=estimate,
        local=0.0 if row.dense else local.seconds(row.gpu, entries, estimate.expected.pairs),
        steps_of="dense" if row.dense else row.name,
        buckets=bucket_count(workload.size) if row.overlaps else 1,
    )


def _recommend(predictions: Sequence[Prediction]) -> tuple[Prediction, str]:
    dense = next(row for row in predictions if row.dense)
    sparse = next((row for row in predictions if not row.dense), None)
    if sparse is None:
        return dense, "there is no sparse algorithm to compare with"
    if dense.exchange <= 0:
        return dense, "one worker exchanges nothing"
    name = ALGORITHMS[sparse.name].finer
    finer = next((row for row in predictions if row.name == name), None)
    sparse = unless_clearly_slower(finer, sparse)
    ratio = dense.to_loss / sparse.to_loss
    if ratio >= MARGIN:
        return sparse, f"{ratio:.2f} times as fast as {dense.name}"
    return dense, f"{sparse.name} ({sparse.codec}) is only {ratio:.2f} times as fast"


def _check_steps(steps: Mapping[str, float] | None, known: Iterable[str]) -> None:
    for name, factor in (steps or {}).items():
        check_known("steps", [name], known)
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not 0 < factor < math.inf:
            raise ValueError(
                f"steps[{name!r}] must be a positive number, the steps to the same loss as a "
                f"multiple of the steps of a dense run, got {factor!r}."
            )


def check_known(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Checks that the values of an argument are known names."""
    for value in given:
        if value not in known:
            raise ValueError(f"{name} must be among {', '.join(known)}, got {value!r}.")
