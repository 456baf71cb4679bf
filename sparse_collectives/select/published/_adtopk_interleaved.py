"""ADTopk-i: rows and whole layers take turns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat, _data
from sparse_collectives._data import Layout
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select._layerwise import LayersState, layerwise
from sparse_collectives.select._topk import topk
from sparse_collectives.select.published._adtopk import adtopk


class ADTopkInterleavedState(NamedTuple):
    """State of :func:`adtopk_interleaved`.

    Attributes:
      count: ``i32[]``, steps taken; if it is even, the step selects by row.
      rows: the state of the selection by row.
      layers: the state of the selection by layer.
    """

    count: jax.Array
    rows: LayersState
    layers: LayersState


def adtopk_interleaved(density: float, *, row_axis: int = -1) -> Selector:
    """Selects by row (:func:`adtopk`) and by layer (exact top-k) in turn.

    A selection by row trains all features, and a selection by layer sends the
    largest entries. In turn, neither slows the other down. All layers do the same in
    a step; the first step selects by row.

    Args:
      density: as in :func:`adtopk`, for each row and for each layer.
      row_axis: the axis of a layer's shape that numbers its rows.

    Returns:
      A :class:`Selector` whose ``init`` takes a :class:`sparse_collectives.Layout`, and whose state
      is an :class:`ADTopkInterleavedState`.

    Raises:
      ValueError: as :func:`adtopk`.

    Cost: the cost of :func:`adtopk` and of :func:`layerwise` with :func:`topk`, in
    turn; under ``vmap`` (in :func:`sparse_collectives.simulate`) both at each step.

    References:
      Ming et al., ADTopk, HPDC 2024, section 4.2, Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sparse_collectives as sc
      >>> selector = adtopk_interleaved(density=0.5)
      >>> state, select = selector.init(sc.Layout(((2, 2),))), jax.jit(selector.select)
      >>> acc = jnp.array([4.0, 1.0, 3.0, 2.0])
      >>> coo, state, _ = select(acc, state)
      >>> coo.indices.tolist(), select(acc, state)[0].indices.tolist()
      ([0, 3], [0, 2])
    """
    by_row = adtopk(density=density, row_axis=row_axis)
    by_layer = layerwise(topk(density=density))

    def init(size: int | Layout) -> ADTopkInterleavedState:
        return ADTopkInterleavedState(
            jnp.zeros((), jnp.int32), by_row.init(size), by_layer.init(size)
        )

    def select(acc: jax.Array, state: ADTopkInterleavedState):
        # The state varies over the workers; one made in the mapped function lacks that type.
        state = _compat.varying_like(state, acc)
        capacity = max(
            jax.eval_shape(selector.select, acc, old)[0].capacity
            for selector, old in ((by_row, state.rows), (by_layer, state.layers))
        )

        def rows():
            coo, new, info = by_row.select(acc, state.rows)
            return _data.widen(coo, capacity), new, state.layers, info

        def layers():
            coo, new, info = by_layer.select(acc, state.layers)
            return _data.widen(coo, capacity), state.rows, new, info

        coo, row_state, layer_state, info = lax.cond(state.count % 2 == 0, rows, layers)
        return coo, ADTopkInterleavedState(state.count + 1, row_state, layer_state), info

    return Selector(
        init, select, spec=Spec.of("adtopk_interleaved", density=density, row_axis=row_axis)
    )
