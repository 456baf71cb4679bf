"""Which allreduce is fastest for a model, a network and a number of workers.

``python -m sparse_collectives plan`` prints the result of :func:`plan`, and the predicted steps of
complete optimizers.
"""

from sparse_collectives.planner._allreduces import plan
from sparse_collectives.planner._auto import auto
from sparse_collectives.planner._ways import LocalCost

__all__ = ["LocalCost", "auto", "plan"]
