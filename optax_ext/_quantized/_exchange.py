"""All entries in a few bits as an exchange with error feedback."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _applied, _layout, _sparse_state
from optax_ext._error_feedback._contract import Accumulated, Options, Reduced, WholeBuffer
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._quantized import _units
from optax_ext._quantized._units import Units
from sparse_collectives import _validation, _varying, extend, transport

# A value is cut to so many of its units. Sums of such values, in these units, are finite.
_LARGEST = 2.0**100


class Delivered(NamedTuple):
    """The delivered mean, and what it was made of; dense steps have the same fields.

    Attributes:
      mean: ``f32[n]``, as the dtypes of the leaves can hold it.
      kept: ``f32[n]``, the part of its accumulator that this worker keeps.
      dropped: ``i32[]``, entries that were left out.
      withheld: ``i32[]``, entries that could not be delivered, or not wholly.
      words: ``f32[]``, received.
      units: for the next step.
    """

    mean: jax.Array
    kept: jax.Array
    dropped: jax.Array
    withheld: jax.Array
    words: jax.Array
    units: Units


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedExchange(WholeBuffer):
    """The :class:`Exchange` of :func:`quantized`, which documents it."""

    bits: tuple[int, int]
    options: Options

    def may_keep_of_others(self, layout: _layout.TreeLayout) -> bool:
        """An owner keeps the error of a sum of what others sent."""
        del layout
        return True

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """The leaves that the user has labeled dense."""
        del params
        return labels

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """No state for each worker; units that all workers share."""
        del workers
        return (), _units.start(layout.size) if layout.size else ()

    def reduce(self, step: Accumulated) -> Reduced:
        """One step."""
        options = self.options
        if not step.layout.size:
            reduced = _applied.nothing_exchanged(step, options.axis)
        else:
            reduced = self._keep(step, self._delivered(step))
        return _applied.with_dense_leaves(reduced, step, None, options)

    def _delivered(self, step: Accumulated) -> Delivered:
        if step.is_dense is None:
            return self._quantized(step)

        def typed(result: Delivered) -> Delivered:
            kept = _varying.to_varying(result.kept, self.options.axis)
            return _varying.to_varying(result._replace(kept=kept), step.layout.device_axes)

        # All workers, and all groups of a larger mesh, have the same count.
        return lax.cond(
            step.is_dense,
            lambda: typed(self._dense(step)),
            lambda: typed(self._quantized(step)),
        )

    def _quantized(self, step: Accumulated) -> Delivered:
        """The sum of the codes of all workers."""
        options, acc = self.options, _validation.without_derivative(step.acc[0])
        workers = transport.axis_size(options.axis)
        units: Units = _sparse_state.without_lead(step.state.allreduce)
        scales = _units.scales_of(units)
        unit = scales.unit
        # NaN stays NaN.
        values = jnp.clip(_units.in_units(acc, unit), -_LARGEST, _LARGEST)
        if step.all_finite is not None:
            # A skipped step takes part, with zeros to send.
            values = jnp.where(step.all_finite, values, 0.0)
        total, given = extend.sum_of_all(
            values, step.state.count, axis=options.axis, bits=self.bits
        )
        # Exact, and finite: increments are below 2^103, and the units of a block differ by less
        # than 2^8.
        total, given = total * unit, given * unit
        mean, rounding, saturated = _applied.mean_of(
            total,
            step.layout,
            axis=options.axis,
            shard_axis=(),
            limit=None,
            saturates=options.nonfinite != "propagate",
        )
        # Numbers that are not finite reach the update, and no worker keeps them.
        kept = jnp.where(jnp.isfinite(total), acc - given, 0.0)
        if not isinstance(rounding, tuple):
            kept += rounding
        words = extend.words_of_sum_of_all(acc.shape[0], workers, self.bits)
        return Delivered(
            mean=mean,
            kept=kept,
            dropped=jnp.zeros((), jnp.int32),
            withheld=saturated,
            words=jnp.float32(words),
            units=_units.following(units, scales, mean),
        )

    def _dense(self, step: Accumulated) -> Delivered:
        """The dense mean of the increments, which hold everything there is to send."""
        units: Units = _sparse_state.without_lead(step.state.allreduce)
        options, size = self.options, step.layout.size
        workers = transport.axis_size(options.axis)
        total = transport.psum(step.pending.increment[0], options.axis)
        mean, dropped = _applied.dense_mean(options.nonfinite, total, workers)
        saturates = options.nonfinite != "propagate"
        mean, rounding, saturated = _applied.in_leaves(
            mean, step.layout, shard_axis=(), saturates=saturates
        )
        return Delivered(
            mean=mean,
            # A skipped step has everything in the accumulator.
            kept=step.acc[0] if isinstance(rounding, tuple) else step.acc[0] + rounding,
            dropped=dropped,
            withheld=saturated,
            words=jnp.float32(extend.words_of_all_reduce(size, workers)),
            units=_units.following(units, _units.scales_of(units), mean),
        )

    def _keep(self, step: Accumulated, result: Delivered) -> tuple[jax.Array, SparseAllreduceState]:
        """The state with the new residual and units."""
        everything = jnp.int32(step.layout.size)
        selected = _varying.to_varying(everything, self.options.axis)
        words = _varying.to_varying(result.words, self.options.axis)
        _, state = _applied.nothing_exchanged(step, self.options.axis)
        return result.mean, state._replace(
            residual=result.kept[None],
            allreduce=_sparse_state.with_lead(result.units),
            dropped=state.dropped + result.dropped,
            withheld=state.withheld + result.withheld,
            info=state.info._replace(
                selected=selected,
                arrived=selected,
                delivered=everything - result.withheld,
                words=result.words,
                useful=words,
            ),
        )
