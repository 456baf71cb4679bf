"""What an exchange costs in the alpha-beta model, in plain Python.

``paper_cost`` states the papers' formulas, ``predict`` those of this library's
static messages, and ``expected_union`` how selections fill in. Nothing here traces
or runs anything, so that any n, k and P is answered at once.
"""

from sparse_collectives.cost_model._codecs import CODECS as CODECS
from sparse_collectives.cost_model._codecs import MessageSizes as MessageSizes
from sparse_collectives.cost_model._codecs import codec_sizes as codec_sizes
from sparse_collectives.cost_model._codecs import escapes_per_pair as escapes_per_pair
from sparse_collectives.cost_model._codecs import has_room as has_room
from sparse_collectives.cost_model._fill_in import Overlap as Overlap
from sparse_collectives.cost_model._fill_in import effective_size as effective_size
from sparse_collectives.cost_model._fill_in import expected_union as expected_union
from sparse_collectives.cost_model._paper import PAPER as PAPER
from sparse_collectives.cost_model._paper import paper_cost as paper_cost
from sparse_collectives.cost_model._paper import sparse_limit as sparse_limit
from sparse_collectives.cost_model._predict import IMPLEMENTATION as IMPLEMENTATION
from sparse_collectives.cost_model._predict import VERIFIED as VERIFIED
from sparse_collectives.cost_model._predict import predict as predict
from sparse_collectives.cost_model._types import Cost as Cost
from sparse_collectives.cost_model._types import Estimate as Estimate
from sparse_collectives.cost_model._types import Network as Network
from sparse_collectives.cost_model._types import Workload as Workload
from sparse_collectives.cost_model._types import network as network

__all__ = [
    "CODECS",
    "Cost",
    "Estimate",
    "IMPLEMENTATION",
    "MessageSizes",
    "Network",
    "Overlap",
    "PAPER",
    "VERIFIED",
    "Workload",
    "codec_sizes",
    "effective_size",
    "escapes_per_pair",
    "expected_union",
    "has_room",
    "network",
    "paper_cost",
    "predict",
    "sparse_limit",
]
