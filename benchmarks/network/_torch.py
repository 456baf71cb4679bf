"""The role of a host whose PyTorch process takes steps of DDP over Gloo, with given gradients."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from .._common.worker import Stepper
from ._problem import gradients


class _Synchronous:
    """Replaces `torch.distributed` in PyTorch's PowerSGD hook: each exchange ends in its call.

    The hook chains futures whose callbacks start the next allreduce and wait for it. On Gloo
    they run on its own threads, where waiting would block the allreduce itself, and the order of
    exchanges may differ between the workers. The arithmetic is the hook's own. There is no
    backward pass with which the exchange could overlap.
    """

    group, GradBucket = dist.group, dist.GradBucket

    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        del async_op
        if tensor.numel():
            dist.all_reduce(tensor, group=group)
        ended = torch.futures.Future()
        ended.set_result([tensor])
        return SimpleNamespace(get_future=lambda: ended)


def parallel(model: torch.nn.Module, contestant: str) -> DistributedDataParallel:
    """The module, with gradients exchanged by the hook after the slash of the name."""
    made = DistributedDataParallel(model, gradient_as_bucket_view=True)
    hook = contestant.partition("/")[2]
    if hook == "fp16":
        made.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        power_sgd.dist = _Synchronous
        # Compression from the second step on, and wherever it makes anything smaller.
        state = power_sgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(hook.removeprefix("powersgd")),
            start_powerSGD_iter=2,
            min_compression_rate=1,
        )
        made.register_comm_hook(state, power_sgd.powerSGD_hook)
    return made


class Model(torch.nn.Module):
    """Parameters, and a loss of them and of the arguments of a call."""

    def __init__(self, leaves: Sequence[torch.Tensor], loss: Callable[..., torch.Tensor]):
        super().__init__()
        self.leaves, self._loss = torch.nn.ParameterList(leaves), loss

    def forward(self, *batch: Any) -> torch.Tensor:
        """The loss."""
        return self._loss(list(self.leaves), *batch)


class Worker(Stepper):
    """One DDP module and optimizer for each hook."""

    TORCH = True
    barrier = staticmethod(dist.barrier)

    def __init__(self, config: dict[str, Any]):
        self._shapes = [tuple(shape) for shape in config["shapes"]]
        given = gradients(self._shapes, config["host"], config["seed"])
        self._given = [[torch.from_numpy(leaf) for leaf in gradient] for gradient in given]
        self._models: dict[str, Any] = {}
        self._turn = 0
        worker = self

        class Given(torch.autograd.Function):
            """A loss whose gradient is the next given one, at no cost."""

            @staticmethod
            def forward(ctx, *parameters):
                del ctx
                return parameters[0].new_zeros(())

            @staticmethod
            def backward(ctx, upstream):
                del ctx, upstream
                return tuple(worker._given[worker._turn % len(worker._given)])

        self._loss = lambda leaves: Given.apply(*leaves)

    def prepare(self, method: str, warmup: int) -> dict[str, Any]:
        """Makes the module with its hook, and takes `warmup` steps."""
        zeros = [torch.zeros(shape) for shape in self._shapes]
        model = parallel(Model(zeros, self._loss), method)
        self._models[method] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        # Buckets are made after the first step, and PowerSGD starts after two.
        self._take(method, max(4, warmup))
        return {"words": None}

    def _take(self, method: str, steps: int) -> None:
        """Takes steps, each of which is complete when its calls return."""
        model, optimizer = self._models[method]
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            self._turn += 1
