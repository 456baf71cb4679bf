"""ADTopk: every row of every layer sends its largest entries.

Ming et al. call the rows of a layer's matrix its dimensions. A top-k of the whole layer leaves many
of them out, and the features that they represent are not trained. Here each row sends its share,
and at least one entry. In ADTopk-i rows and whole layers take turns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _data, _validation, _varying
from sparse_collectives._data import Layout, as_layout, rows_of_layer
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.select import _rows
from sparse_collectives.select._layerwise import LayersState, init_layers, layerwise, select_layers
from sparse_collectives.select._topk import topk


def adtopk(density: float, *, row_axis: int = -1) -> Selector:
    r"""Selects the ``max(1, round(density * N))`` largest entries of each of a layer's M rows.

    .. math:: \tilde G = [Top_{k/M}(G_1), \dots, Top_{k/M}(G_M)]

    A layer with one dimension, or none, is one row. Among entries tied at a
    row's k-th magnitude, the first ones are taken. Zeros are never selected, so only
    a row of zeros sends nothing. NaN counts as larger than infinity.

    Args:
      density: the share taken from each row, in (0, 1]. A row shorter than 1 / density still sends
        one entry. With narrow layers, more than ``density * n`` entries are therefore selected, and
        an allreduce that should deliver all of them needs a density that covers them.
      row_axis: the axis of a layer's shape that numbers its rows. In flax the last
        axis holds the output channels; PyTorch's layout has them first.

    Returns:
      A :class:`Selector` whose ``init`` takes a
      :class:`sparse_collectives.Layout` (:func:`optax_ext.sparse_allreduce` passes
      the layout of the parameters); a number of entries means one row. Its state is
      the layout. ``info.threshold`` is the smallest of the rows' k-th magnitudes.

    Raises:
      ValueError: density is not in (0, 1].
      ValueError: at ``init``, a layer of two or more dimensions has no such axis.

    Cost: two passes over n entries, 16 over n / 16 group maxima and 31 over about
    ``2 k`` slots, O(k log n); 33 more over a layer in the rare miss. An axis that
    is neither first nor last costs a transposed copy of its layer.

    References:
      Ming et al., ADTopk: All-Dimension Top-k Compression for High-Performance
      Data-Parallel DNN Training, HPDC 2024, section 4.1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sparse_collectives as sc
      >>> selector = adtopk(density=0.5)
      >>> state = selector.init(sc.Layout(((2, 3),)))
      >>> coo, _, _ = jax.jit(selector.select)(jnp.array([9.0, 1.0, 8.0, 7.0, 2.0, 6.0]), state)
      >>> coo.indices.tolist()  # the larger entry of each column
      [0, 2, 4]
    """
    density = _validation.check_density(density)
    row_axis = _validation.check_integer("row_axis", row_axis)

    def init(size: int | Layout) -> LayersState:
        layout = as_layout(size)
        for shape in layout.shapes:
            rows_of_layer(shape, row_axis)  # An axis that a layer lacks is an error.
        return init_layers(layout, lambda shape: ())

    def select(acc: jax.Array, state: LayersState):
        def of_layer(layer, shape, state):
            places, info = select_rows(layer, shape, density, row_axis)
            return places, state, info

        acc = _validation.as_vector("acc", acc)
        capacity = sum(count_of_layer(s, density, row_axis) for s in state.layout.shapes)
        return select_layers(acc, state, of_layer, capacity)

    return Selector(init, select, spec=Spec.of("adtopk", density=density, row_axis=row_axis))


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
        state = _varying.varying_like(state, acc)
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


def select_rows(
    layer: jax.Array, shape: tuple[int, ...], density: float, row_axis: int
) -> tuple[jax.Array, SelectInfo]:
    """The selection of one layer: as many slots as its rows may send, and the info."""
    matrix, axis, place_of = _as_matrix(layer, shape, row_axis)
    length = matrix.shape[axis]
    k = _validation.count_from_density(density, length)
    places, threshold = _rows.largest_of_rows(matrix, k, axis)
    places = jnp.where(places < layer.size, place_of(places), layer.size)
    info = SelectInfo(
        jnp.sum(places < layer.size, dtype=jnp.int32),
        jnp.zeros_like(places[0]),
        _bits.magnitude_from_bits(jnp.min(threshold)),
    )
    return places, info


def count_of_layer(shape: tuple[int, ...], density: float, row_axis: int) -> int:
    """The largest number of entries that a layer may send."""
    if 0 in shape:
        return 0
    before, rows, behind = rows_of_layer(shape, row_axis)
    return rows * _validation.count_from_density(density, before * behind)


def _as_matrix(layer: jax.Array, shape: tuple[int, ...], row_axis: int):
    """The layer as a matrix, the axis along its rows, and a map from its places to the layer's."""
    before, rows, behind = rows_of_layer(shape, row_axis)
    if behind == 1:
        return layer.reshape(before, rows), 0, lambda place: place
    if before == 1:
        return layer.reshape(rows, behind), 1, lambda place: place
    moved = layer.reshape(before, rows, behind).transpose(1, 0, 2).reshape(rows, -1)

    def place_of(place):
        row, rest = place // (before * behind), place % (before * behind)
        return (rest // behind * rows + row) * behind + rest % behind

    return moved, 1, place_of
