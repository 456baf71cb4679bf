"""Which allreduce is fastest for a model, a network and a number of workers.

``python -m sparse_collectives plan`` prints what :func:`plan` returns, and what whole optimizers
take.
"""

from sparse_collectives.planner._auto import AutoChoice as AutoChoice
from sparse_collectives.planner._auto import auto as auto
from sparse_collectives.planner._auto import explain_auto as explain_auto
from sparse_collectives.planner._planner import LocalCost as LocalCost
from sparse_collectives.planner._planner import Plan as Plan
from sparse_collectives.planner._planner import Prediction as Prediction
from sparse_collectives.planner._planner import plan as plan

__all__ = ["AutoChoice", "LocalCost", "Plan", "Prediction", "auto", "explain_auto", "plan"]
