"""The allreduce that the cost model predicts to be fastest, chosen at trace time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparse_collectives import _units, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, SparseAllreduce
from sparse_collectives.cost_model import ALGORITHMS, Workload, network
from sparse_collectives.cost_model._types import Network
from sparse_collectives.planner import _planner


class AutoChoice(NamedTuple):
    """The choice of :func:`auto`, and its reason.

    Attributes:
      name: the name of the algorithm, in ``sparse_collectives.allreduce``.
      codec: the name of the encoding, in ``sparse_collectives.wire``.
      seconds: the predicted time of the exchange and the merging.
      reason: one sentence.
      predictions: ``(name, codec, seconds)`` of all options that were compared, fastest first.
    """

    name: str
    codec: str
    seconds: float
    reason: str
    predictions: tuple[tuple[str, str, float], ...]

    def __str__(self) -> str:
        rows = [f"{self.name} with {self.codec}: {self.reason}"]
        rows += [f"  {1e3 * t:12.4f} ms  {name} ({codec})" for name, codec, t in self.predictions]
        return "\n".join(rows)


def auto(
    *,
    density: float,
    latency: float | str,
    bandwidth: float | str,
    candidates: Sequence[str] | None = None,
    codecs: Sequence[str] = ("raw",),
    merge_cost: float | str = _planner.CPU.merge,
) -> SparseAllreduce:
    """The allreduce that is predicted to be fastest for this n, k, P and network.

    The choice is made at trace time, from numbers that are the same on all workers, so
    all workers choose the same algorithm, and the program contains only that one. The
    selection has already been made, so only the exchange and the merging are compared.
    If dense wins, a dense optimizer without selection is faster still
    (:func:`explain_auto` says so).

    Algorithms differ in what they deliver: ``ok_topk`` delivers the global top-k,
    ``spardl`` and ``gtopk`` nearly the global top-k, and the others all selected
    entries. Pass ``candidates`` to choose among one kind.

    Args:
      density: k / n of the selection and of the result, in (0, 1].
      latency: alpha, the latency of one message, in seconds, or text such as ``"5us"``.
      bandwidth: the bandwidth of one worker while all communicate, in bytes per second,
        or text such as ``"25Gbit"``. :func:`sparse_collectives.measure` fits both.
      candidates: names of allreduces to choose from, always with ``dense``. None: all.
      codecs: names of codecs to choose from; the default rounds nothing.
      merge_cost: seconds for each received pair; the default was measured on a CPU.

    Returns:
      A :class:`SparseAllreduce` with the state and the total of the chosen algorithm.

    Raises:
      ValueError: an argument is out of its range, or a name does not exist.
    """
    options = _options(density, latency, bandwidth, candidates, codecs, merge_cost)

    def init(size: int, axis_size: int) -> Any:
        made = _make(_choose(size, axis_size, *options), _workload(size, axis_size, density))
        return made.init(size, axis_size)

    def reduce(coo: PaddedCOO, state: Any, *, axis: AxisName):
        workers = transport.axis_size(axis)
        made = _make(_choose(coo.size, workers, *options), _workload(coo.size, workers, density))
        return made.reduce(coo, state, axis=axis)

    return SparseAllreduce(
        init,
        reduce,
        spec=Spec.of(
            "auto",
            density=density,
            latency=latency,
            bandwidth=bandwidth,
            candidates=candidates,
            codecs=codecs,
            merge_cost=merge_cost,
        ),
    )


def explain_auto(
    size: int,
    axis_size: int,
    *,
    density: float,
    latency: float | str,
    bandwidth: float | str,
    candidates: Sequence[str] | None = None,
    codecs: Sequence[str] = ("raw",),
    merge_cost: float | str = _planner.CPU.merge,
) -> AutoChoice:
    """The choice of :func:`auto` with the same arguments, for a size and an axis.

    Args:
      size: n, gradient components.
      axis_size: P, workers.
      density: k / n of the selection and of the result, in (0, 1].
      latency: alpha, the latency of one message, in seconds, or text such as ``"5us"``.
      bandwidth: the bandwidth of one worker while all communicate, in bytes per second,
        or text such as ``"25Gbit"``.
      candidates: names of allreduces to choose from, always with ``dense``. None: all.
      codecs: names of codecs to choose from.
      merge_cost: seconds for each received pair.

    Returns:
      An :class:`AutoChoice`, which prints as a table.

    Raises:
      ValueError: as :func:`auto`.

    Examples:
      >>> explain_auto(
      ...     10**6, 64, density=0.01, latency="5us", bandwidth="1Gbit", candidates=["ok_topk"]
      ... ).name
      'ok_topk'
    """
    options = _options(density, latency, bandwidth, candidates, codecs, merge_cost)
    return _choose(size, axis_size, *options)


def _options(density, latency, bandwidth, candidates, codecs, merge_cost) -> tuple:
    """Checks all arguments and makes them hashable."""
    density = _validation.check_density(density)
    # A complete allreduce takes part in the selection, which has already been made.
    flat = tuple(
        name
        for name, row in ALGORITHMS.items()
        if row.planned and not row.two_level and not row.complete
    )
    names = flat if candidates is None else tuple(candidates)
    for name in names:
        if name not in flat:
            raise ValueError(f"candidates must be among {', '.join(flat)}, got {name!r}.")
    if not codecs:
        raise ValueError("codecs must be at least one name, such as ('raw',), got none.")
    for name in codecs:
        if name not in _CODECS:
            raise ValueError(f"codecs must be among {', '.join(_CODECS)}, got {name!r}.")
    merge = _units.seconds("merge_cost", merge_cost)
    return density, network(latency, bandwidth), names, tuple(codecs), merge


@functools.lru_cache(maxsize=256)
def _choose(
    size: int,
    workers: int,
    density: float,
    net: Network,
    names: tuple[str, ...],
    codecs: tuple[str, ...],
    merge: float,
) -> AutoChoice:
    plan = _planner.plan(
        _workload(size, workers, density),
        net,
        local=_planner.LocalCost(0.0, merge),
        codecs=codecs,
        names=names,
    )
    chosen, reason = plan.recommended, plan.reason
    if chosen.dense:
        reason += "; without selection, as optax_ext.dense, it is faster still"
    return AutoChoice(
        name=chosen.name,
        codec=chosen.codec,
        seconds=chosen.step,
        reason=reason,
        predictions=tuple((row.name, row.codec, row.step) for row in plan.predictions),
    )


def _workload(size: int, workers: int, density: float) -> Workload:
    size = _validation.check_size(size)
    workers = _validation.check_positive_int("axis_size", workers)
    return Workload(size, _validation.count_from_density(density, size), workers)


def _make(choice: AutoChoice, load: Workload) -> SparseAllreduce:
    return ALGORITHMS[choice.name].make(load, _CODECS[choice.codec]())


_CODECS: dict[str, Callable[[], Codec]] = {
    "bf16": wire.bf16,
    "narrow16": wire.narrow16,
    "narrow8": wire.narrow8,
    "qsgd": wire.qsgd,
    "raw": wire.raw,
    "two_bits": wire.two_bits,
}
