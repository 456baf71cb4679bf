"""A selector and a sparse allreduce as an exchange of error feedback."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._step import _contract, _exchange, _layout, _sparse_state
from optax_ext._step._contract import Accumulated, Options, Reduced
from optax_ext._step._exchange import Exchanged
from optax_ext._step._momentum_correction import MomentumCorrection
from sparse_collectives import Layout, Selector, SparseAllreduce, extend, transport


@dataclasses.dataclass(frozen=True, eq=False)
class SparseExchange:
    """The :class:`Exchange` of :func:`sparse_allreduce`, which documents its parts."""

    selector: Selector
    allreduce: SparseAllreduce
    correction: MomentumCorrection | None
    options: Options

    @property
    def tells(self) -> bool:
        """As the allreduce does."""
        return self.allreduce.tells

    @property
    def keeps_others(self) -> bool:
        """As the allreduce does."""
        return self.allreduce.keeps_others

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """Those that the user has labelled."""
        del params
        return labels

    def part_size(self, size: int) -> int:
        """Entries of the buffer that one worker holds."""
        inside = transport.axis_size(self.allreduce.shard_axis)
        return extend.shard_size(size, inside)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """The sum of a shard over the workers of a node, where there are shards."""
        return self.allreduce.scatter(gradient)

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """The states of the selector and of the allreduce."""
        size = self.part_size(layout.size)
        if not size:
            return (), ()
        shared = self.allreduce.init(layout.size, workers)
        shown = self._shown_size(size, shared)
        # A part cuts through layers: to the selector it is one.
        selector = self.selector.init(
            Layout(layout.sparse_shapes) if shown == layout.size else shown
        )
        if self.allreduce.shard_axis:
            shared = extend.to_varying(shared, self.allreduce.shard_axis)
        return selector, shared

    def reduce(self, step: Accumulated) -> Reduced:
        """One step."""
        reduced = _contract.nothing_exchanged(step, self.options.axis)
        if step.layout.size:
            result = self._exchange(step)
            if step.late is not None and result.proceeds is not None:
                step = step.late.settled(result.proceeds)
            reduced = self._keep(step, result, reduced)._replace(proceeds=result.proceeds)
        if step.dense_part is not None:
            total = transport.psum(step.dense_part.increment[0], self.options.axis)
            reduced = _contract.with_dense_leaves(reduced, step.dense_part, total, self.options)
        return reduced

    def _exchange(self, step: Accumulated) -> Exchanged:
        """Selects from the accumulator, and exchanges."""
        options = self.options
        parts = _exchange.Parts(
            selector=self.selector,
            allreduce=self.allreduce,
            axis=options.axis,
            nonfinite=options.nonfinite,
            limit=_contract.limit_at(options.limit, step.state.count),
        )
        selector_state = _sparse_state.without_lead(step.state.selector)
        allreduce_state = _sparse_state.without_lead(step.state.allreduce)

        def sparse() -> Exchanged:
            return _exchange.sparse(
                step.acc[0],
                selector_state,
                allreduce_state,
                parts=parts,
                layout=step.layout,
                proceeds=step.proceeds,
                bad=None if step.late is None else step.late.bad,
            )

        if step.is_dense is None:
            return sparse()
        shapes = jax.eval_shape(sparse)
        like = shapes._replace(selector=selector_state, allreduce=allreduce_state)
        # All workers, and all groups of a larger mesh, have the same count.
        return _exchange.dense_or_sparse(
            step.is_dense,
            lambda: _exchange.dense(step.part.increment[0], like, parts=parts),
            sparse,
            options.axis,
            step.layout.part_axes,
        )

    def _keep(self, step: Accumulated, result: Exchanged, reduced: Reduced) -> Reduced:
        """What stays with this worker, and the mean of the whole buffer."""
        result = _exchange.joined(result)
        kept = result.undelivered.residual(step.acc, result.sent)
        arrived = _exchange.delivered_of(result, kept)
        kept = _exchange.with_rounding(kept, result.rounding)
        velocity = step.part.velocity
        if self.correction is not None:
            velocity = self.correction.mask(velocity, result.sent.indices, arrived)
            whole = result.undelivered.instead
            if whole is not None:
                # All that this worker had of an entry that others selected has gone, too.
                everywhere = jnp.ones(whole.indices.shape, jnp.bool_)
                velocity = self.correction.mask(velocity, whole.indices, everywhere)
        return reduced._replace(
            mean=self.allreduce.gather(result.mean, step.layout.size),
            residual=kept,
            velocity=velocity,
            selector=_sparse_state.with_lead(result.selector),
            allreduce=_sparse_state.with_lead(result.allreduce),
            dropped=result.dropped,
            withheld=result.withheld,
            info=result.info._replace(arrived=jnp.sum(arrived, dtype=jnp.int32)),
        )

    def _shown_size(self, size: int, shared: Any) -> int:
        """Entries that a worker selects from at one step, of the ``size`` that it holds."""

        def show(acc):
            return self.allreduce.show(acc, shared, axis=self.options.axis)

        return jax.eval_shape(show, jax.ShapeDtypeStruct((size,), jnp.float32)).shape[0]
