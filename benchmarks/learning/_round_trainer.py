"""The role of a host that takes its steps in rounds, with the exchange on its own device."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optax_ext

from . import _contestants, _trainer
from ._contestants import AXIS


class Trainer(_trainer.Trainer):
    """Trains with :func:`optax_ext.make_train_round`: H steps in a call, and nothing in between.

    Steps wait until there are H of them; those left over at the end are not taken. A round uses
    the learning rate of its last step.
    """

    DEVICES = 2

    def _mesh_of(self, workers: int) -> Mesh:
        return self._mesh_at(0)

    def _mesh_at(self, place: int) -> Mesh:
        """A mesh of the first devices of the processes, or of the second ones."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mine = devices[place :: self.DEVICES]
        # A device's local ids exist only in its own process.
        assert len({device.process_index for device in mine}) == jax.process_count() == len(mine)
        return Mesh(np.asarray(mine), (AXIS,), axis_types=(AxisType.Auto,))

    def _start(self, contestant: str, options: list | None) -> None:
        given = [tuple(option) for option in options or ()]
        make = _contestants.neighbour_over_links([x for x in given if x[0] != "beside"])[1]

        def injected(learning_rate: float) -> optax.GradientTransformation:
            return make(lambda count: learning_rate)

        tx = optax.inject_hyperparams(injected)(learning_rate=0.0)
        self._taken, self._waiting = 0, []
        self._params = self._global(self._task.init(self._seed), P())
        self._state = optax_ext.init_state(tx, self._params, self._mesh)
        self.FIRST = self._every = optax_ext.get_state(self._state).settings.every
        if contestant not in self._steps:
            self._steps[contestant] = optax_ext.make_train_round(
                self._task.loss, tx, self._mesh, exchange_mesh=self._mesh_at(1)
            )
        self._run = self._steps[contestant]

    def _placed(self, batch: Any) -> Any:
        return batch

    def _step(self, batch: Any, rate: float) -> None:
        self._waiting.append(batch)
        if len(self._waiting) < self._every:
            return
        batches = jax.tree.map(lambda *leaves: np.stack(leaves), *self._waiting)
        self._waiting = []
        self._state.hyperparams["learning_rate"] = self._global(np.float32(rate), P())
        self._params, self._state, _ = self._run(
            self._params, self._state, self._global(batches, P(None, AXIS))
        )
        jax.block_until_ready(self._params)
