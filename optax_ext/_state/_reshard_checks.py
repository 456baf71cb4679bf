"""What resharding checks of two states before it moves anything."""

import dataclasses
from typing import Any

import jax
import numpy as np

from optax_ext._error_feedback import _layout, _trace_checks
from optax_ext._error_feedback._roles import Role, Rows
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _host_checks

# Nodes of a state with their paths, and its tree.
Parts = tuple[list[tuple[Any, Any]], Any]
_APPLY = "apply what the residuals hold with optax_ext.flush or optax_ext.consolidate first."


def check_optimizers(old: Parts, new: Parts) -> None:
    """Both states are of one optimizer; the error names a part that only one of them has.

    Or a parameter that only one of them has, since the state of an optimizer has parts for each.
    """
    (before, old_tree), (after, tree) = old, new
    if old_tree == tree:
        return
    fresh = dict(after)
    for path, node in before:
        other = fresh.get(path)
        if isinstance(node, SparseAllreduceState) and isinstance(other, SparseAllreduceState):
            _check_parameters(jax.tree_util.keystr(path), node.layout, other.layout)
    here, there = ([jax.tree_util.keystr(path) for path, _ in nodes] for nodes in (before, after))
    pairs = (("opt_state", here, there), ("fresh_state", there, here))
    differences = [
        f"only {state} has {missing[0] or 'a single array'}"
        for state, names, others in pairs
        if (missing := [name for name in names if name not in others])
    ]
    raise ValueError(
        "opt_state and fresh_state are states of different optimizers: "
        f"{' and '.join(differences) or f'got {old_tree}, and {tree}'}. Make fresh_state with the "
        f"optimizer of opt_state. To go on with another one, {_APPLY}"
    )


def check(path: str, old: Any, new: Any, now: Any, workers: tuple[int, int]) -> None:
    """A part of the new state can take over what a part of the old state holds.

    Args:
      path: of both.
      old: a node of the old state.
      new: a node of the new one.
      now: its entry in the index.
      workers: of the old and of the new state.
    """
    if not isinstance(new, SparseAllreduceState):
        if now.role is not Role.SHARED and not all(workers):
            raise ValueError(
                f"opt_state{path} holds accumulated gradients that optax_ext.dense has not "
                "averaged yet, and its state does not record the number of workers. Reshard when "
                "the accumulators are empty, and take the state around them from fresh_state."
            )
        before, after = (
            _of_worker(np.shape(x), now.rows, n) for x, n in zip((old, new), workers, strict=True)
        )
        if before != after:
            raise ValueError(
                f"opt_state{path} has shape {before}, but fresh_state{path} has {after}. Make "
                f"fresh_state with the parameters of opt_state. To go on with other ones, {_APPLY}"
            )
        return
    _host_checks.check_all_rows(f"opt_state{path}", old)
    _host_checks.check_all_rows(f"fresh_state{path}", new)
    # The same leaves in any sharding, since which of them must be dense may depend on the sharding.
    before, after = (
        dataclasses.replace(x.layout, sharding=_layout.unsharded(x.layout.shapes))
        for x in (old, new)
    )
    if before != after:
        _check_parameters(path, before, after)
        _trace_checks.check_layout(after, before)
    if (old.settings.local == "none") != (new.settings.local == "none"):
        bare = old.settings.local == "none"
        ours, theirs = ("without", "with") if bare else ("with", "without")
        raise ValueError(
            f"opt_state{path} has residuals {ours} a local transformation, such as a learning "
            f"rate, and fresh_state has residuals {theirs} one, so their units differ. Give local= "
            "to both transformations or to none."
        )
    if old.settings.whole != new.settings.whole:
        steps, others = "steps of the parameters", "what an optimizer after them takes"
        ours, theirs = (steps, others) if old.settings.whole else (others, steps)
        raise ValueError(
            f"opt_state{path} has residuals that are {ours}, and those of fresh_state are "
            f"{theirs}, so their units or signs differ. Make both states with complete "
            "optimizers, such as sparse_adamw and sparse_sgd, or none of them."
        )


def _of_worker(shape: tuple[int, ...], rows: Rows, workers: int) -> tuple[int, ...]:
    """The shape of what one worker has in an array with rows."""
    if rows is Rows.NONE or not shape:
        return shape
    return (shape[0] // workers, *shape[1:]) if rows is Rows.JOINED else shape[1:]


def _check_parameters(path: str, old: _layout.TreeLayout, new: _layout.TreeLayout) -> None:
    """Both states are for leaves of the same names, shapes and dtypes."""
    here, there = (
        {
            jax.tree_util.keystr(tuple(name)): f"has shape {shape} and dtype {dtype}"
            for name, shape, dtype in zip(
                _trace_checks.names_of(layout), layout.shapes, layout.dtypes, strict=True
            )
        }
        for layout in (old, new)
    )
    for name in (*here, *there):
        ours, theirs = (x.get(name, "is not there") for x in (here, there))
        if ours != theirs:
            raise ValueError(
                f"params{name} {ours} in opt_state{path}, but {theirs} in fresh_state. Make both "
                "with the same parameters: residuals move between workers, and not between leaves. "
                f"To go on with other parameters, {_APPLY}"
            )


def check_readable(opt_state: Any) -> None:
    """This process can read all of the arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} is spread over several processes, so that "
                "this one can't read all of it. Restore it in every process, with "
                "optax_ext.abstract_state(..., sharding=jax.sharding.SingleDeviceSharding("
                "jax.local_devices()[0])), or gather it with "
                "jax.experimental.multihost_utils.process_allgather(opt_state, tiled=True)."
            )
