"""Selection by layer, for every selector.

Layers of the same shape share one program, a scan over them, so that a model of a
hundred layers compiles as fast as one layer of each distinct shape.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._sparse_ops import _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector, State

# Returns the places selected in a layer, in any order, with the layer's size in empty
# slots; the layer's new state; and the info of the selection.
OfLayer = Callable[[jax.Array, tuple[int, ...], Any], tuple[jax.Array, State, SelectInfo]]


class LayersState(NamedTuple):
    """State of a selection by layer.

    Attributes:
      states: for each distinct shape, the states of the layers that have it, with
        a leading axis over them.
      layout: the shapes of all layers; static.
    """

    states: tuple[State, ...]
    layout: Layout


def layerwise(selector: Selector) -> Selector:
    """Selects from each layer separately: k of each layer instead of k of all entries.

    Layers with small gradients send as large a share as the others. DGC, RedSync,
    SIDCo and ADTopk select in this way, while Ok-Topk selects from all layers
    together. Every selector can be used in both ways.

    Args:
      selector: a selector of :mod:`sparse_collectives.select`. Its density applies to
        each layer, and each layer has its own state. If it draws random indices,
        layers of the same size draw different ones.

    Returns:
      A :class:`Selector` whose ``init`` takes a :class:`sparse_collectives.Layout`;
      :func:`optax_ext.sparse_allreduce` passes the layout of the parameters. Given a number of
      entries, it selects as ``selector`` does. A layer of fewer than 1 / density entries sends one
      entry, so a model with many small layers selects somewhat more than ``density * n``.

    Cost: the cost of ``selector`` for each layer. Layers of the same size share one compiled loop.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sparse_collectives as sc
      >>> selector = layerwise(sc.select.topk(density=0.25))
      >>> state = selector.init(sc.Layout(((2, 2), (4,))))
      >>> acc = jnp.array([9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4])
      >>> jax.jit(selector.select)(acc, state)[0].indices.tolist()
      [0, 7]
    """

    def init(size: int | Layout) -> LayersState:
        # Only the sizes matter, so layers of one size share a program.
        flat = Layout(tuple((length,) for length in as_layout(size).sizes))
        return init_layers(flat, lambda shape: selector.init(math.prod(shape)), selector.fork)

    def select(acc: jax.Array, state: LayersState):
        def of_layer(layer, shape, state):
            del shape
            coo, state, info = selector.select(layer, state)
            return coo.indices, state, info

        return select_layers(_validation.as_vector("acc", acc), state, of_layer)

    return Selector(init, select, spec=Spec.of("layerwise", selector=selector))


def init_layers(
    layout: Layout,
    of_shape: Callable[[tuple[int, ...]], State],
    fork: Callable[[State, jax.Array], State] | None = None,
) -> LayersState:
    """The states before the first step.

    Args:
      layout: the shapes of all layers.
      of_shape: returns the initial state of a layer of a shape.
      fork: ``fork(state, i32[])`` returns the state of the layer with that number among the
        layers of its shape, as :attr:`Selector.fork` does. None: all of them have the same.
    """
    states = []
    for shape, offsets in _same_shape(layout):
        number = len(offsets)
        state = of_shape(shape)
        stack = lambda x, number=number: jnp.broadcast_to(x[None], (number, *x.shape))  # noqa: E731
        stacked = jax.tree.map(stack, state)
        if fork is not None:
            stacked = jax.vmap(fork)(stacked, jnp.arange(number, dtype=jnp.int32))
        states.append(stacked)
    return LayersState(tuple(states), layout)


def select_layers(
    acc: jax.Array, state: LayersState, of_layer: OfLayer, capacity: int | None = None
) -> tuple[PaddedCOO, LayersState, SelectInfo]:
    """Selects from each layer separately.

    Args:
      acc: ``f[n]``.
      state: from :func:`init_layers`.
      of_layer: ``of_layer(layer f[m], shape, state)``.
      capacity: slots of the result, if the layers cannot fill all of theirs. None: as
        many as all layers have.

    Returns:
      As ``Selector.select``. The threshold is the smallest threshold of a layer.

    Cost: the cost of ``of_layer``, a copy of each layer that shares its shape, and
    O(k) to put the indices in order.
    """
    size = state.layout.size
    if acc.shape[0] != size:
        raise ValueError(
            f"acc has {acc.shape[0]} entries, but init was called with a layout of {size}: "
            f"{state.layout.shapes}. Call init with the layout of this buffer."
        )
    indices, states, infos = [], [], []
    for (shape, offsets), old in zip(_same_shape(state.layout), state.states, strict=True):
        places, new, info = _select_same_shape(acc, shape, offsets, old, of_layer)
        length = math.prod(shape)
        start = jnp.asarray(offsets, jnp.int32)[:, None]
        indices.append(jnp.where(places < length, start + places, size).ravel())
        states.append(new)
        infos.append(info)
    places = jnp.concatenate(indices)
    slots = places.size if capacity is None else capacity
    coo, count = _compaction.compact_indices(acc, places, capacity=slots)
    info = SelectInfo(
        selected=count,
        overflow=jnp.sum(jnp.concatenate([i.overflow for i in infos]), dtype=jnp.int32),
        threshold=jnp.min(jnp.concatenate([i.threshold for i in infos])),
    )
    return coo, LayersState(tuple(states), state.layout), info


def _select_same_shape(acc, shape, offsets, states, of_layer: OfLayer):
    """Results of the layers of one shape, each with a leading axis over them."""
    length = math.prod(shape)
    if len(offsets) == 1:
        layer = acc[offsets[0] : offsets[0] + length]
        one = of_layer(layer, shape, jax.tree.map(lambda x: x[0], states))
        return jax.tree.map(lambda x: x[None], one)

    def step(_, layer):
        offset, state = layer
        here = lax.dynamic_slice_in_dim(acc, offset, length)
        return None, of_layer(here, shape, state)

    return lax.scan(step, None, (jnp.asarray(offsets, jnp.int32), states))[1]


def _same_shape(layout: Layout) -> list[tuple[tuple[int, ...], list[int]]]:
    """The distinct shapes, and the offsets of the layers that have each."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for shape, size, offset in zip(layout.shapes, layout.sizes, layout.offsets, strict=True):
        if size:
            groups.setdefault(shape, []).append(offset)
    return list(groups.items())
