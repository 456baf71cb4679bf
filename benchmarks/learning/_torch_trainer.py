"""The training of `_trainer` by PyTorch's DistributedDataParallel."""

from typing import Any

import jax
import numpy as np
import torch

from .._common.contestants import DECAY
from ..network._torch import parallel
from ._contestants import TORCH
from ._torch_models import LOSSES
from ._trainer import Learner


class Model(torch.nn.Module):
    """The leaves of the JAX model's tree, and its loss."""

    def __init__(self, leaves: list[Any], tree: Any, task: str):
        super().__init__()
        self.leaves = torch.nn.ParameterList(torch.from_numpy(np.array(leaf)) for leaf in leaves)
        self._tree, self._loss = tree, LOSSES[task]

    def forward(self, batch: Any) -> Any:
        """The loss of the batch."""
        return self._loss(self._tree.unflatten(list(self.leaves)), batch)


class Trainer(Learner):
    """With PyTorch: the module of a contestant, and AdamW."""

    TORCH = True
    # Buckets are made after the first step, and PowerSGD starts after two.
    FIRST = 4
    barrier = staticmethod(torch.distributed.barrier)

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._name = config["task"]
        self._tree = self._optimizer = None

    def _start(self, contestant: str, options: list | None) -> None:
        del options
        leaves, self._tree = jax.tree.flatten(self._task.init(self._seed))
        self._params = parallel(Model(leaves, self._tree, self._name), TORCH[contestant])
        self._optimizer = torch.optim.AdamW(
            self._params.parameters(), weight_decay=DECAY, fused=True
        )
        self._taken = 0

    def _placed(self, batch: Any) -> Any:
        # Labels of PyTorch's cross-entropy are of 64 bits.
        return tuple(torch.from_numpy(x).long() for x in batch)

    def _step(self, batch: Any, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        self._params(batch).backward()
        self._optimizer.step()

    def _whole(self) -> Any:
        leaves = [leaf.detach().numpy() for leaf in self._params.parameters()]
        return self._tree.unflatten(leaves)
