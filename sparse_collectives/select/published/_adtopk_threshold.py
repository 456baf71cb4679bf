"""ADTopk-t: rows and a reused threshold take turns, and late in training rows alone."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _data, _validation, _varying
from sparse_collectives._data import Layout, as_layout
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector, State
from sparse_collectives.select import _thresholds
from sparse_collectives.select._layerwise import LayersState, init_layers, select_layers
from sparse_collectives.select._topk import topk
from sparse_collectives.select.published._adtopk import count_of_layer, select_rows

# Relative changes of the threshold below which the period grows, and above which it
# shrinks: epsilon and 2 epsilon of Algorithm 2.
_STEADY = 0.1
_MOVING = 0.2


class ADTopkThresholdState(NamedTuple):
    """State of one layer in :func:`adtopk_threshold`.

    Attributes:
      count: ``i32[]``, steps taken.
      threshold: ``f32[]``, the magnitude that is reused.
      period: ``i32[]``, tau, turns between two evaluations.
      steady: ``bool[]``, whether the last evaluation changed the threshold by less than 10 %.
      exact: the state of the exact selection.
    """

    count: jax.Array
    threshold: jax.Array
    period: jax.Array
    steady: jax.Array
    exact: State


def adtopk_threshold(
    density: float,
    *,
    steps: int,
    warmup: int = 15,
    period: int = 5,
    headroom: float = 0.25,
    row_axis: int = -1,
) -> Selector:
    """Selects by row and by layer with a reused threshold in turn; late, by row alone.

    This is :func:`adtopk_interleaved` with Algorithm 2 instead of its exact top-k (section 5:
    "we use threshold-based sparsification in ADTopk-t to replace the TradTopk"). The first step
    is t = 1. If t is odd, all layers select by row, as :func:`adtopk` does. If t is even, each
    layer does the first of the following that applies:

    1. t < ``warmup``: exact top-k of the layer, whose k-th magnitude is kept.
    2. In the last quarter of ``steps``, once the threshold is steady: selection by row.
    3. Every ``period`` of its turns: exact top-k and a new threshold. If the threshold
       changed by less than 10 %, the period grows by one turn; if it changed by more
       than 20 %, the period shrinks by one.
    4. Otherwise: all entries above the threshold.

    Where the paper leaves a point open, or this selector deviates from it:

    - For (2), Algorithm 2 tests whether ``thr_reuse < 10 epsilon``. Its epsilon is 1/10 of
      ``thr_reuse`` at every evaluation, so the test never holds. The text requires a small
      change, which is tested here.
    - For (3), it tests whether ``(t - 1) % tau == 0``. At even t this never holds for an even tau,
      and tau would never change again. Here the turns are counted, because the text says that
      "the next tau - 1" reuse a threshold. Without a threshold, as after a change of workers,
      (1) applies.
    - The paper sends all entries above the threshold. Here shapes are static and a layer has slots
      for 1.25 k entries (``headroom``); entries without a slot stay with the caller.

    Args:
      density: the density of each layer and of each row, in (0, 1].
      steps: T, the number of steps of the whole training.
      warmup: sigma, in steps.
      period: tau at the beginning, in turns; it stays at 1 or more.
      headroom: slots beyond k for entries above a reused threshold, as a share of
        k. Entries that find no slot are counted as overflow and stay with the
        caller. Which entries these are changes from step to step.
      row_axis: the axis of a layer's shape that numbers its rows.

    Returns:
      A :class:`Selector` whose ``init`` takes a :class:`sparse_collectives.Layout`, and whose state
      has an :class:`ADTopkThresholdState` for each layer.

    Raises:
      ValueError: an argument is out of its range.

    Cost: the cost of :func:`adtopk` in every second step, and one pass over n entries, or
    sometimes the cost of :func:`topk`, in the others; under ``vmap`` all three in each step.

    References:
      Ming et al., ADTopk, HPDC 2024, section 4.3, Algorithm 2, and section 5.
    """
    density = _validation.check_density(density)
    steps = _validation.check_positive_int("steps", steps)
    warmup = _validation.check_positive_int("warmup", warmup, minimum=0)
    period = _validation.check_positive_int("period", period)
    headroom = _validation.check_number("headroom", headroom, 0.0, math.inf)
    row_axis = _validation.check_integer("row_axis", row_axis)
    exact = topk(density=density)

    def init(size: int | Layout) -> LayersState:
        return init_layers(
            as_layout(size),
            lambda shape: ADTopkThresholdState(
                count=jnp.zeros((), jnp.int32),
                threshold=jnp.zeros((), jnp.float32),
                period=jnp.full((), period, jnp.int32),
                steady=jnp.zeros((), jnp.bool_),
                exact=exact.init(math.prod(shape)),
            ),
        )

    def slots_of(shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        if not size:
            return 0
        k = _validation.count_from_density(density, size)
        reused = _thresholds.slots_for(k, size, headroom)
        return max(reused, count_of_layer(shape, density, row_axis))

    def of_layer(layer: jax.Array, shape: tuple[int, ...], state: ADTopkThresholdState):
        t = state.count + 1
        capacity = slots_of(shape)

        def by_layer():
            coo, guess, info = exact.select(layer, state.exact)
            places = _data.widen(coo, capacity).indices
            return places, state._replace(exact=guess, threshold=info.threshold), info

        def evaluate():
            places, new, info = by_layer()
            change = jnp.abs(new.threshold - state.threshold)
            steady = change < _STEADY * new.threshold
            moving = change > _MOVING * new.threshold
            turn = state.period + jnp.where(steady, 1, jnp.where(moving, -1, 0))
            return places, new._replace(period=jnp.maximum(turn, 1), steady=steady), info

        def by_row():
            places, info = select_rows(layer, shape, density, row_axis)
            coo, _ = _compaction.compact_indices(layer, places, capacity=capacity)
            return coo.indices, state, info

        def reuse():
            # Strictly above the threshold, as in the paper.
            bits = _bits.magnitude_bits(state.threshold) + 1
            coo, count = _compaction.compact(layer, bits, capacity=capacity, turn=state.count)
            selected = jnp.minimum(count, capacity)
            return coo.indices, state, SelectInfo(selected, count - selected, state.threshold)

        late = (t > 3 * steps // 4) & state.steady
        evaluates = (t // 2 - 1) % state.period == 0
        # Without a threshold, after a change of workers, there is nothing to reuse.
        otherwise = jnp.where(state.threshold > 0, 3, 0)
        branch = jnp.where(late, 1, jnp.where(evaluates, 2, otherwise))
        branch = jnp.where(t % 2 == 1, 1, jnp.where(t < warmup, 0, branch))
        places, state, info = lax.switch(branch, (by_layer, by_row, evaluate, reuse))
        return places, state._replace(count=t), info

    def select(acc: jax.Array, state: LayersState):
        # The state varies over the workers; one made in the mapped function lacks that type.
        state = _varying.varying_like(state, acc)
        return select_layers(_validation.as_vector("acc", acc), state, of_layer)

    periods = {"steps": steps, "warmup": warmup, "period": period}
    options = {"density": density, "headroom": headroom, "row_axis": row_axis}
    return Selector(init, select, spec=Spec.of("adtopk_threshold", **periods, **options))
