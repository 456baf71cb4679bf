"""What an exchange costs in the alpha-beta model, in plain Python.

``paper_cost`` gives the papers' formulas, ``predict`` the formulas of this library's
static messages, and ``expected_union`` the fill-in of selections. Nothing here traces
or runs anything, so the answer for any n, k and P is immediate.
"""

from sparse_collectives.cost_model._costs import Workload, network
from sparse_collectives.cost_model._fill_in import Overlap, expected_union
from sparse_collectives.cost_model._paper import paper_cost
from sparse_collectives.cost_model._registry import ALGORITHMS, Algorithm, predict

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
