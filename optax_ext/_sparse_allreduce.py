"""Error feedback around a selector and an allreduce, as an optax transformation."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext import (
    _buffer,
    _checks,
    _density_schedule,
    _exchange,
    _nonfinite,
    _settings,
    _sparse_state,
)
from optax_ext._momentum_correction import MomentumCorrection
from optax_ext._sparse_state import ShardState, SparseAllreduceState
from sparse_collectives import Layout, Selector, SparseAllreduce, _compat, _validation, transport
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical, _hierarchical


def sparse_allreduce(
    selector: Selector,
    allreduce: SparseAllreduce | Hierarchical,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    nonfinite: str = "skip",
    correction: MomentumCorrection | None = None,
    density_schedule: float | Callable[[jax.Array], Any] | None = None,
    dense_steps: int = 0,
) -> optax.GradientTransformation:
    r"""Replaces the dense allreduce of gradients by a sparse one.

    At each step worker i does

    .. math::

        acc_i &= residual_i + g_i \\
        coo_i &= select(acc_i) \\
        total, undelivered_i &= allreduce(coo_i) \\
        residual_i &= acc_i - coo_i + undelivered_i \\
        update &= total / P

    so that nothing is lost: over the workers, the sum of ``acc`` is ``total``
    plus the sum of the new residuals. Give it *local* gradients, before any
    optimizer: ``optax.chain(sparse_allreduce(...), optax.adam(1e-3))``. The
    updates are the same bits on every worker.

    Args:
      selector: from :mod:`sparse_collectives.select`.
      allreduce: from :mod:`sparse_collectives.allreduce`. With ``hierarchical`` the
        gradients are summed inside the node first, and residual, selection and
        density are those of a shard.
      axis: the mesh axis (or a tuple of them) over which gradients are averaged;
        with ``hierarchical`` both that of the nodes and its ``inner_axis``.
      axis_size: P. Needed to call ``init`` outside of the mapped function, where
        it makes the state of all workers; checked inside it.
      learning_rate: a number or a schedule of ``count``, applied to the gradient
        before it is accumulated, as in Algorithm 2 of Ok-Topk. The update is then
        to be subtracted from the parameters; see :func:`optax_ext.ok_topk_sgd`.
      nonfinite: what to do when a worker's gradient, or its sum with the residual, has
        an entry that is not finite. ``'skip'``: all workers skip the step by agreement
        (one word): the update is zero, no residual changes, and ``skipped`` grows.
        ``'drop'``: such entries are left out on the worker that has them, whose residual
        keeps what it had, and ``dropped`` counts them (one word). ``'raise'``: as
        ``'skip'``, and a host callback raises FloatingPointError; JAX reports it as a
        runtime error when a result, or ``jax.effects_barrier()``, is waited for.
        ``'propagate'`` or ``'ignore'``: it takes part like any large value and reaches
        the update of every worker, as it would in a dense allreduce.
      correction: from :func:`momentum_correction`: what is accumulated is the velocity of
        the gradients, and not they.
      density_schedule: a function of ``count``, or a number: of what the selector selects
        only the ``round(density * n)`` largest are sent, the rest stays in the residual.
        The selector's slots are the maximum; more is clipped, and ``clipped`` counts such
        steps. Shapes are static, so the words sent are those of the maximum.
      dense_steps: for so many first steps the gradients are averaged by a dense allreduce
        in the same program. The residual does not change, and no velocity is masked.

    Returns:
      An ``optax.GradientTransformation``. Its updates have the dtypes of the
      gradients. Memory: the residual, n float32 for each worker, and one n-sized
      buffer during the step. An empty pytree works and does nothing.

    Raises:
      ValueError: an axis that is not bound; gradients already summed over the
        axis; an update whose tree, shapes or dtypes differ from ``init``'s; a
        state of another number of workers; 2**31 entries or more.
      TypeError: leaves that are not float32, bfloat16 or float16.

    Example:
      >>> import jax.numpy as jnp, optax, sparse_collectives as sc
      >>> tx = sparse_allreduce(
      ...     sc.select.topk(density=0.5), sc.allreduce.ok_topk(density=0.5), axis="w"
      ... )
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(gradient))[0]
      >>> gradients = jnp.array([[4.0, 1.0, 0.0, -2.0], [2.0, 0.0, 1.0, -4.0]])
      >>> sc.simulate(step, axis="w", axis_size=2)(gradients)[0].tolist()
      [3.0, 0.0, 0.0, -3.0]
    """
    nonfinite = _validation.check_choice("nonfinite", nonfinite, _nonfinite.POLICIES)
    if axis_size is not None:
        axis_size = _validation.check_positive_int("axis_size", axis_size)
    if dense_steps != 0:
        dense_steps = _validation.check_positive_int("dense_steps", dense_steps, minimum=0)
    scale = _as_schedule(learning_rate)
    settings = _settings.Settings(
        _settings.describe(selector),
        _settings.describe(allreduce),
        learning_rate is not None,
        axis,
    )
    schedule = _density_schedule.as_schedule(density_schedule)
    hierarchy = allreduce if isinstance(allreduce, Hierarchical) else None
    if hierarchy is not None:
        _checks.check_hierarchy(axis, hierarchy.inner_axis)

    def init(params: Any) -> SparseAllreduceState:
        layout = _buffer.layout_of(params, "params")
        bound = _compat.axis_is_bound(axis)
        workers = _checks.workers_at_init(axis, axis_size, bound)
        lead = 1 if bound else workers
        size = layout.size
        selector_layout = Layout(layout.shapes) if size else None
        if hierarchy is not None:
            _checks.check_bound_for_hierarchy(axis, bound)
            # A shard cuts through layers: to the selector it is one.
            selector_layout = size = _shard_size(hierarchy, size)
        local = (
            jnp.zeros((size,), jnp.float32),
            correction.init(size) if correction is not None else (),
            selector.init(selector_layout) if size else (),
            _sparse_state.no_info(),
        )
        local = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (lead, *x.shape)), local)
        if bound:
            local = _compat.to_varying(local, axis)
        residual, velocity, selector_state, info = local
        common = _sparse_state.no_info()
        return SparseAllreduceState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            dropped=jnp.zeros((), jnp.int32),
            clipped=jnp.zeros((), jnp.int32),
            residual=residual,
            velocity=velocity,
            selector=selector_state,
            allreduce=_init_allreduce(allreduce, layout.size, workers) if size else (),
            info=info._replace(
                delivered=common.delivered,
                global_threshold=common.global_threshold,
                words=common.words,
            ),
            layout=layout,
            settings=settings,
        )

    def update(updates: Any, state: SparseAllreduceState, params: Any = None):
        del params
        layout = _buffer.layout_of(updates, "updates")
        workers = _checks.workers_at_update(axis, axis_size)
        _checks.check_layout(state.layout, layout)
        if not layout.size:
            return updates, state._replace(count=state.count + 1)
        size = layout.size if hierarchy is None else _shard_size(hierarchy, layout.size)
        _checks.check_residual(state.residual, size, workers, axis)
        _checks.check_local_gradients(updates, axis)

        gradient = _buffer.ravel(updates)
        if scale is not None:
            gradient = gradient * jnp.asarray(scale(state.count), jnp.float32)
        if hierarchy is not None:
            gradient = hierarchy.scatter(gradient)
        # In the shape of the state: XLA then adds in place where it is donated.
        increment, velocity = gradient[None], state.velocity
        if correction is not None:
            velocity, increment = correction.update(velocity, increment)
        guarded = _nonfinite.guard(
            nonfinite,
            state.residual,
            increment,
            velocity,
            state.velocity,
            axis=axis,
            count=state.count,
        )
        increment, proceeds = guarded.increment, guarded.proceeds
        is_dense = state.count < dense_steps
        accumulated = state.residual + (
            jnp.where(is_dense, 0.0, increment) if dense_steps else increment
        )

        selector_state = _sparse_state.without_lead(state.selector)
        allreduce_state = state.allreduce
        if hierarchy is not None:
            allreduce_state = _sparse_state.without_lead(allreduce_state.state)

        def sparse() -> _exchange.Exchanged:
            return _exchange.sparse(
                accumulated[0],
                selector_state,
                allreduce_state,
                selector=selector,
                allreduce=allreduce,
                axis=axis,
                proceeds=proceeds,
                schedule=schedule,
                count=state.count,
            )

        if dense_steps:
            shapes = jax.eval_shape(sparse)
            like = shapes._replace(selector=selector_state, allreduce=allreduce_state)
            # All workers, and all groups of a larger mesh, have the same count.
            result = jax.lax.cond(
                is_dense,
                lambda: _exchange.typed_per_worker(
                    _exchange.dense(increment[0], like, axis=axis, hierarchy=hierarchy), axis
                ),
                lambda: _exchange.typed_per_worker(sparse(), axis),
            )
        else:
            result = sparse()
        residual = _exchange.keep_undelivered(accumulated, result.sent, result.undelivered)
        velocity = guarded.velocity
        if correction is not None:
            delivered = _exchange.delivered_of(result.sent, residual)
            velocity = correction.mask(velocity, result.sent.indices, delivered)

        allreduce_state = result.allreduce
        if hierarchy is not None:
            allreduce_state = _shard_state(allreduce_state, hierarchy)
        info = _sparse_state.with_lead(result.info)._replace(
            delivered=result.info.delivered,
            global_threshold=result.info.global_threshold,
            words=result.info.words,
        )
        stepped = state._replace(
            count=state.count + 1,
            dropped=state.dropped + guarded.dropped,
            clipped=state.clipped + result.clipped,
            selector=_sparse_state.with_lead(result.selector),
            allreduce=allreduce_state,
            info=info,
        )
        if proceeds is not None:
            skipped = state._replace(skipped=state.skipped + 1)
            stepped = jax.tree.map(
                lambda new, old: new if new is old else jnp.where(proceeds, new, old),
                stepped,
                skipped,
            )
        mean = result.mean
        if hierarchy is not None:
            mean = hierarchy.gather(mean, layout.size)
        new_state = stepped._replace(residual=residual, velocity=velocity)
        return _buffer.unravel(mean, layout), new_state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformation(cast(Any, init), cast(Any, update))


def _shard_size(hierarchy: Hierarchical, size: int) -> int:
    return _hierarchical.shard_size(size, transport.axis_size(hierarchy.inner_axis))


def _init_allreduce(allreduce: SparseAllreduce | Hierarchical, size: int, workers: int) -> Any:
    if isinstance(allreduce, SparseAllreduce):
        return allreduce.init(size, workers)
    state = allreduce.init(size, workers, transport.axis_size(allreduce.inner_axis))
    return _shard_state(_compat.to_varying(state, allreduce.inner_axis), allreduce)


def _shard_state(state: Any, hierarchy: Hierarchical) -> ShardState:
    return ShardState(jax.tree.map(lambda x: x[None], state), hierarchy.inner_axis)


def _as_schedule(
    learning_rate: optax.ScalarOrSchedule | None,
) -> Callable[[jax.Array], Any] | None:
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    return lambda count: learning_rate
