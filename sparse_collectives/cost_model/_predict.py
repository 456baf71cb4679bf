"""The table of this library's algorithms, and what they are predicted to cost."""

from sparse_collectives.cost_model import _implementation as flat
from sparse_collectives.cost_model._codecs import codec_sizes
from sparse_collectives.cost_model._implementation import Formula
from sparse_collectives.cost_model._two_levels import hierarchical, torus_2d
from sparse_collectives.cost_model._types import Estimate, Workload

IMPLEMENTATION: dict[str, Formula] = {
    "dense": flat.dense,
    "dense_bucketed": flat.dense_bucketed,
    "torus_2d": torus_2d,
    "topk_a": flat.topk_a,
    "sparse_allgather": flat.topk_a,
    "ssar_recursive_double": flat.ssar_recursive_double,
    "ssar_split_allgather": flat.ssar_split_allgather,
    "dsar_split_allgather": flat.dsar_split_allgather,
    "ring_sparse": flat.ring_sparse,
    "gtopk": flat.gtopk,
    "spardl": flat.spardl,
    "ok_topk": flat.ok_topk,
    "agreed": flat.agreed(bits=32),
    "agreed(few)": flat.agreed(bits="few"),
    "leader": flat.leader,
    "hierarchical(topk_a)": hierarchical(flat.topk_a),
    "hierarchical(gtopk)": hierarchical(flat.gtopk),
    "hierarchical(spardl)": hierarchical(flat.spardl),
    "hierarchical(ok_topk)": hierarchical(flat.ok_topk, flat.ok_topk_flags),
}

# A test compares the words of these with the program, with every codec: all of them.
VERIFIED = tuple(IMPLEMENTATION)


def predict(name: str, workload: Workload, codec: str = "raw") -> Estimate:
    """The cost of one of this library's algorithms, with its default arguments.

    With a measured overlap ``ssar_split_allgather`` and ``ring_sparse`` get the
    ``fill`` that it suggests.

    Args:
      name: a key of ``IMPLEMENTATION``: the name in ``sparse_collectives.allreduce``,
        ``agreed(few)`` for that with the fewest bits, or ``hierarchical(...)`` around one.
      workload: n, k and P, and the workers of a node where there are two levels.
      codec: the name of a factory in ``sparse_collectives.wire``.

    Returns:
      Bounds and the expected cost.

    Raises:
      ValueError: there is no such algorithm or codec.

    Examples:
      >>> predict("topk_a", Workload(size=1000, selected=10, workers=4)).expected.words
      60.0
    """
    if name not in IMPLEMENTATION:
        raise ValueError(f"name must be one of {', '.join(IMPLEMENTATION)}, got {name!r}.")
    return IMPLEMENTATION[name](workload, codec_sizes(codec))
