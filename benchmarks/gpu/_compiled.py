"""Selectors and steps, compiled for described GPUs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from sparse_collectives import Selector, extend

from ._contestants import Step, gradient, layout
from ._described import AXIS
from ._hlo import parse
from ._paths import Paths


def compile_selector(selector: Selector, size: int, mesh: Mesh) -> Any:
    """The program of one selection on one device."""
    whole = NamedSharding(mesh, P())
    state = jax.eval_shape(lambda: selector.init(layout(size)))
    program = jax.jit(selector.select, in_shardings=whole, out_shardings=whole)
    return program.lower(jax.ShapeDtypeStruct((size,), jnp.float32), state).compile()


def compile_step(step: Step, size: int, density: float, mesh: Mesh) -> Any:
    """The program of ``tx.update`` on each device of the mesh.

    The state is donated. Gradients are not: they are of the same program in a training step.
    """
    workers = mesh.shape[AXIS]
    tx = step.made(density, AXIS)
    params = gradient(step, size)
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {AXIS: workers}), params)
    mapped = map_update(tx, state, mesh)
    gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), params)
    with extend.traced_for("gpu"):
        lowered = jax.jit(mapped, donate_argnums=1).lower(gradients, state, params)
    return lowered.compile()


def map_update(tx: optax.GradientTransformation, state: Any, mesh: Mesh) -> Callable[..., Any]:
    """``tx.update`` on each device: of the gradients of all workers, the state and parameters."""
    specs = optax_ext.state_specs(state)

    def local(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state, params)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs))


def row(name: str, compiled: Any) -> dict[str, Any]:
    """What the gauge reads from a compiled program, the lightest path before the heaviest."""
    paths = Paths(parse(compiled.as_text()))
    steady, heaviest = paths.lightest(), paths.heaviest()
    return {
        "program": name,
        "launches": [steady.launches, heaviest.launches],
        "touched_bytes": [steady.touched, heaviest.touched],
        "moved_bytes": [steady.moved, heaviest.moved],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "waits": steady.waits,
        "collectives": [steady.collectives, paths.collectives()],
        "sorts": steady.sorts,
    }
