"""Low-rank products as an exchange with error feedback."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _applied, _layout, _sparse_state
from optax_ext._error_feedback._contract import Accumulated, Options, Reduced, WholeBuffer
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._low_rank import _factors, _matrices, _phases
from optax_ext._low_rank._factors import Factors, times
from optax_ext._low_rank._phases import Given, Product, Sum
from sparse_collectives import _varying, extend, transport

# A factor above this bound, divided by the rank, is not sent. The product with a basis is then less
# than the last bit of the largest number, so no difference from it overflows.
_LARGEST = 2.0**100


class Delivered(NamedTuple):
    """The delivered mean, and how it was delivered; dense steps have the same fields.

    Attributes:
      mean: ``f32[n]``, as the dtypes of the leaves can hold it.
      rounding: ``f32[n]``, the rounding error of ``mean``; ``()`` if every leaf is float32.
      left: ``f32[rows, r]`` each: ``left @ right`` is the part that this worker has given away.
      right: ``f32[r, cols]`` each.
      factors: the factors for the next step.
      rider: ``f32[d]``, the sum of the dense leaves.
      dropped: ``i32[]``, entries that were left out.
      withheld: ``i32[]``, entries that could not be delivered, or not wholly.
      selected: ``i32[]``, numbers that this worker sent for the matrices.
      delivered: ``i32[]``, entries in the update.
      words: ``f32[]``, received for the matrices.
    """

    mean: jax.Array
    rounding: Any
    left: list[jax.Array]
    right: list[jax.Array]
    factors: Factors
    rider: jax.Array
    dropped: jax.Array
    withheld: jax.Array
    selected: jax.Array
    delivered: jax.Array
    words: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class LowRankExchange(WholeBuffer):
    """The :class:`Exchange` of :func:`powersgd` and :func:`acp_sgd`, which document it."""

    rank: int
    alternate: bool
    seed: int
    options: Options

    def may_keep_of_others(self, layout: _layout.TreeLayout) -> bool:
        """Never: a worker keeps only the error of its own product."""
        del layout
        return False

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """The leaves that the user has labeled dense, and those that have nothing to gain."""
        return _matrices.dense_leaves(params, labels, self.rank)

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """No state for each worker; factors that all workers share."""
        del workers
        if not layout.size:
            return (), ()
        matrices = _matrices.matrices_of(layout)
        return (), _factors.start(matrices, self.rank, self.seed, left=self.alternate)

    def reduce(self, step: Accumulated) -> Reduced:
        """One step."""
        options, part = self.options, step.dense_pending
        if not step.layout.size:
            reduced = _applied.nothing_exchanged(step, options.axis)
            return _applied.with_dense_leaves(reduced, step, None, options)
        rider = jnp.zeros((0,), jnp.float32) if part is None else part.increment[0]
        result = self._delivered(step, rider)
        # Its words count as a message of its own, but it adds no latency.
        return _applied.with_dense_leaves(self._keep(step, result), step, result.rider, options)

    def _delivered(self, step: Accumulated, rider: jax.Array) -> Delivered:
        matrices = _matrices.matrices_of(step.layout)
        factors: Factors = _sparse_state.without_lead(step.state.allreduce)
        accs = [matrix.of(step.acc[0]) for matrix in matrices]
        given = Given(accs, factors, matrices, self.rank, rider)

        def low_rank() -> Delivered:
            return self._low_rank(given, step)

        if step.is_dense is None:
            return low_rank()

        def typed(result: Delivered) -> Delivered:
            left, right, selected = _varying.to_varying(
                (result.left, result.right, result.selected), self.options.axis
            )
            result = result._replace(left=left, right=right, selected=selected)
            return _varying.to_varying(result, step.layout.device_axes)

        # All workers, and all groups of a larger mesh, have the same count.
        return lax.cond(
            step.is_dense,
            lambda: typed(self._dense(given, step)),
            lambda: typed(low_rank()),
        )

    def _low_rank(self, given: Given, step: Accumulated) -> Delivered:
        """One step of PowerSGD, or of ACP-SGD."""
        workers = transport.axis_size(self.options.axis)
        product, sent = self._product(given, step)
        flat = _factors.joined([times(*x) for x in zip(product.mean_left, product.mean_right)])
        mean, rounding, saturated = self._in_leaves(flat, step.layout)
        lost = [
            jnp.where(ok, 0, matrix.size)
            for ok, matrix in zip(product.fits, given.matrices, strict=True)
        ]
        lost = sum(lost, jnp.zeros((), jnp.int32))
        return Delivered(
            mean=mean,
            rounding=rounding,
            left=product.left,
            right=product.right,
            factors=product.factors,
            rider=product.rider,
            dropped=jnp.zeros((), jnp.int32),
            withheld=lost + saturated,
            selected=sent,
            delivered=step.layout.size - lost,
            words=sent.astype(jnp.float32) * jnp.float32(extend.words_of_all_reduce(1, workers)),
        )

    def _product(self, given: Given, step: Accumulated) -> tuple[Product, jax.Array]:
        """The product to deliver, and how many numbers a worker sends for it."""
        rows, cols = (
            self.rank * sum(side)
            for side in zip(*((m.rows, m.cols) for m in given.matrices), strict=True)
        )

        def add(parts: Sequence[jax.Array], rider: jax.Array) -> Sum:
            return self._add(parts, rider, step.all_finite)

        if not self.alternate:
            return _phases.power_iteration(given, add), jnp.int32(rows + cols)

        def typed(phase):
            product = phase(given, add)
            mine = _varying.to_varying((product.left, product.right), self.options.axis)
            product = product._replace(left=mine[0], right=mine[1])
            return _varying.to_varying(product, step.layout.device_axes)

        # Skipped steps are not counted, so the next one repeats their phase.
        by_rows = (step.state.count - self.options.dense_first) % 2 == 0
        # From the scope the traffic meter reads that each branch is taken every other step.
        with jax.named_scope("acp_sgd.every2"):
            product = lax.cond(
                by_rows,
                lambda: typed(_phases.project_rows),
                lambda: typed(_phases.project_columns),
            )
        return product, jnp.where(by_rows, jnp.int32(rows), jnp.int32(cols))

    def _add(
        self, parts: Sequence[jax.Array], rider: jax.Array, all_finite: jax.Array | None
    ) -> Sum:
        """Sums factors over the workers, all in one message.

        A factor that is not finite, or too large, on one worker makes the sum of its matrix NaN on
        all. So they agree, without another message, that each keeps its own.
        """
        axis, guarded = self.options.axis, self.options.nonfinite != "propagate"
        if all_finite is not None:
            # A skipped step takes part, with zeros to send.
            parts = [jnp.where(all_finite, part, 0.0) for part in parts]
        if guarded:
            limit = jnp.float32(_LARGEST / self.rank)
            parts = [jnp.where(jnp.max(jnp.abs(part)) <= limit, part, jnp.nan) for part in parts]
        shapes = [part.shape for part in parts]
        total = transport.psum(_factors.joined([*parts, rider]), axis)
        *sums, rider = _factors.split(total, [*shapes, rider.shape])
        means = [total / transport.axis_size(axis) for total in sums]
        if not guarded:
            return Sum(list(parts), means, [jnp.ones((), jnp.bool_)] * len(sums), rider)
        fits = [jnp.all(jnp.isfinite(total)) for total in sums]
        return Sum(_phases.where(fits, parts), _phases.where(fits, means), fits, rider)

    def _dense(self, given: Given, step: Accumulated) -> Delivered:
        """The dense mean of the increments, which hold everything there is to send."""
        size, workers = step.layout.size, transport.axis_size(self.options.axis)
        increment = step.pending.increment[0]
        total = transport.psum(_factors.joined([increment, given.rider]), self.options.axis)
        mean, dropped = _applied.dense_mean(self.options.nonfinite, total[:size], workers)
        mean, rounding, saturated = self._in_leaves(mean, step.layout)
        lefts = _factors.left_shapes(given.matrices, self.rank)
        rights = _factors.right_shapes(given.matrices, self.rank)
        return Delivered(
            mean=mean,
            rounding=rounding,
            left=[jnp.zeros(shape, jnp.float32) for shape in lefts],
            right=[jnp.zeros(shape, jnp.float32) for shape in rights],
            factors=given.factors,
            rider=total[size:],
            dropped=dropped,
            withheld=saturated,
            selected=jnp.sum(increment != 0, dtype=jnp.int32),
            delivered=jnp.sum(total[:size] != 0, dtype=jnp.int32),
            words=jnp.float32(extend.words_of_all_reduce(size, workers)),
        )

    def _in_leaves(
        self, mean: jax.Array, layout: _layout.TreeLayout
    ) -> tuple[jax.Array, Any, jax.Array]:
        saturates = self.options.nonfinite != "propagate"
        return _applied.in_leaves(mean, layout, shard_axis=(), saturates=saturates)

    def _keep(self, step: Accumulated, result: Delivered) -> tuple[jax.Array, SparseAllreduceState]:
        """The residual: the accumulator without the part that this worker has given away."""
        given_away = [times(*x) for x in zip(result.left, result.right, strict=True)]
        kept = step.acc - _factors.joined(given_away)[None]
        if not isinstance(result.rounding, tuple):
            kept = kept + result.rounding[None]
        selected = _varying.to_varying(result.selected, self.options.axis)
        words = _varying.to_varying(result.words, self.options.axis)
        _, state = _applied.nothing_exchanged(step, self.options.axis)
        return result.mean, state._replace(
            residual=kept,
            allreduce=_sparse_state.with_lead(result.factors),
            dropped=state.dropped + result.dropped,
            withheld=state.withheld + result.withheld,
            info=state.info._replace(
                selected=selected,
                arrived=selected,
                delivered=result.delivered,
                words=result.words,
                useful=words,
            ),
        )
