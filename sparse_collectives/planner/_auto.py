"""The allreduce that the cost model predicts to be fastest, chosen when traced."""

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
    """What :func:`auto` uses, and why.

    Attributes:
      name: of the algorithm, in ``sparse_collectives.allreduce``.
      codec: of the encoding, in ``sparse_collectives.wire``.
      seconds: predicted for the exchange and the merging.
      reason: one sentence.
      predictions: ``(name, codec, seconds)`` of all that were compared, fastest first.
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

    The choice is made while tracing, from numbers that are the same on all workers,
    so all choose the same and the program holds one algorithm only. Selection has
    been paid for by then: only exchange and merging are compared, and where dense
    wins, a dense optimizer without selection is faster still (:func:`explain_auto`
    says so).

    Algorithms differ in what they deliver: ``ok_topk`` the global top-k, ``spardl`` and
    ``gtopk`` nearly, the others all that was selected. Pass ``candidates`` to choose
    among one kind.

    Args:
      density: k / n of the selection and of the result, in (0, 1].
      latency: alpha, of one message, in seconds, or text such as ``"5us"``.
      bandwidth: of one worker while all communicate, in bytes per second, or text
        such as ``"25Gbit"``. :func:`sparse_collectives.measure` fits both.
      candidates: names of allreduces to choose from; ``dense`` is always one. None:
        all.
      codecs: names of codecs to choose from; the default rounds nothing.
      merge_cost: seconds for each received pair; the default was measured on a CPU.

    Returns:
      A :class:`SparseAllreduce` with the state and the total of the chosen one.

    Raises:
      ValueError: an argument out of its range; a name that does not exist.
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
    """What :func:`auto` with the same arguments chooses for a size and an axis.

    Args:
      size: n, gradient components.
      axis_size: P, workers.
      density: see :func:`auto`, as for all that follow.
      latency: of one message.
      bandwidth: of one worker.
      candidates: names of allreduces.
      codecs: names of codecs.
      merge_cost: of a received pair.

    Returns:
      An :class:`AutoChoice`; printed, it is a table.

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
    """All arguments checked, and hashable."""
    density = _validation.check_density(density)
    # A complete one has a say in the selection, which has been made by then.
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
