"""One host's process: training of a real model, with gradients of its own, over Gloo."""

from pathlib import Path
from typing import Any

from ..network import _gloo, _protocol


class Trainer:
    """What one worker has: the task, and a compiled step of each contestant."""

    def __init__(self, config: dict[str, Any]):
        import jax
        from jax.sharding import AxisType, NamedSharding
        from jax.sharding import PartitionSpec as P

        from . import _tasks
        from ._over_links import AXIS

        files = (Path(path) if path else None for path in (config["text"], config["images"]))
        self._task = _tasks.make(config["task"], config["width"], *files)
        self._host, self._batch = config["host"], config["batch"]
        self._examples = self._batch // config["workers"]
        auto = (AxisType.Auto,)
        self._mesh = jax.make_mesh((config["workers"],), (AXIS,), axis_types=auto)
        self._whole, self._split = (
            NamedSharding(self._mesh, P()),
            NamedSharding(self._mesh, P(AXIS)),
        )
        self._barrier = _gloo.barrier(self._mesh)
        self._steps: dict[str, Any] = {}
        self._run = self._params = self._state = None
        self._seed = self._taken = 0
        self._barrier()

    def begin(self, options: list | None, contestant: str, seed: int, warmup: int) -> Any:
        """Compiles, takes steps that do not count, and begins anew; what a step takes."""
        import jax

        self._seed = seed
        tx = self._made(options, contestant)(lambda count: 0.0)
        self._start(tx)
        if contestant not in self._steps:
            self._steps[contestant] = self._compiled(self._made(options, contestant))
        self._run = self._steps[contestant]
        self.take([1e-3])
        seconds = self.take([1e-3] * warmup)["seconds"]
        self._start(tx)
        size = sum(leaf.size for leaf in jax.tree.leaves(self._params))
        return {"seconds": seconds, "size": size}

    def take(self, rates: list[float]) -> dict[str, Any]:
        """A step with each of the rates; seconds and bytes of a step, in the mean."""
        import jax

        # The reading of data is not what is measured.
        batches = [self._global(batch, self._split) for batch in self._chosen(len(rates))]
        jax.block_until_ready(batches)

        def steps() -> list[float]:
            for batch, rate in zip(batches, rates, strict=True):
                self._params, self._state = self._run(self._params, self._state, batch, rate)
                jax.block_until_ready(self._params)
            return []

        self._taken += len(rates)
        return _protocol.measured(self._barrier, steps, len(rates))

    def evaluate(self) -> dict[str, Any]:
        """The value of the parameters, which all have: one of them finds it."""
        import jax

        if self._host:
            return {"value": None}
        params = jax.tree.map(lambda x: jax.numpy.asarray(x.addressable_data(0)), self._params)
        return {"value": self._task.evaluate(params)}

    def _made(self, options: list | None, contestant: str) -> Any:
        from . import _over_links

        if options is not None:
            return _over_links.neighbour([tuple(option) for option in options])[1]
        groups = _over_links.contestants, _over_links.in_buckets, _over_links.with_norms
        return {name: made for group in groups for name, made in group().items()}[contestant]

    def _start(self, tx: Any) -> None:
        """The first parameters and a new state."""
        import optax_ext

        self._params = self._global(self._task.init(self._seed), self._whole)
        self._state = optax_ext.init_state(tx, self._params, self._mesh)
        self._taken = 0

    def _compiled(self, make: Any) -> Any:
        import jax
        import optax
        from jax.sharding import PartitionSpec as P

        import optax_ext

        from ._over_links import AXIS

        specs = optax_ext.state_specs(self._state)

        def step(params, state, batch, rate):
            gradients = jax.grad(self._task.loss)(optax_ext.ahead(params, state), batch)
            # The rate comes from outside, so that one program serves all rates and budgets.
            updates, state = make(lambda count: rate).update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        mapped = jax.shard_map(
            step, mesh=self._mesh, in_specs=(P(), specs, P(AXIS), P()), out_specs=(P(), specs)
        )
        return jax.jit(mapped, donate_argnums=(0, 1))

    def _chosen(self, steps: int) -> list[Any]:
        """This worker's examples of the next steps."""
        from ..training._simulated_training import order_of

        end = self._taken + steps
        # A longer order begins as a shorter one does.
        order = order_of(self._task, steps=end, batch=self._batch, seed=self._seed)
        mine = order[self._taken :, self._host * self._examples :][:, : self._examples]
        return [self._task.batch_of(chosen) for chosen in mine]

    def _global(self, tree: Any, sharding: Any) -> Any:
        import jax
        import numpy as np

        def placed(x):
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(placed, tree)


def main() -> None:
    """Joins the other processes and does what it is told."""
    config, answer = _protocol.start()
    _gloo.join(config)
    trainer = Trainer(config)
    commands = {"begin": trainer.begin, "take": trainer.take, "evaluate": trainer.evaluate}
    _protocol.serve(answer, commands)


if __name__ == "__main__":
    main()
