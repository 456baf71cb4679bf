"""The table of the allreduces: a new one adds a row here.

The cost model, the planner, ``auto``, and the tests of the contract iterate over it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sparse_collectives import allreduce
from sparse_collectives._types import Codec, SparseAllreduce
from sparse_collectives.allreduce import published
from sparse_collectives.allreduce._parts._few_bits import FEW
from sparse_collectives.cost_model import _formulas as flat
from sparse_collectives.cost_model import _two_levels as nodes
from sparse_collectives.cost_model._codecs import codec_sizes
from sparse_collectives.cost_model._costs import Estimate, Workload
from sparse_collectives.cost_model._formulas import Formula
from sparse_collectives.cost_model._numbers import PROGRAMS, Program

# Slots for every entry that may arrive.
_ALL = {"slack": math.inf, "fill": math.inf}
# The encodings of value-index pairs.
PAIR_CODECS = ("raw", "elias_fano", "bf16", "narrow16", "narrow8")


class Algorithm(NamedTuple):
    """An allreduce as it is planned, predicted and tested.

    Attributes:
      name: its key in :data:`ALGORITHMS`.
      factory: the function that makes it; with two levels, the exchange between nodes.
      arguments: returns the arguments of ``factory`` for a workload, without the codec.
      formula: its cost.
      codecs: the encodings that make sense with it, the exact one first.
      dense: whether it exchanges all entries, without a selection.
      two_level: whether it needs workers grouped in nodes; ``factory`` is then the outer exchange
        of ``hierarchical``, unless the row is ``dense``.
      overlaps: whether it can run while the gradients are computed.
      full_sums: whether all workers add their values at an index that any of them selected (full
        sums), so that the allreduce takes part in the selection.
      lossy: whether it rounds values without a codec.
      room: further arguments with which it delivers every selected entry; empty if it always
        does, and None if the algorithm chooses the entries that it delivers.
      wide: whether it sums float64 to the precision of float64.
      planned: whether the planner offers it.
      finer: the row of the same exchange that rounds less. The planner prefers it, unless it is
        clearly slower.
    """

    name: str
    factory: Callable[..., SparseAllreduce]
    arguments: Callable[[Workload], dict[str, Any]]
    formula: Formula
    codecs: tuple[str, ...] = ("raw",)
    dense: bool = False
    two_level: bool = False
    overlaps: bool = False
    full_sums: bool = False
    lossy: bool = False
    room: Mapping[str, float] | None = None
    wide: bool = False
    planned: bool = True
    finer: str | None = None

    @property
    def gpu(self) -> Program | None:
        """The steady step around it as XLA compiles it for a GPU; None if it was not compiled."""
        return PROGRAMS.get(self.factory.__name__ if self.two_level else self.name)

    def make(self, workload: Workload, codec: Codec | None = None) -> SparseAllreduce:
        """The allreduce for a workload, in the exact encoding if no other one is given.

        With two levels, it is the exchange between nodes alone.
        """
        encoding = {} if codec is None or len(self.codecs) == 1 else {"codec": codec}
        return self.factory(**self.arguments(workload), **encoding)

    def code(self, workload: Workload, codec: str = "raw") -> str:
        """The expression that makes it, with the default codec left out."""
        name = self.factory.__name__
        space = "allreduce" if name in allreduce.__all__ else "allreduce.published"
        given = [f"{key}={value!r}" for key, value in self.arguments(workload).items()]
        encoding = [] if codec == "raw" else [f"codec=sc.wire.{codec}()"]
        call = f"sc.{space}.{name}({', '.join([*given, *encoding])})"
        if self.two_level and not self.dense:
            call = f'sc.allreduce.hierarchical(inner_axis="device", outer={call})'
        return call


def _nothing(workload: Workload) -> dict[str, Any]:
    del workload
    return {}


def _density(workload: Workload) -> dict[str, Any]:
    # As a float: `density` refuses the integer 1.
    return {"density": float(f"{workload.density:.6g}")}


def _few_bits(workload: Workload) -> dict[str, Any]:
    return _density(workload) | {"bits": None}


def _fewer_bits(workload: Workload) -> dict[str, Any]:
    return _density(workload) | {"bits": tuple(FEW)}


def _buckets(workload: Workload) -> dict[str, Any]:
    return {"buckets": flat.bucket_count(workload.size)}


def _fill(workload: Workload) -> dict[str, Any]:
    expansion = flat.fill(workload)
    return {} if expansion is None else {"fill": float(f"{max(1.0, expansion):.4g}")}


def _pairs(
    factory: Callable[..., SparseAllreduce],
    arguments: Callable[[Workload], dict[str, Any]],
    formula: Formula,
    **more: Any,
) -> Algorithm:
    return Algorithm(
        factory.__name__, factory, arguments, formula, **{"codecs": PAIR_CODECS, **more}
    )


def _between_nodes(row: Algorithm, flags_of: Any = None) -> Algorithm:
    formula = nodes.hierarchical(row.formula, flags_of)
    return row._replace(name=f"hierarchical({row.name})", formula=formula, two_level=True)


_TOPK_A = _pairs(allreduce.topk_a, _nothing, flat.topk_a, room={}, wide=True)
_GTOPK = _pairs(published.gtopk, _density, flat.gtopk)
_SPARDL = _pairs(allreduce.spardl, _density, flat.spardl)
_OK_TOPK = _pairs(allreduce.ok_topk, _density, flat.ok_topk)
_DENSE = Algorithm("dense", allreduce.dense, _nothing, flat.dense, dense=True, room={}, wide=True)
_PARTITIONED = Algorithm(
    "partitioned_topk",
    allreduce.partitioned_topk,
    _density,
    flat.partitioned_topk(bits=32),
    full_sums=True,
)

_ROWS = (
    _DENSE,
    _DENSE._replace(
        name="dense_bucketed",
        factory=published.dense_bucketed,
        arguments=_buckets,
        formula=flat.dense_bucketed,
        overlaps=True,
    ),
    _DENSE._replace(
        name="torus_2d", factory=published.torus_2d, formula=nodes.torus_2d, two_level=True
    ),
    _TOPK_A,
    # For selections without a common index.
    _pairs(published.sparse_allgather, _nothing, flat.topk_a, wide=True, planned=False),
    _pairs(
        published.ssar_recursive_double, _nothing, flat.ssar_recursive_double, room={}, wide=True
    ),
    _pairs(published.ssar_split_allgather, _fill, flat.ssar_split_allgather, room=_ALL, wide=True),
    # Random rounding (`qsgd`) is for dense runs, which no other algorithm has.
    _pairs(
        published.dsar_split_allgather,
        _nothing,
        flat.dsar_split_allgather,
        codecs=(*PAIR_CODECS, "qsgd"),
        room={"slack": math.inf},
        wide=True,
    ),
    _pairs(published.ring_sparse, _fill, flat.ring_sparse, room=_ALL, wide=True),
    _GTOPK,
    _SPARDL,
    _OK_TOPK,
    # For a selection by row; a workload has no rows.
    _pairs(allreduce.row_topk, _density, flat.row_topk, planned=False),
    _PARTITIONED,
    _PARTITIONED._replace(
        name="partitioned_topk(few)",
        arguments=_few_bits,
        formula=flat.partitioned_topk(bits=None),
        lossy=True,
    ),
    _PARTITIONED._replace(
        name="partitioned_topk(1, 3)",
        arguments=_fewer_bits,
        formula=flat.partitioned_topk(FEW),
        lossy=True,
        finer="partitioned_topk(few)",
    ),
    Algorithm(
        "shared_random", allreduce.shared_random, _density, flat.shared_random, full_sums=True
    ),
    _between_nodes(_TOPK_A),
    _between_nodes(_GTOPK),
    _between_nodes(_SPARDL),
    _between_nodes(_OK_TOPK, flat.ok_topk_flags),
)

ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in _ROWS}


def predict(name: str, workload: Workload, codec: str = "raw") -> Estimate:
    """The cost of one of this library's algorithms, with its default arguments.

    With a measured overlap, ``ssar_split_allgather`` and ``ring_sparse`` get the
    ``fill`` that it suggests.

    Args:
      name: a key of ``ALGORITHMS``: the name in ``sparse_collectives.allreduce``,
        ``partitioned_topk(few)`` for sums of integers of the fewest bits,
        ``partitioned_topk(1, 3)`` for one bit up and three down, or
        ``hierarchical(...)`` around a name.
      workload: n, k and P, and the workers of a node if there are two levels.
      codec: the name of a factory in ``sparse_collectives.wire``.

    Returns:
      Bounds and the expected cost.

    Raises:
      ValueError: there is no such algorithm or codec.

    Examples:
      >>> predict("topk_a", Workload(size=1000, selected=10, workers=4)).expected.words
      60.0
    """
    if name not in ALGORITHMS:
        raise ValueError(f"name must be one of {', '.join(ALGORITHMS)}, got {name!r}.")
    return flat.evaluate(ALGORITHMS[name].formula, workload, codec_sizes(codec))
