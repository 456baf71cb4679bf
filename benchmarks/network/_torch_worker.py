"""One host's PyTorch process: DistributedDataParallel over Gloo, with given gradients."""

import warnings
from collections.abc import Callable
from typing import Any

from . import _protocol


def synchronous_power_sgd():
    """PyTorch's PowerSGD hook, with exchanges that end before the hook goes on.

    The hook chains futures whose callbacks start the next allreduce and wait for it. On Gloo
    they run on its own threads, where waiting blocks what is waited for, and the order of
    exchanges may differ between the workers. Here each is done when it is asked for; the
    arithmetic is the hook's own. There is no backward pass behind which it could hide.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as module

    class Done:
        def __init__(self, tensor: torch.Tensor):
            self._tensor = tensor

        def get_future(self):
            future = torch.futures.Future()
            future.set_result([self._tensor])
            return future

    class Synchronous:
        group, GradBucket = dist.group, dist.GradBucket

        @staticmethod
        def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Done:
            del async_op
            if tensor.numel():
                dist.all_reduce(tensor, group=group)
            return Done(tensor)

    module.dist = Synchronous
    return module


def register_hook(model: Any, hook: str) -> None:
    """Has a DDP module exchange its gradients in a way of PyTorch's own.

    Args:
      model: the module.
      hook: ``fp16``; ``powersgd`` with a rank, as in ``powersgd2``; or nothing, for float32.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        module = synchronous_power_sgd()
        # Compression from the second step on, and wherever it makes anything smaller.
        state = module.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(hook.removeprefix("powersgd")),
            start_powerSGD_iter=2,
            min_compression_rate=1,
        )
        model.register_comm_hook(state, module.powerSGD_hook)


class Worker:
    """One DDP module and optimizer for each hook."""

    def __init__(self, config: dict[str, Any]):
        import torch

        from ._problem import gradients

        self._torch = torch
        shapes = [tuple(shape) for shape in config["shapes"]]
        given = gradients(shapes, config["host"], config["seed"])
        self._given = [[torch.from_numpy(leaf) for leaf in gradient] for gradient in given]
        self._workers = config["workers"]
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

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.leaves = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])

            def forward(self):
                return Given.apply(*self.leaves)

        self._model = Model

    def barrier(self) -> None:
        """Returns when all workers have come here."""
        self._torch.distributed.barrier()

    def prepare(self, method: str, warmup: int) -> dict[str, Any]:
        """Makes the module, registers its hook, and takes `warmup` steps."""
        torch = self._torch
        model = torch.nn.parallel.DistributedDataParallel(
            self._model(), gradient_as_bucket_view=True
        )
        register_hook(model, method.partition("/")[2])
        self._models[method] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        # Buckets are made after the first step, and PowerSGD starts after two.
        self.take(method, max(4, warmup))
        return {"words": None}

    def take(self, method: str, steps: int) -> None:
        """Takes steps; after one nothing is left to wait for."""
        model, optimizer = self._models[method]
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            self._turn += 1

    def measure(self, method: str, steps: int) -> dict[str, Any]:
        """Seconds and bytes of so many steps."""

        def take() -> list[float]:
            self.take(method, steps)
            return []

        return _protocol.measured(self.barrier, take, steps)


def run(make: Callable[[dict[str, Any]], dict[str, Callable[..., Any]]]) -> None:
    """Joins the other processes and does what it is told; ``make(config)`` gives the commands."""
    config, answer = _protocol.start()
    import torch

    # A set-up that PyTorch advises against says so at each step.
    warnings.simplefilter("once")
    if config["pin"]:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{config['coordinator']}",
        world_size=config["workers"],
        rank=config["host"],
    )
    _protocol.serve(answer, make(config))
    torch.distributed.destroy_process_group()


def _commands(config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    worker = Worker(config)
    return {"prepare": worker.prepare, "measure": worker.measure}


if __name__ == "__main__":
    run(_commands)
