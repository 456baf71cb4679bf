"""What this library's algorithms are predicted to cost."""

from sparse_collectives.cost_model._codecs import codec_sizes
from sparse_collectives.cost_model._registry import ALGORITHMS
from sparse_collectives.cost_model._types import Estimate, Workload


def predict(name: str, workload: Workload, codec: str = "raw") -> Estimate:
    """The cost of one of this library's algorithms, with its default arguments.

    With a measured overlap ``ssar_split_allgather`` and ``ring_sparse`` get the
    ``fill`` that it suggests.

    Args:
      name: a key of ``ALGORITHMS``: the name in ``sparse_collectives.allreduce``,
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
    if name not in ALGORITHMS:
        raise ValueError(f"name must be one of {', '.join(ALGORITHMS)}, got {name!r}.")
    return ALGORITHMS[name].formula(workload, codec_sizes(codec))
