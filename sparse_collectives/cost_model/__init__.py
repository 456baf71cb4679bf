"""What an exchange costs in the alpha-beta model, in plain Python.

``paper_cost`` states the papers' formulas, ``predict`` those of this library's
static messages, and ``expected_union`` how selections fill in. Nothing here uses
jax, so that any n, k and P is answered at once.
"""

from sparse_collectives.cost_model._codecs import CODECS as CODECS
from sparse_collectives.cost_model._codecs import CodecCost as CodecCost
from sparse_collectives.cost_model._codecs import codec_cost as codec_cost
from sparse_collectives.cost_model._codecs import qsgd_cost as qsgd_cost
from sparse_collectives.cost_model._fill_in import Overlap as Overlap
from sparse_collectives.cost_model._fill_in import effective_size as effective_size
from sparse_collectives.cost_model._fill_in import expected_union as expected_union
from sparse_collectives.cost_model._implementation import IMPLEMENTATION as IMPLEMENTATION
from sparse_collectives.cost_model._implementation import VERIFIED as VERIFIED
from sparse_collectives.cost_model._implementation import predict as predict
from sparse_collectives.cost_model._paper import PAPER as PAPER
from sparse_collectives.cost_model._paper import paper_cost as paper_cost
from sparse_collectives.cost_model._paper import sparse_limit as sparse_limit
from sparse_collectives.cost_model._types import Cost as Cost
from sparse_collectives.cost_model._types import Estimate as Estimate
from sparse_collectives.cost_model._types import Network as Network
from sparse_collectives.cost_model._types import Workload as Workload
from sparse_collectives.cost_model._types import network as network

__all__ = [
    "CODECS",
    "CodecCost",
    "Cost",
    "Estimate",
    "IMPLEMENTATION",
    "Network",
    "Overlap",
    "PAPER",
    "VERIFIED",
    "Workload",
    "codec_cost",
    "effective_size",
    "expected_union",
    "network",
    "paper_cost",
    "predict",
    "qsgd_cost",
    "sparse_limit",
]
