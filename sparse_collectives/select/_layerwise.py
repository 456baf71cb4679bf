"""Applies any selector layer by layer."""

import math

import jax

from sparse_collectives import _validation
from sparse_collectives._data import Layout, as_layout
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select._shared import _layers


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
      A :class:`Selector` whose ``init`` takes a
      :class:`sparse_collectives.Layout`; :func:`optax_ext.sparse_allreduce` passes
      the layout of the parameters. Given a number of entries, it selects as
      ``selector`` does. A layer of fewer than 1 / density entries sends one entry, so
      a model with many small layers selects somewhat more than ``density * n``.

    Cost: the cost of ``selector`` for each layer. Layers of the same size share one
    compiled loop.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sparse_collectives as sc
      >>> selector = layerwise(sc.select.topk(density=0.25))
      >>> state = selector.init(sc.Layout(((2, 2), (4,))))
      >>> acc = jnp.array([9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4])
      >>> jax.jit(selector.select)(acc, state)[0].indices.tolist()
      [0, 7]
    """

    def init(size: int | Layout) -> _layers.LayersState:
        # Only the sizes matter, so layers of one size share a program.
        flat = Layout(tuple((length,) for length in as_layout(size).sizes))
        return _layers.init_layers(
            flat, lambda shape: selector.init(math.prod(shape)), selector.apart
        )

    def select(acc: jax.Array, state: _layers.LayersState):
        def of_layer(layer, shape, state):
            del shape
            coo, state, info = selector.select(layer, state)
            return coo.indices, state, info

        return _layers.select_layers(_validation.as_vector("acc", acc), state, of_layer)

    return Selector(init, select, spec=Spec.of("layerwise", selector=selector))
