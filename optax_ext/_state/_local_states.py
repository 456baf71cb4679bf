"""Resharding: the states of the transformations before an exchange (``local``)."""

import re
import warnings
from typing import Any

import jax
import numpy as np

from optax_ext._error_feedback import _layout, _trace_checks
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _rows, _shards

# Fields that may begin with zeros while the step count goes on: it makes some steps smaller. With
# second moments of zero they would be far too large.
_FIRST_MOMENTS = re.compile(r"\.(mu|trace)\b")

# The arrays of one transformation by their paths in its state.
_State = dict[str, Any]


def taken_over(old: SparseAllreduceState, new: SparseAllreduceState) -> Any:
    """``new.local`` with what it has in common with ``old.local``.

    Each new worker takes the rows of an old one. The settings may differ, and with them the
    transformations. One takes over the state of another one that has the same arrays, in their
    order; all arrays of a state, or none of them.
    """
    before = [*_states(old.local).values()]
    rows: dict[str, Any] = {}
    begun: list[str] = []
    for prefix, fresh in _states(new.local).items():
        match = _match(fresh, before)
        if match is not None:
            before = [state for state in before if state is not match]
            moved = {
                name: _moved(match[name], x, old, new) for name, x in fresh.items() if name in match
            }
        elif {*fresh} == {".count"}:
            # A schedule counts the steps that were not skipped, as the exchange does.
            counts = np.broadcast_to(np.asarray(old.count), np.shape(fresh[".count"]))
            moved = {".count": _rows.placed(counts, fresh[".count"])}
        else:
            moved = {}
        if not moved or any(x is None for x in moved.values()):
            fields = dict.fromkeys(re.findall(r"^\W*(\w*)", name)[0] for name in fresh)
            begun.append(f"local{prefix} ({', '.join(fields)})")
            moved = {}
        rows |= {prefix + name: moved.get(name, x) for name, x in fresh.items()}
    if begun:
        warnings.warn(
            f"states of fresh_state begin again, as opt_state has none of their kind and shapes: "
            f"{', '.join(begun)}. Make fresh_state with the settings of opt_state to keep them.",
            stacklevel=_trace_checks.level_of_caller(),
        )
    paths, tree = jax.tree_util.tree_flatten_with_path(new.local)
    return tree.unflatten([rows[jax.tree_util.keystr(path)] for path, _ in paths])


def _states(local: Any) -> dict[str, _State]:
    """The arrays of each transformation, by the path of its state."""
    found: dict[str, _State] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(local):
        # The first field is of the state, and others are of what it has, such as parameters.
        fields = (i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey))
        at = next(fields, 0)
        of = found.setdefault(jax.tree_util.keystr(path[:at]), {})
        of[jax.tree_util.keystr(path[at:])] = leaf
    return found


def _match(fresh: _State, before: list[_State]) -> _State | None:
    """The first state that has the same arrays, or at least the needed ones."""
    for state in before:
        if {*state} == {*fresh}:
            return state
    needed = {name for name in fresh if not _FIRST_MOMENTS.match(name)}
    found = (state for state in before if needed <= {*state})
    return next(found, None) if needed > {".count"} else None


def _moved(before: Any, fresh: Any, old: SparseAllreduceState, new: SparseAllreduceState) -> Any:
    """An array of the old workers for the new ones; None if it is of another shape."""
    host, kind = np.asarray(before), _buffer_of(new, fresh)
    host = _of_workers(old, host, _buffer_of(old, host))
    host = host[np.arange(new.workers) % len(host)]
    if kind is not None:
        whole = new.layout.dense_size if kind else new.layout.size
        if host.shape[1:] != (whole,):
            return None
        parts = _shards.parted(host, new.layout, dense=kind)
        return _rows.placed(parts.reshape(fresh.shape), fresh)
    if host.shape[1:] != np.shape(fresh)[1:]:
        return None
    # The devices of a worker are adjacent, and have the value of the worker.
    each = np.arange(len(fresh)) // (len(fresh) // new.workers)
    return _rows.placed(host[each], fresh)


def _buffer_of(node: SparseAllreduceState, array: Any) -> bool | None:
    """Whether it is of the dense buffer of a part, or of the sparse one; None for neither."""
    if not node.layout.sharding.axes or array.ndim != 2 or not array.shape[1]:
        return None
    part = _layout.device_layout(node.layout)
    return {part.dense_size: True, part.size: False}.get(array.shape[1])


def _of_workers(node: SparseAllreduceState, array: np.ndarray, dense: bool | None) -> np.ndarray:
    """A row for each worker: its buffer, joined from its devices, or their common value."""
    if len(array) != node.workers * node.devices:
        return array
    parts = array.reshape(node.workers, node.devices, *array.shape[1:])
    return parts[:, 0] if dense is None else _shards.joined(parts, node.layout, dense=dense)
