"""The selectors and the steps that are compiled for a GPU, and timed on one."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from sparse_collectives import Layout, Selector, _platform

from .._common.contestants import Contestant, find, selectors
from ._described import AXIS

__all__ = ["layout", "selectors", "steps"]
# The width of matrices as in a transformer, and the most entries of one.
_WIDTH, _MATRIX = 1024, 2**22
# The steps, and which contestants they are where that has another name.
_NAMES = ("dense", "ok_topk", "ok_topk_reuse", "topk_a", "sparse_adamw", "sparse_sgd", "gtopk")
_NAMES += ("powersgd", "agreed", "agreed_few", "spardl", "ssar_recursive_double")
_NAMES += ("ssar_split_allgather", "dsar_split_allgather")
_ARE = {"dense": "dense/leaves", "ok_topk_reuse": "ok_topk/reuse/global32"}
_ARE |= {"powersgd": "powersgd4", "agreed_few": "agreed/few"}


def steps() -> dict[str, Contestant]:
    """Every step by name, the dense baseline first."""
    return {name: find(_ARE.get(name, name)) for name in _NAMES}


def layers(size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that hold ``size`` entries: matrices, wide and tall in turn, and what is left over."""
    entries = min(_MATRIX, max(_WIDTH, size // 2))
    wide = min(4 * _WIDTH, entries)
    pair = ((entries // wide, wide), (wide, entries // wide))
    full, rest = divmod(size, math.prod(pair[0]))
    shapes: list[tuple[int, ...]] = [pair[i % 2] for i in range(full)]
    if rest >= _WIDTH:
        shapes.append((rest // _WIDTH, _WIDTH))
        rest %= _WIDTH
    return tuple([*shapes, (rest,)] if rest else shapes)


def layout(size: int) -> Layout:
    """What selectors by row and layer are told about the vector."""
    return Layout(layers(size))


def compile_selector(selector: Selector, size: int, mesh: Mesh) -> Any:
    """The program of one selection on one device."""
    whole = NamedSharding(mesh, P())
    state = jax.eval_shape(lambda: selector.init(layout(size)))
    program = jax.jit(selector.select, in_shardings=whole, out_shardings=whole)
    return program.lower(jax.ShapeDtypeStruct((size,), jnp.float32), state).compile()


def compile_step(step: Contestant, size: int, density: float, mesh: Mesh) -> Any:
    """The program of ``tx.update`` on each device of the mesh, of a vector or of matrices.

    The state is donated. Gradients are not: they are of the same program in a training step.
    """

    def shapes(*more: int) -> Any:
        made = [
            jax.ShapeDtypeStruct((*more, *shape), jnp.float32)
            for shape in (layers(size) if step.matrices else [(size,)])
        ]
        return made if step.matrices else made[0]

    workers, params = mesh.shape[AXIS], shapes()
    tx = step.make(density, AXIS)
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {AXIS: workers}), params)
    mapped = map_update(tx, state, mesh)
    with _platform.traced_for("gpu"):
        lowered = jax.jit(mapped, donate_argnums=1).lower(shapes(workers), state, params)
    return lowered.compile()


def map_update(tx: optax.GradientTransformation, state: Any, mesh: Mesh) -> Callable[..., Any]:
    """``tx.update`` on each device: of the gradients of all workers, the state and parameters."""
    specs = optax_ext.state_specs(state)

    def local(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state, params)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs))
