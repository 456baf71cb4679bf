"""The role of a host whose JAX process takes data-parallel steps with given gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives

from .._common import contestants
from .._common.worker import Stepper, barrier
from . import _volumes
from ._problem import gradients

AXIS = "workers"
# So many gradients are enough if each takes memory of its own.
_COPIED = 4


class Worker(Stepper):
    """The steps of all methods over one mesh, compiled on demand."""

    def __init__(self, config: dict[str, Any]):
        self._density = config["density"]
        self._shapes = [tuple(shape) for shape in config["shapes"]]
        self._given = gradients(self._shapes, config["host"], config["seed"])
        auto = {"axis_types": (AxisType.Auto,)}
        self._everyone = jax.make_mesh((config["workers"],), (AXIS,), **auto)
        self._alone = jax.make_mesh((1,), (AXIS,), devices=jax.local_devices(), **auto)
        self.barrier = barrier(self._everyone)
        self._mesh = self._parameters = self._data = None
        # A compiled step and its state; the parameters are common to all methods.
        self._steps: dict[str, tuple[Any, Any]] = {}
        self._turn = 0

    def _use(self, mesh: Any) -> None:
        """Places parameters and gradients on a mesh, and drops those on another."""
        if mesh is self._mesh:
            return
        self._steps.clear()
        self._parameters = self._data = None
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        make = jax.jit(lambda: [jnp.zeros(s) for s in self._shapes], out_shardings=whole)
        self._parameters = make()
        self._data = []
        for gradient in self._given:
            placed = [jax.make_array_from_process_local_data(split, x[None]) for x in gradient]
            self._data.append(placed)
            address = placed[0].addressable_data(0).unsafe_buffer_pointer()
            if len(self._data) == _COPIED and address != gradient[0].ctypes.data:
                # On this mesh they are copies, and more of them would fill the memory.
                break
        self._mesh = mesh

    def prepare(self, method: str, warmup: int, local: bool = False) -> dict[str, Any]:
        """Compiles the step of a method, takes `warmup` of them; the words each should receive."""
        self._use(self._alone if local else self._everyone)
        contestant = contestants.find(method)
        density = min(1.0, contestant.entries * self._density)
        tx = contestants.optimizer(method, density, AXIS)
        state = optax_ext.init_state(tx, self._parameters, self._mesh)
        specs = optax_ext.state_specs(state)

        def step(parameters, state, given):
            gradients = [leaf[0] for leaf in given]
            if contestant.whole:
                # The given gradients do not depend on `ahead`. The smallest one is made to, so that
                # the look-ahead is computed in full, without a pass that a model would not make.
                ahead = optax_ext.ahead(parameters, state)
                least = min(range(len(gradients)), key=lambda i: gradients[i].size)
                gradients[least] += 1e-12 * sum(jnp.ravel(x)[0] for x in ahead)
            updates, state = tx.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state

        mapped = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(P(), specs, P(AXIS)),
            out_specs=(P(), specs),
            # With one worker no output has to be equal on all workers.
            check_vma=not local and not contestant.alone,
        )
        jitted = jax.jit(mapped, donate_argnums=(0, 1))
        traced = jitted.trace(self._parameters, state, self._data[0])
        words = _volumes.extremes(traced)
        self._steps[method] = traced.lower().compile(), state
        self._take(method, warmup)
        return {"words": words}

    def drop(self, method: str) -> dict[str, Any]:
        """Frees the state of a method."""
        del self._steps[method]
        return {}

    def _take(self, method: str, steps: int) -> list[float]:
        """Takes steps, each waited for; returns the words that each has received."""
        run, state = self._steps[method]
        received = []
        for _ in range(steps):
            given = self._data[self._turn % len(self._data)]
            self._parameters, state = run(self._parameters, state, given)
            jax.block_until_ready(self._parameters)
            self._turn += 1
            info = optax_ext.get_info(state)
            if info is not None:
                received.append(float(info.words))
        self._steps[method] = run, state
        return received

    def latency(self, sizes: list[int], rounds: int) -> dict[str, Any]:
        """Alpha and beta of this network, as the library fits them."""
        found = sparse_collectives.measure(self._everyone, sizes=sizes, rounds=rounds)
        # JSON has no infinity.
        bandwidth = found.bandwidth if math.isfinite(found.bandwidth) else None
        kept = {name: getattr(found, name) for name in ("latency", "error", "spread")}
        return kept | {"bandwidth": bandwidth}
