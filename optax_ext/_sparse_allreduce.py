"""Error feedback around a selector and an allreduce, as an optax transformation."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext import _buffer, _checks, _settings
from sparse_collectives import (
    Layout,
    PaddedCOO,
    Selector,
    SparseAllreduce,
    _compat,
    _validation,
    transport,
)
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical, _hierarchical


class StepInfo(NamedTuple):
    """What the last step did. Zeros before the first.

    Attributes:
      selected: ``i32[1]`` for each worker: entries it selected.
      delivered: ``i32[]``: entries in the update that every worker applied.
      overflow: ``i32[1]`` for each worker: entries that found no slot.
      local_threshold: ``f32[1]`` for each worker: magnitude it selected by.
      global_threshold: ``f32[]``: magnitude of the global selection.
      words: ``f32[]``: 4-byte words each worker received in the allreduce, padding
        included.
      useful: ``f32[1]`` for each worker: words of its messages that are no padding. The
        mean over the workers, divided by ``words``, is the occupancy.
    """

    selected: jax.Array
    delivered: jax.Array
    overflow: jax.Array
    local_threshold: jax.Array
    global_threshold: jax.Array
    words: jax.Array
    useful: jax.Array


class SparseAllreduceState(NamedTuple):
    """State of :func:`sparse_allreduce`.

    Fields marked "for each worker" differ between the workers: every array in
    them has a leading axis, of size 1 inside the mapped function and of size P
    outside, sharded over the axis. The others are the same on every worker.
    :func:`optax_ext.state_specs` gives the matching PartitionSpecs.

    Attributes:
      count: ``i32[]``, steps taken, skipped ones left out.
      skipped: ``i32[]``, steps skipped because of a non-finite gradient.
      residual: ``f32[1, n]`` for each worker: what it has not delivered yet. With
        :func:`~sparse_collectives.allreduce.hierarchical` it is that of its shard,
        ``f32[1, ceil(n / w)]`` for w workers in a node.
      selector: the selector's state, for each worker.
      allreduce: the allreduce's state; a :class:`ShardState` with ``hierarchical``.
      info: :class:`StepInfo` of the last step.
      layout: the tree, shapes and dtypes that the state was made for; it is
        static and has no arrays.
      settings: selector, allreduce and axis that the state was made for, in words; it
        is static too.
    """

    count: jax.Array
    skipped: jax.Array
    residual: jax.Array
    selector: Any
    allreduce: Any
    info: StepInfo
    layout: _buffer.Layout
    settings: _settings.Settings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardState:
    """The state of the allreduce between nodes, one for each shard of the buffer.

    Attributes:
      state: its arrays have a leading axis, of size 1 inside the mapped function and
        outside of size w, the workers of a node, sharded over ``inner_axis``. They are
        the same on every node.
      inner_axis: static, the mesh axis of the workers of a node.
    """

    state: Any
    inner_axis: AxisName = dataclasses.field(metadata={"static": True})


def sparse_allreduce(
    selector: Selector,
    allreduce: SparseAllreduce | Hierarchical,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    nonfinite: str = "skip",
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
      nonfinite: what to do when a worker's gradient, or its sum with the
        residual, has an entry that is not finite. ``'skip'``: all workers skip
        the step by agreement (one word): the update is zero, no residual
        changes, and ``skipped`` grows. ``'propagate'``: it takes part like any
        large value and reaches the update of every worker, as it would in a
        dense allreduce.

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
    nonfinite = _validation.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
    if axis_size is not None:
        axis_size = _validation.check_positive_int("axis_size", axis_size)
    scale = _as_schedule(learning_rate)
    settings = _settings.Settings(
        _settings.describe(selector),
        _settings.describe(allreduce),
        learning_rate is not None,
        axis,
    )
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
            selector.init(selector_layout) if size else (),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.float32),
        )
        local = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (lead, *x.shape)), local)
        if bound:
            local = _compat.to_varying(local, axis)
        residual, selector_state, no_entries, no_threshold = local
        return SparseAllreduceState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            residual=residual,
            selector=selector_state,
            allreduce=_init_allreduce(allreduce, layout.size, workers) if size else (),
            info=StepInfo(
                selected=no_entries,
                delivered=jnp.zeros((), jnp.int32),
                overflow=no_entries,
                local_threshold=no_threshold,
                global_threshold=jnp.zeros((), jnp.float32),
                words=jnp.zeros((), jnp.float32),
                useful=no_threshold,
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
        finite = jnp.bool_(True)
        if nonfinite == "skip":
            finite = _all_finite(state.residual, gradient, axis)
            gradient = jnp.where(finite, gradient, 0.0)
        # In the shape of the state: XLA then adds in place where it is donated.
        accumulated = state.residual + gradient[None]
        acc = accumulated[0]

        selector_state = jax.tree.map(lambda x: x[0], state.selector)
        coo, selector_state, selection = selector.select(acc, selector_state)
        if nonfinite == "skip":
            # A skipped step goes through the motions with nothing to send: a rare
            # cost, where a branch around the step would copy the residual at each.
            coo = PaddedCOO(
                jnp.where(finite, coo.values, 0), jnp.where(finite, coo.indices, coo.size), coo.size
            )
        allreduce_state = state.allreduce
        if hierarchy is not None:
            allreduce_state = jax.tree.map(lambda x: x[0], allreduce_state.state)
        total, undelivered, allreduce_state, reduction = allreduce.reduce(
            coo, allreduce_state, axis=axis
        )
        if hierarchy is not None:
            allreduce_state = _shard_state(allreduce_state, hierarchy)
        stepped = SparseAllreduceState(
            count=state.count + 1,
            skipped=state.skipped,
            residual=state.residual,
            selector=jax.tree.map(lambda x: x[None], selector_state),
            allreduce=allreduce_state,
            info=StepInfo(
                selected=selection.selected[None],
                delivered=reduction.delivered,
                overflow=(selection.overflow + reduction.overflow)[None],
                local_threshold=selection.threshold[None],
                global_threshold=reduction.threshold,
                words=reduction.words,
                useful=_compat.to_varying(reduction.useful, axis)[None],
            ),
            layout=layout,
            settings=state.settings,
        )
        skipped = state._replace(skipped=state.skipped + 1)
        if nonfinite == "skip":
            stepped = jax.tree.map(
                lambda new, old: new if new is old else jnp.where(finite, new, old),
                stepped,
                skipped,
            )
        residual = _keep_undelivered(accumulated, coo, undelivered)
        mean = _mean(total, workers)
        if hierarchy is not None:
            mean = hierarchy.gather(mean, layout.size)
        return _buffer.unravel(mean, layout), stepped._replace(residual=residual)

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


def _all_finite(residual: jax.Array, gradient: jax.Array, axis: AxisName) -> jax.Array:
    """Whether every accumulator of every worker is finite; equal on all."""
    # x - x is 0 where x is finite and NaN elsewhere: one reduction of one read,
    # several times faster on CPU than reducing isfinite.
    acc = residual[0] + gradient
    local = jnp.sum(acc - acc)
    return transport.psum((local != 0).astype(jnp.int32), axis) == 0


def _keep_undelivered(acc: jax.Array, coo: PaddedCOO, undelivered: PaddedCOO) -> jax.Array:
    """``acc - coo + undelivered`` for ``acc f[1, n]``, in place where it is donated."""
    if undelivered.indices is coo.indices:
        # The allreduce answers slot by slot: one scatter says all.
        return acc.at[0, coo.indices].set(undelivered.values.astype(acc.dtype), mode="drop")
    kept = acc.at[0, coo.indices].set(0.0, mode="drop")
    return kept.at[0, undelivered.indices].add(undelivered.values.astype(acc.dtype), mode="drop")


def _mean(total: PaddedCOO | jax.Array, workers: int) -> jax.Array:
    """The total over P as ``f32[n]``."""
    if not isinstance(total, PaddedCOO):
        return total.astype(jnp.float32) / workers
    values = total.values.astype(jnp.float32) / workers
    return PaddedCOO(values, total.indices, total.size).to_dense()
