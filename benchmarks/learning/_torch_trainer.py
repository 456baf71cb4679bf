"""The training of `_trainer` by PyTorch's DistributedDataParallel, with the same networks."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from .._common.contestants import DECAY
from ..network._torch import Model, parallel
from ..training._small_models import HEADS
from ..training._text_models import BEFORE, FOUND, GROUPS, MEMBERS
from ._contestants import TORCH
from ._trainer import Learner

Loss = Callable[[Any, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]


def words(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of `_text_models.words`."""
    inputs, labels = batch[0], batch[1][:, BEFORE - 1 :]
    x = functional.embedding(inputs, params["embedding"])
    x = torch.cat([x[:, i : i + FOUND] for i in range(BEFORE)], dim=-1)
    x = _affine(params["state"], _gelu(_affine(params["hidden"], x)))
    group, member = labels // MEMBERS, labels % MEMBERS
    # A lookup: the gradient of an index with several dimensions is slow.
    rows = functional.embedding(group, params["members"].reshape(GROUPS, -1))
    inside = torch.einsum("bfmw,bfw->bfm", rows.unflatten(-1, (MEMBERS, -1)), x)
    return _score(_affine(params["group"], x), group) + _score(inside, member)


def transformer(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of `_small_models.transformer`."""
    tokens, labels = batch
    x = functional.embedding(tokens, params["embedding"]) + params["position"][: tokens.shape[1]]
    for block in params["blocks"]:
        heads = _affine(block["qkv"], _normed(block["norm_0"], x))
        query, key, value = heads.unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + _affine(block["mix"], mixed.transpose(1, 2).flatten(2))
        x = x + _affine(block["down"], _gelu(_affine(block["up"], _normed(block["norm_1"], x))))
    return _score(_affine(params["output"], _normed(params["norm"], x)), labels)


# By the name of a task.
LOSSES: dict[str, Loss] = {"words": words, "text": transformer}


def _affine(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(layer["bias"], x.flatten(0, -2), layer["kernel"]).unflatten(0, x.shape[:-1])


def _gelu(x: torch.Tensor) -> torch.Tensor:
    # The default of jax.nn.gelu.
    return functional.gelu(x, approximate="tanh")


def _normed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], layer["scale"], layer["bias"])


def _score(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    places = math.prod(labels.shape)
    return functional.cross_entropy(logits.reshape(places, -1), labels.reshape(-1))


class Trainer(Learner):
    """Trains with PyTorch: the module of a contestant, and AdamW."""

    TORCH = True
    # Buckets are made after the first step, and PowerSGD starts after two.
    FIRST = 4
    barrier = staticmethod(torch.distributed.barrier)

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._loss = LOSSES[config["task"]]

    def _start(self, contestant: str, options: list | None) -> None:
        del options
        leaves, self._tree = jax.tree.flatten(self._task.init(self._seed))
        leaves = [torch.from_numpy(np.array(leaf)) for leaf in leaves]

        def loss(leaves: list[torch.Tensor], batch: Any) -> torch.Tensor:
            return self._loss(self._tree.unflatten(leaves), batch)

        self._params = parallel(Model(leaves, loss), TORCH[contestant])
        self._optimizer = torch.optim.AdamW(
            self._params.parameters(), weight_decay=DECAY, fused=True
        )
        self._taken = 0

    def _placed(self, batch: Any) -> Any:
        # Labels of PyTorch's cross-entropy have 64 bits.
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
