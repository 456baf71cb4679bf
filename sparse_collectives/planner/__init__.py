"""Which allreduce is fastest for a model, a network and a number of workers.

``python -m sparse_collectives plan`` prints the result of :func:`plan`, and the predicted steps of
whole optimizers.
"""

from sparse_collectives.planner._auto import auto, explain_auto
from sparse_collectives.planner._planner import LocalCost, plan

__all__ = ["LocalCost", "auto", "explain_auto", "plan"]
