"""The allreduce that the cost model predicts to be fastest, chosen at trace time."""

import functools
from collections.abc import Sequence
from typing import Any

from sparse_collectives import _validation, transport, wire
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, SparseAllreduce
from sparse_collectives.cost_model import ALGORITHMS, Workload, network
from sparse_collectives.cost_model._codecs import CODECS
from sparse_collectives.planner._allreduces import check_known, plan
from sparse_collectives.planner._ways import CPU

# A complete allreduce takes part in the selection, which has already been made.
CANDIDATES = tuple(
    name
    for name, row in ALGORITHMS.items()
    if row.planned and not row.two_level and not row.full_sums
)


def auto(
    *,
    density: float,
    latency: float | str,
    bandwidth: float | str,
    candidates: Sequence[str] | None = None,
    codecs: Sequence[str] = ("raw",),
) -> SparseAllreduce:
    """The allreduce that is predicted to be fastest for this n, k, P and network.

    The choice is made at trace time, from numbers that are the same on all workers, so
    all workers choose the same algorithm, and the program contains only that one. The
    selection has already been made, so only the exchange and the merging, as on a CPU,
    are compared. If dense wins, a dense optimizer without selection is faster still.
    :func:`plan` has the predictions and the reason of a choice.

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

    Returns:
      A :class:`SparseAllreduce` with the state and the total of the chosen algorithm.

    Raises:
      ValueError: an argument is out of its range, or a name does not exist.
    """
    density = _validation.check_density(density)
    names = CANDIDATES if candidates is None else tuple(candidates)
    check_known("candidates", names, CANDIDATES)
    if not codecs:
        raise ValueError("codecs must be at least one name, such as ('raw',), got none.")
    check_known("codecs", codecs, sorted(CODECS))
    net, local = network(latency, bandwidth), CPU._replace(select=0.0)

    @functools.cache
    def chosen(size: int, axis_size: int) -> SparseAllreduce:
        size = _validation.check_size(size)
        workers = _validation.check_positive_int("axis_size", axis_size)
        load = Workload(size, _validation.count_from_density(density, size), workers)
        best = plan(load, net, local=local, codecs=codecs, names=names).recommended
        return ALGORITHMS[best.name].make(load, getattr(wire, best.codec)())

    def init(layout: int | Layout, axis_size: int) -> Any:
        return chosen(as_layout(layout).size, axis_size).init(layout, axis_size)

    def reduce(coo: PaddedCOO, state: Any, *, axis: AxisName):
        return chosen(coo.size, transport.axis_size(axis)).reduce(coo, state, axis=axis)

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
        ),
    )
