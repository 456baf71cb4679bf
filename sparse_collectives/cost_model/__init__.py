"""What an exchange costs in the alpha-beta model, in plain Python.

``paper_cost`` states the papers' formulas, ``predict`` those of this library's
static messages, and ``expected_union`` how selections fill in. Nothing here traces
or runs anything, so that any n, k and P is answered at once.
"""

from sparse_collectives.cost_model._fill_in import Overlap as Overlap
from sparse_collectives.cost_model._fill_in import expected_union as expected_union
from sparse_collectives.cost_model._paper import paper_cost as paper_cost
from sparse_collectives.cost_model._predict import predict as predict
from sparse_collectives.cost_model._registry import ALGORITHMS as ALGORITHMS
from sparse_collectives.cost_model._registry import Algorithm as Algorithm
from sparse_collectives.cost_model._types import Cost as Cost
from sparse_collectives.cost_model._types import Estimate as Estimate
from sparse_collectives.cost_model._types import Network as Network
from sparse_collectives.cost_model._types import Workload as Workload
from sparse_collectives.cost_model._types import network as network

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "Estimate",
    "Network",
    "Overlap",
    "Workload",
    "expected_union",
    "network",
    "paper_cost",
    "predict",
]
