"""From a pytree of gradients to the flat buffers, sparse and dense, and back.

A transformation of each worker's own gradient may be applied before the accumulation.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._error_feedback import _layout, _nonfinite, _sparse_state
from sparse_collectives import AxisName, _platform, _varying


def ravel(tree: Any, layout: _layout.TreeLayout) -> tuple[jax.Array, jax.Array]:
    """The sparse leaves as one ``f32[n]``, and the dense leaves as another array.

    A single leaf is not copied.
    """
    leaves = jax.tree.leaves(tree)

    def joined(dense: bool) -> jax.Array:
        chosen = [
            jnp.ravel(leaf).astype(jnp.float32)
            for leaf, is_dense in zip(leaves, layout.dense, strict=True)
            if is_dense == dense
        ]
        if not chosen:
            return jnp.zeros((0,), jnp.float32)
        return chosen[0] if len(chosen) == 1 else jnp.concatenate(chosen)

    return joined(False), joined(True)


def unravel(
    flat: jax.Array, dense: jax.Array, layout: _layout.TreeLayout, *, saturate: bool
) -> Any:
    """The inverse of :func:`ravel`, in the dtypes of the layout.

    With ``saturate``, finite numbers stay finite in a narrower dtype.
    """
    starts, ends = [], {False: 0, True: 0}
    for shape, is_dense in zip(layout.shapes, layout.dense, strict=True):
        starts.append(ends[is_dense])
        ends[is_dense] += math.prod(shape)
    leaves, each = [], zip(layout.shapes, layout.dtypes, layout.dense, strict=True)
    for start, (shape, dtype, is_dense) in zip(_platform.operands(starts), each, strict=True):
        whole = dense if is_dense else flat
        part = lax.dynamic_slice_in_dim(whole, start, math.prod(shape))
        leaves.append(narrowed(part, dtype, saturate=saturate).reshape(shape))
    return jax.tree.unflatten(layout.treedef, leaves)


def narrowed(x: jax.Array, dtype: Any, *, saturate: bool) -> jax.Array:
    """``x`` in ``dtype``; with ``saturate``, the largest finite number replaces larger ones."""
    if x.dtype == dtype:
        return x
    if saturate:
        most = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
    return x.astype(dtype)


def dtype_runs(layout: _layout.TreeLayout, *, dense: bool = False) -> list[tuple[int, Any]]:
    """``(stop, dtype)`` of each run of leaves of one dtype, in the order of a buffer."""
    runs: list[tuple[int, Any]] = []
    offset = 0
    for shape, dtype, is_dense in zip(layout.shapes, layout.dtypes, layout.dense, strict=True):
        if is_dense != dense or not math.prod(shape):
            continue
        offset += math.prod(shape)
        if runs and runs[-1][1] == dtype:
            runs.pop()
        runs.append((offset, dtype))
    return runs


class Elementwise(optax.GradientTransformation):
    """A transformation that treats all entries alike, in any leaf, and needs no parameters.

    It is applied to the flat buffers: separate leaves would be written once more to be joined.
    For gradients below :data:`._nonfinite.LARGEST_GRADIENT` its output and its state are
    finite, unless one of its own hyperparameters is not. It is therefore enough to check the
    gradients, and its output need not be written to memory for a check.
    """


class Loaded(NamedTuple):
    """The gradients of a worker as flat buffers, transformed.

    Attributes:
      sparse: ``f32[n]``, the increments of the leaves in the sparse buffer.
      dense: ``f32[d]``, the increments of the dense leaves.
      local: the next state of the transformation, with a leading axis of 1.
      left_out: ``i32[]``, entries of the gradients that were hidden from the transformation.
      seen: for each buffer that is not empty, the gradients ``f32[1, size]`` and the increment of
        the largest gradient, ``f32[1, 1]``, if these decide whether all increments are finite;
        otherwise empty.
    """

    sparse: jax.Array
    dense: jax.Array
    local: Any
    left_out: jax.Array
    seen: tuple[tuple[jax.Array, jax.Array], ...] = ()


def init_local(tx: optax.GradientTransformation | None, layout: _layout.TreeLayout) -> Any:
    """The state of an :class:`Elementwise` transformation, in float32, without a leading axis."""
    if tx is None:
        return ()
    sizes = (layout.size, layout.dense_size)
    return tx.init([jnp.zeros((size,), jnp.float32) for size in sizes if size])


def loaded(
    tx: optax.GradientTransformation | None,
    gradients: Any,
    state: Any,
    layout: _layout.TreeLayout,
    *,
    axis: AxisName,
    drop: bool,
) -> Loaded:
    """The gradients as flat buffers, transformed.

    Args:
      tx: an :class:`Elementwise` transformation, or None.
      gradients: the gradients of this worker.
      state: as in the optimizer state, with a leading axis of 1.
      layout: the layout of the gradients.
      axis: the axis of the workers.
      drop: whether the transformation gets zeros for numbers that are not finite, which would
        otherwise stay in its state.
    """
    none = jnp.zeros((), jnp.int32)
    if tx is None:
        return Loaded(*ravel(gradients, layout), (), none)
    gradients = jax.tree.map(_in_float32, gradients)
    gradients = [x for x in ravel(gradients, layout) if x.size]
    left_out = none
    if drop:
        gradients, left_out = _nonfinite.zeroed(gradients, _nonfinite.LARGEST_GRADIENT)
    # In the shape of the state, so that XLA writes in place if the state is donated.
    before, step = _sparse_state.with_lead(gradients), jax.vmap(tx.update, axis_size=1)
    # A learning rate in float64 would widen them.
    made = iter(map(_in_float32, _sparse_state.without_lead(step(before, state)[0])))
    # A CPU computes the moments again for the choice between new and old state: it would write a
    # shared result twice. On a GPU the gradients would then be written as one more buffer.
    again = _platform.by_platform(lax.optimization_barrier, lambda x: x, before)
    state_after = step(again, state)[1]
    # All increments are finite if the increment of the largest gradient is.
    largest = [jnp.full_like(x[:, :1], _nonfinite.LARGEST_GRADIENT) for x in before]
    probed: Any = step(largest, _first_of(state))[0]
    empty = jnp.zeros((0,), jnp.float32)
    return Loaded(
        next(made) if layout.size else empty,
        next(made) if layout.dense_size else empty,
        _varying.to_varying(state_after, axis),
        left_out,
        () if drop else tuple(zip(before, probed, strict=True)),
    )


def _first_of(state: Any) -> Any:
    """The first entry of each buffer in a state, ``f32[1, size]``; the rest is unchanged."""
    return jax.tree.map(lambda x: x[:, :1] if x.ndim == 2 else x, state)


# The fields of states that depend on the number of steps only, by which schedules go.
_OF_SCHEDULES: dict[type, tuple[str, ...]] = {
    optax.ScaleByScheduleState: ("count",),
    optax.InjectStatefulHyperparamsState: ("count", "hyperparams", "hyperparams_states"),
    optax.ConditionallyTransformState: ("step",),
    optax.ConditionallyMaskState: ("step",),
    optax.contrib.ScheduleFreeState: ("step_count",),
}


def with_schedules(held: Any, taken: Any) -> Any:
    """``held``, the state of a worker that left out a step, with the schedules of ``taken``.

    In rounds the other workers have taken the step, and their learning rates have moved on.
    """

    def has_schedule(node: Any) -> bool:
        return type(node) in _OF_SCHEDULES

    def one(held: Any, taken: Any) -> Any:
        if not has_schedule(held):
            return held
        names = _OF_SCHEDULES[type(held)]
        fields = zip(held._fields, held, taken, strict=True)
        return type(held)(*(b if name in names else with_schedules(a, b) for name, a, b in fields))

    return jax.tree.map(one, held, taken, is_leaf=has_schedule)


def init_of_leaves(tx: optax.GradientTransformation, params: Any) -> Any:
    """The state of a transformation of leaves, in float32, without a leading axis."""
    return tx.init(jax.tree.map(_in_float32, params))


def transformed(
    tx: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    params: Any,
    *,
    axis: AxisName,
    drop: bool,
    extra: Mapping[str, Any],
) -> tuple[Any, Any, jax.Array]:
    """The gradients as leaves in float32, transformed; the next state; entries left out."""
    # Increments of a 16-bit leaf are computed in float32, in which they accumulate.
    gradients = jax.tree.map(_in_float32, gradients)
    none = jnp.zeros((), jnp.int32)
    gradients, left_out = _nonfinite.zeroed(gradients) if drop else (gradients, none)
    params = None if params is None else jax.tree.map(_in_float32, params)
    tx = optax.with_extra_args_support(tx)
    gradients, state = tx.update(gradients, _sparse_state.without_lead(state), params, **extra)
    gradients = jax.tree.map(_in_float32, gradients)
    return gradients, _varying.to_varying(_sparse_state.with_lead(state), axis), left_out


def describe(tx: optax.GradientTransformation | None, state: Any) -> str:
    """The names of the states in ``state``, for a checkpoint's metadata.

    Transformations of optax do not record their arguments, and a learning rate may change from
    run to run; only the kind of state has to agree.
    """
    if tx is None:
        return "none"
    names: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, tuple):
            if hasattr(node, "_fields"):
                names.append(type(node).__name__)
            for child in node:
                collect(child)

    collect(state)
    return ", ".join(names) or "no state"


def _in_float32(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)
