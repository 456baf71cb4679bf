"""One host's PyTorch process: the training of `_trainer` by DistributedDataParallel over Gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..network import _protocol
from ..network._torch_worker import register_hook, run


class Trainer:
    """What one worker has: the task, and the module of a contestant."""

    def __init__(self, config: dict[str, Any]):
        import torch

        from . import _tasks
        from ._torch_models import LOSSES

        loss = LOSSES[config["task"]]
        files = (Path(path) if path else None for path in (config["text"], config["images"]))
        self._torch = torch
        self._task = _tasks.make(config["task"], config["width"], *files)
        self._host, self._batch = config["host"], config["batch"]
        self._examples = self._batch // config["workers"]
        self._model = self._optimizer = self._tree = None
        self._seed = self._taken = 0

        class Model(torch.nn.Module):
            """The leaves of the JAX model's tree, and its loss."""

            def __init__(self, leaves: list[Any], tree: Any):
                super().__init__()
                self.leaves = torch.nn.ParameterList(torch.from_numpy(leaf) for leaf in leaves)
                self.tree = tree

            def forward(self, batch: Any) -> Any:
                return loss(self.tree.unflatten(list(self.leaves)), batch)

        self._module = Model

    def begin(self, options: None, contestant: str, seed: int, warmup: int) -> Any:
        """Makes the module, takes steps that do not count, and begins anew; what a step takes."""
        del options
        self._seed = seed
        self._start(contestant)
        # Buckets are made after the first step, and PowerSGD starts after two.
        self.take([1e-3] * 4)
        seconds = self.take([1e-3] * warmup)["seconds"]
        self._start(contestant)
        size = sum(leaf.numel() for leaf in self._model.parameters())
        return {"seconds": seconds, "size": size}

    def take(self, rates: list[float]) -> dict[str, Any]:
        """A step with each of the rates; seconds and bytes of a step, in the mean."""
        batches = self._chosen(len(rates))

        def steps() -> list[float]:
            for batch, rate in zip(batches, rates, strict=True):
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                self._optimizer.zero_grad()
                self._model(batch).backward()
                self._optimizer.step()
            return []

        self._taken += len(rates)
        return _protocol.measured(self._torch.distributed.barrier, steps, len(rates))

    def evaluate(self) -> dict[str, Any]:
        """The value of the parameters, found as that of the JAX contestants is."""
        if self._host:
            return {"value": None}
        leaves = [leaf.detach().numpy() for leaf in self._model.parameters()]
        return {"value": self._task.evaluate(self._tree.unflatten(leaves))}

    def _start(self, contestant: str) -> None:
        """The first parameters, and a new state of the hook and of AdamW."""
        import jax
        import numpy as np

        from ._contestants import DECAY
        from ._over_links import TORCH

        leaves, self._tree = jax.tree.flatten(self._task.init(self._seed))
        module = self._module([np.array(leaf) for leaf in leaves], self._tree)
        parallel = self._torch.nn.parallel.DistributedDataParallel
        self._model = parallel(module, gradient_as_bucket_view=True)
        register_hook(self._model, TORCH[contestant])
        self._optimizer = self._torch.optim.AdamW(
            self._model.parameters(), weight_decay=DECAY, fused=True
        )
        self._taken = 0

    def _chosen(self, steps: int) -> list[Any]:
        """This worker's examples of the next steps, those of `_trainer`."""
        from ..training._simulated_training import order_of

        end = self._taken + steps
        order = order_of(self._task, steps=end, batch=self._batch, seed=self._seed)
        mine = order[self._taken :, self._host * self._examples :][:, : self._examples]
        batches = (self._task.batch_of(chosen) for chosen in mine)
        # Labels of PyTorch's cross-entropy are of 64 bits.
        return [tuple(self._torch.from_numpy(x).long() for x in batch) for batch in batches]


def _commands(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    trainer = Trainer(config)
    return {"begin": trainer.begin, "take": trainer.take, "evaluate": trainer.evaluate}


if __name__ == "__main__":
    run(_commands)
