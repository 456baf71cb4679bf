"""The selectors and the steps that are compiled for a GPU, and timed on a device.

A step is ``tx.update`` of a vector or of the matrices of a network. Each contestant is timed as a
function of the turn, with its compiled program.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from sparse_collectives import Layout, Selector

from .._common.contestants import Contestant, find
from ._hlo import parse
from ._paths import lightest

AXIS = "data"
# Options of XLA, by name.
Compiler = dict[str, Any] | None
# The width of matrices as in a transformer, and the most entries of one.
_WIDTH, _MATRIX = 1024, 2**22
# The steps, the dense baseline first, and their contestants if those have other names.
_NAMES = ("dense", "ok_topk", "ok_topk_reuse", "topk_a", "sparse_adamw", "sparse_sgd", "gtopk")
_NAMES += (
    "powersgd",
    "quantized",
    "partitioned_topk",
    "partitioned_topk_few",
    "partitioned_topk_1_3",
    "sparse_adamw_1_3",
    "sparse_sgd_1_3",
    "spardl",
)
_NAMES += ("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
_ARE = {"dense": "dense/leaves", "ok_topk_reuse": "ok_topk/reuse/global32"}
_ARE |= {"powersgd": "powersgd4", "partitioned_topk_few": "partitioned_topk/few"}
_ARE |= {f"{name}_1_3": f"{name}, bits (1, 3)" for name in _NAMES if f"{name}_1_3" in _NAMES}
STEPS = {name: find(_ARE.get(name, name)) for name in _NAMES}
# As in a model, where the leaves of an update are parts of one vector.
STEPS["sparse_adamw_matrices"] = STEPS["sparse_adamw"]._replace(matrices=True)


def layers(size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that hold ``size`` entries: matrices, wide and tall in turn, and the remainder."""
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
    """The layout of the vector, for selectors by row and layer."""
    return Layout(layers(size))


def map_update(tx: optax.GradientTransformation, state: Any, mesh: Mesh) -> Callable[..., Any]:
    """``tx.update`` on each device, of the gradients of all workers, the state and parameters."""
    specs = optax_ext.state_specs(state)

    def local(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state, params)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs))


@dataclass
class Run:
    """A compiled program, and the call of a turn, which returns before its result is ready."""

    compiled: Any
    call: Callable[[int], Any]

    def launches(self) -> int:
        """Kernels of the lightest path, as `programs` counts them."""
        return lightest(parse(self.compiled.as_text()))["launches"]


def gradients(size: int, seed: int = 0) -> list[jax.Array]:
    """Three vectors with heavy tails, whose scale differs by layer."""
    made = []
    for key in jax.random.split(jax.random.key(seed), 3):
        body, tail, scale = jax.random.split(key, 3)
        layer = jnp.exp(jax.random.normal(scale, (32,)) / 2)
        product = jax.random.normal(body, (size,)) * jax.random.normal(tail, (size,))
        made.append(product * jnp.repeat(layer, -(-size // 32))[:size])
    return made


def stateless(
    function: Callable[[Any], Any], data: Sequence[jax.Array], compiler: Compiler = None
) -> Run:
    """A run of a function without state."""
    compiled = jax.jit(function).lower(data[0]).compile(compiler)
    return Run(compiled, lambda turn: compiled(data[turn % len(data)]))


def selection(selector: Selector, data: Sequence[jax.Array], compiler: Compiler = None) -> Run:
    """A run of a selector, which passes on its state."""

    def select(x: jax.Array, state: Any) -> tuple[Any, Any]:
        coo, state, info = selector.select(x, state)
        return (coo, info), state

    return _stepping(select, data, selector.init(layout(data[0].size)), compiler=compiler)


def step(
    made: Contestant, density: float, data: Sequence[jax.Array], compiler: Compiler = None
) -> Run:
    """``tx.update`` of one worker."""
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))
    tx, params = made.make(density, AXIS), shaped(made, jnp.zeros_like(data[0]))
    state = optax_ext.init_state(tx, params, mesh)
    stream = [jax.tree.map(lambda g: g[None], shaped(made, x)) for x in data]
    return _stepping(map_update(tx, state, mesh), stream, state, params, compiler=compiler)


def simulated(made: Contestant, density: float, data: Sequence[jax.Array], workers: int) -> Run:
    """``tx.update`` of several workers on this device, each with its share of the entries."""
    size = data[0].size // workers
    tx, params = made.make(density, AXIS), shaped(made, jnp.zeros(size, data[0].dtype))
    shared = {"axis": AXIS, "axis_size": workers}
    state = sc.simulate(tx.init, in_axes=None, **shared)(params)
    update = sc.simulate(tx.update, in_axes=(0, 0, None), **shared)
    split = jax.vmap(lambda x: shaped(made, x))
    stream = [split(x[: size * workers].reshape(workers, size)) for x in data]
    return _stepping(update, stream, state, params)


def shaped(made: Contestant, vector: jax.Array) -> Any:
    """The entries in the shapes of the contestant's gradient."""
    if not made.matrices:
        return vector
    shapes = layers(vector.size)
    ends = np.cumsum([np.prod(shape) for shape in shapes])[:-1].tolist()
    return [x.reshape(s) for x, s in zip(jnp.split(vector, ends), shapes)]


def _stepping(
    update: Callable[..., Any],
    stream: Sequence[Any],
    state: Any,
    *params: Any,
    compiler: Compiler = None,
) -> Run:
    """A run that calls ``update`` with the next element of the stream and the donated state."""
    lowered = jax.jit(update, donate_argnums=1).lower(stream[0], state, *params)
    compiled = lowered.compile(compiler)
    # The arrays of an initial state may share a buffer, which can't be donated twice.
    held = [jax.tree.map(jnp.array, state)]

    def call(turn: int) -> Any:
        out, held[0] = compiled(stream[turn % len(stream)], held[0], *params)
        return out, held[0]

    return Run(compiled, call)
