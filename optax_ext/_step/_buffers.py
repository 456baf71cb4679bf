"""Between a pytree of gradients and the flat buffers: the one that is sparsified, and the rest.

On the way a transformation of each worker's own gradient may stand in front of the accumulation.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import _accumulation, _layout, _sparse_state
from sparse_collectives import AxisName, _compat


def ravel(tree: Any, layout: _layout.TreeLayout) -> tuple[jax.Array, jax.Array]:
    """The sparse leaves as one ``f32[n]``, and the dense ones as another.

    A single leaf costs no copy.
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

    With ``saturate``, what is finite stays so in a narrower dtype.
    """
    leaves, offsets = [], {False: 0, True: 0}
    for shape, dtype, is_dense in zip(layout.shapes, layout.dtypes, layout.dense, strict=True):
        size, offset = math.prod(shape), offsets[is_dense]
        part = (dense if is_dense else flat)[offset : offset + size]
        leaves.append(narrowed(part, dtype, saturate=saturate).reshape(shape))
        offsets[is_dense] += size
    return jax.tree.unflatten(layout.treedef, leaves)


def narrowed(x: jax.Array, dtype: Any, *, saturate: bool) -> jax.Array:
    """``x`` in ``dtype``; with ``saturate``, the largest finite number stands for larger ones."""
    if x.dtype == dtype:
        return x
    if saturate:
        most = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
    return x.astype(dtype)


def dtype_runs(layout: _layout.TreeLayout) -> list[tuple[int, Any]]:
    """``(stop, dtype)`` of each run of leaves of one dtype, in the order of the sparse buffer."""
    runs: list[tuple[int, Any]] = []
    offset = 0
    for shape, dtype, is_dense in zip(layout.shapes, layout.dtypes, layout.dense, strict=True):
        if is_dense or not math.prod(shape):
            continue
        offset += math.prod(shape)
        if runs and runs[-1][1] == dtype:
            runs.pop()
        runs.append((offset, dtype))
    return runs


class Elementwise(optax.GradientTransformation):
    """One that treats every entry alike, whatever its leaf, and asks for no parameters.

    It is given the flat buffers, once they are made: a leaf for itself would be written once
    more, to be joined. What it makes of gradients below :data:`._accumulation.LARGEST_GRADIENT`,
    and what it keeps of them, is finite, unless a number that it was made with is not: so it is
    enough to look at the gradients, and what it makes need not be written to be looked at.
    """


class Loaded(NamedTuple):
    """The gradients of a worker as flat buffers, transformed.

    Attributes:
      sparse: ``f32[n]``, the increments of the leaves in the sparse buffer.
      dense: ``f32[d]``, those of the leaves that go dense.
      local: the next state of the transformation, with a leading axis of 1.
      left_out: ``i32[]``, entries of the gradients that the transformation was not shown.
      seen: of each buffer that is not empty the gradients ``f32[1, size]``, and what is made of the
        largest gradient, ``f32[1, 1]``, where these say whether all increments are finite; else
        nothing.
    """

    sparse: jax.Array
    dense: jax.Array
    local: Any
    left_out: jax.Array
    seen: tuple[tuple[jax.Array, jax.Array], ...] = ()


def init_local(tx: optax.GradientTransformation | None, layout: _layout.TreeLayout) -> Any:
    """The state of one that is :class:`Elementwise`, in float32, without a leading axis."""
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
      gradients: of this worker.
      state: as in the optimizer state: with a leading axis of 1.
      layout: of the gradients.
      axis: of the workers.
      drop: whether what is not finite is zero to the transformation: it would stay in its state
        for good.
    """
    none = jnp.zeros((), jnp.int32)
    if tx is None:
        return Loaded(*ravel(gradients, layout), (), none)
    gradients = jax.tree.map(_in_float32, gradients)
    gradients = [x for x in ravel(gradients, layout) if x.size]
    left_out = none
    if drop:
        gradients, left_out = _accumulation.zeroed(gradients, _accumulation.LARGEST_GRADIENT)
    # In the shape of the state: XLA then writes in place where it is donated.
    before, step = _sparse_state.with_lead(gradients), jax.vmap(tx.update)
    made = iter(_sparse_state.without_lead(step(before, state)[0]))
    # Computed once more, where it is chosen or not: what is shared would be written twice.
    state_after = step(jax.lax.optimization_barrier(before), state)[1]
    # All are finite if one of the largest gradient is.
    largest = [jnp.full_like(x[:, :1], _accumulation.LARGEST_GRADIENT) for x in before]
    probed: Any = step(largest, _first_of(state))[0]
    empty = jnp.zeros((0,), jnp.float32)
    return Loaded(
        next(made) if layout.size else empty,
        next(made) if layout.dense_size else empty,
        _compat.to_varying(state_after, axis),
        left_out,
        () if drop else tuple(zip(before, probed, strict=True)),
    )


def _first_of(state: Any) -> Any:
    """The first entry of what is kept of a buffer, ``f32[1, size]``, and all else as it is."""
    return jax.tree.map(lambda x: x[:, :1] if x.ndim == 2 else x, state)


def init_of_leaves(tx: optax.GradientTransformation, params: Any) -> Any:
    """The state of one that looks at leaves, in float32, without a leading axis."""
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
    """The gradients as leaves in float32, transformed; the next state; what was left out."""
    # The increments of a 16-bit leaf add up in float32, and so they are made in it.
    gradients = jax.tree.map(_in_float32, gradients)
    none = jnp.zeros((), jnp.int32)
    gradients, left_out = _accumulation.zeroed(gradients) if drop else (gradients, none)
    params = None if params is None else jax.tree.map(_in_float32, params)
    tx = optax.with_extra_args_support(tx)
    gradients, state = tx.update(gradients, _sparse_state.without_lead(state), params, **extra)
    return gradients, _compat.to_varying(_sparse_state.with_lead(state), axis), left_out


def describe(tx: optax.GradientTransformation | None, state: Any) -> str:
    """The states that it keeps, as :func:`init_local` made them, for a checkpoint's metadata.

    optax's transformations don't say what they were made with, and a rate may change from
    run to run; what has to agree is what is kept.
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
