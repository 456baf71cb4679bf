"""What can be wrong with a call, found at trace time and said plainly."""

from typing import Any

import jax

from optax_ext._step import _buffer
from sparse_collectives import _compat, transport
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import _hierarchical


def workers_at_init(axis: AxisName, axis_size: int | None, bound: bool) -> int:
    """P, from the bound axis or from ``axis_size``."""
    if bound:
        return workers_at_update(axis, axis_size)
    if axis_size is None:
        raise ValueError(
            f"axis={axis!r} is not bound where init is called. Call init inside the mapped "
            "function, or use optax_ext.init_state(tx, params, mesh, axis), or give axis_size=P to "
            "the transformation: init then makes the state of all P workers."
        )
    return axis_size


def workers_at_update(axis: AxisName, axis_size: int | None) -> int:
    """P of the bound axis; it has to be ``axis_size`` if that was given."""
    workers = transport.axis_size(axis)
    if axis_size is not None and workers != axis_size:
        raise ValueError(
            f"axis_size={axis_size} was given, but axis {axis!r} has {workers} workers. Give "
            f"axis_size={workers}, or leave it out."
        )
    return workers


def check_hierarchy(axis: AxisName, inner_axis: AxisName) -> None:
    """``axis`` names the workers of a node, by ``inner_axis``, and the nodes."""
    _hierarchical.outer_axis(axis, inner_axis)


def check_bound_for_hierarchy(axis: AxisName, bound: bool) -> None:
    """A hierarchical allreduce takes the number of workers in a node from the axis."""
    if not bound:
        raise ValueError(
            f"axis={axis!r} is not bound where init is called, and axis_size does not say how many "
            "workers a node has. Call init inside a function mapped over all of these axes "
            "(jax.shard_map or sparse_collectives.simulate; jax.pmap has one axis only), or use "
            f"optax_ext.init_state(tx, params, mesh, {axis!r}) with the same axis."
        )


def check_layout(expected: _buffer.Layout, got: _buffer.Layout) -> None:
    """The updates have the tree, shapes and dtypes of the parameters at init."""
    if got == expected:
        return
    if got.treedef != expected.treedef:
        raise ValueError(
            f"updates have another tree than the params that init was called with: expected "
            f"{expected.treedef}, got {got.treedef}. Call init with the parameters that you "
            "differentiate by."
        )
    paths = jax.tree_util.tree_flatten_with_path(
        jax.tree.unflatten(expected.treedef, range(len(expected.shapes)))
    )[0]
    for path, leaf in paths:
        old = (expected.shapes[leaf], expected.dtypes[leaf])
        new = (got.shapes[leaf], got.dtypes[leaf])
        if old != new:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} has shape {new[0]} and dtype {new[1]}, but "
                f"init was called with shape {old[0]} and dtype {old[1]}. Cast or reshape the "
                "gradient, or make a new state with init."
            )
    for path, leaf in paths:
        if got.dense[leaf] != expected.dense[leaf]:
            now, then = ("dense" if x[leaf] else "sparse" for x in (got.dense, expected.dense))
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {now} in one state and {then} in the "
                "other. Give both transformations the same dense_leaves."
            )


def check_residual(residual: Any, size: int, workers: int, axis: AxisName) -> None:
    """The state is this worker's part of a state for this number of workers."""
    if residual.ndim == 2 and residual.shape == (1, size):
        # Without types nothing tells one row for all workers from a row of each.
        shared = _compat.checks_varying(axis) and not _compat.is_varying(residual, axis)
        if shared and workers > 1:
            raise ValueError(
                f"state.residual is one row that all {workers} workers of axis {axis!r} share, and "
                "each must have its own: in_specs leaves the axis out, or the state was returned "
                "by out_specs without it, which keeps the residual of one worker and loses the "
                "others. Write optax_ext.state_specs(opt_state, axis) in in_specs and in out_specs."
            )
        return
    if residual.ndim == 2 and residual.shape[0] > 1:
        lead = residual.shape[0]
        raise ValueError(
            f"state.residual has {lead} rows inside the mapped function, where each worker must "
            f"see one: the state was made for {lead} workers and passed whole, or for "
            f"{lead * workers} and is split over {workers}. Pass it with "
            "in_specs=optax_ext.state_specs(opt_state, axis), or make a state for "
            f"{workers} workers with optax_ext.init_state(tx, params, mesh, {axis!r})."
        )
    raise ValueError(
        f"state.residual has shape {tuple(residual.shape)}, expected (1, {size}) inside the mapped "
        "function. Under pmap call init inside the mapped function, so that the leading axis of "
        "each worker is kept; under shard_map pass in_specs=optax_ext.state_specs(opt_state, axis)."
    )


def check_local_gradients(updates: Any, axis: AxisName) -> None:
    """The gradients are this worker's own, not yet summed over the axis."""
    if not _compat.checks_varying(axis):
        return  # Nothing in the types tells.
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if not _compat.is_varying(leaf, axis):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} is the same on every worker of axis "
                f"{axis!r}: under shard_map(check_vma=True) the gradient by a replicated parameter "
                "is already summed over the axis, so there is nothing left to compress. Write\n"
                f"    params = jax.lax.pcast(params, {axis!r}, to='varying')\n"
                "before jax.grad, or use optax_ext.make_train_step, which does it."
            )


def check_replicated_updates(updates: Any, axis: AxisName) -> None:
    """The transformation has reduced the gradients: every worker has the same updates."""
    if not _compat.checks_varying(axis):
        return  # Nothing in the types tells.
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if set(_compat.axis_names(axis)) & _compat.varying_axes(leaf):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} of tx differ between the workers of axis "
                f"{axis!r}: no transformation in it reduces the gradients over that axis. Put "
                f"optax_ext.ok_topk(density=..., axis={axis!r}) or optax_ext.dense(axis={axis!r}) "
                "first in the chain."
            )


def check_state_types(opt_state: Any, specs: Any, axis: AxisName) -> None:
    """What ``specs`` calls the same on every worker is so."""
    if not _compat.checks_varying(axis):
        return  # Nothing in the types tells.
    names = set(_compat.axis_names(axis))
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        split = set(_compat.axis_names(spec[0])) if len(spec) else set()
        if (names & _compat.varying_axes(leaf)) - split:
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} differs between the workers of axis "
                f"{axis!r}: a transformation keeps something of the gradients before they are "
                "reduced. Put it behind the allreduce in the chain. To accumulate gradients in "
                "front of it use optax_ext.multi_steps, for momentum in front of it "
                "optax_ext.momentum_correction."
            )
