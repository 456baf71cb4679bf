"""What an exchange costs in the alpha-beta model, in plain Python.

``paper_cost`` states the papers' formulas, ``predict`` those of this library's
static messages, and ``expected_union`` how selections fill in. Nothing here traces
or runs anything, so that any n, k and P is answered at once.
"""

from sparse_collectives.cost_model._fill_in import Overlap, expected_union
from sparse_collectives.cost_model._paper import paper_cost
from sparse_collectives.cost_model._registry import ALGORITHMS, Algorithm, predict
from sparse_collectives.cost_model._types import Workload, network

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Overlap",
    "Workload",
    "expected_union",
    "network",
    "paper_cost",
    "predict",
]
