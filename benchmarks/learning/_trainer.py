"""The role of a host that trains a real model with its own gradients, over Gloo."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext

from .._common.worker import barrier, measured
from ..training._simulated_training import order_of
from . import _contestants, _tasks
from ._contestants import AXIS, Make


class Learner:
    """A worker of any framework: its task, and the contestant that has begun.

    Subclasses define how to start, how to place a batch and take a step, and the whole parameters
    in the form of the JAX model.
    """

    # Steps after which everything is compiled.
    FIRST = 1

    def __init__(self, config: dict[str, Any]):
        files = (Path(path) if path else None for path in (config["text"], config["images"]))
        self._task = _tasks.make(config["task"], config["width"], *files)
        self._host, self._batch = config["host"], config["batch"]
        self._examples = self._batch // config["workers"]
        self._params: Any = None
        self._seed = self._taken = 0

    def begin(self, contestant: str, options: list | None, seed: int, warmup: int) -> Any:
        """Compiles, takes steps that do not count, and starts again; returns a step's seconds."""
        self._seed = seed
        self._start(contestant, options)
        self.take([1e-3] * self.FIRST)
        seconds = self.take([1e-3] * warmup)["seconds"]
        self._start(contestant, options)
        params = jax.tree.leaves(self._task.init(0))
        return {"seconds": seconds, "size": sum(leaf.size for leaf in params)}

    def take(self, rates: list[float]) -> dict[str, Any]:
        """Takes a step with each of the learning rates; the mean seconds and bytes of a step."""
        end = self._taken + len(rates)
        # A longer order begins as a shorter one does.
        order = order_of(self._task, steps=end, batch=self._batch, seed=self._seed)
        mine = order[self._taken :, self._host * self._examples :][:, : self._examples]
        # Placed here, since the reading of data is not measured.
        batches = [self._placed(self._task.batch_of(chosen)) for chosen in mine]

        def steps() -> None:
            for batch, rate in zip(batches, rates, strict=True):
                self._step(batch, rate)

        self._taken = end
        return measured(self.barrier, steps, len(rates))

    def evaluate(self) -> dict[str, Any]:
        """The value of the parameters, computed by one worker since all have the same."""
        return {"value": None if self._host else self._task.evaluate(self._whole())}


class Trainer(Learner):
    """Trains with JAX: a compiled step of each contestant."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._mesh = self._mesh_of(config["workers"])
        self.barrier = barrier(self._mesh)
        self._steps: dict[str, Any] = {}

    def _mesh_of(self, workers: int) -> Mesh:
        return jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,))

    def _start(self, contestant: str, options: list | None) -> None:
        if options is not None:
            make = _contestants.neighbour_over_links([tuple(option) for option in options])[1]
        else:
            known = _contestants.over_links().values()
            make = next(group[contestant] for group in known if contestant in group)
        self._taken = 0
        self._params = self._global(self._task.init(self._seed), P())
        self._state = optax_ext.init_state(make(lambda count: 0.0), self._params, self._mesh)
        if contestant not in self._steps:
            self._steps[contestant] = self._compiled(make)
        self._run = self._steps[contestant]

    def _compiled(self, make: Make) -> Any:
        specs = optax_ext.state_specs(self._state)

        def step(params, state, batch, rate):
            gradients = jax.grad(self._task.loss)(optax_ext.ahead(params, state), batch)
            # The learning rate is an argument, so that one program serves all rates and budgets.
            updates, state = make(lambda count: rate).update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        mapped = jax.shard_map(
            step, mesh=self._mesh, in_specs=(P(), specs, P(AXIS), P()), out_specs=(P(), specs)
        )
        return jax.jit(mapped, donate_argnums=(0, 1))

    def _placed(self, batch: Any) -> Any:
        return jax.block_until_ready(self._global(batch, P(AXIS)))

    def _step(self, batch: Any, rate: float) -> None:
        self._params, self._state = self._run(self._params, self._state, batch, rate)
        jax.block_until_ready(self._params)

    def _whole(self) -> Any:
        return jax.tree.map(lambda x: jax.numpy.asarray(x.addressable_data(0)), self._params)

    def _global(self, tree: Any, spec: P) -> Any:
        where, place = NamedSharding(self._mesh, spec), jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: place(where, np.asarray(x)), tree)
