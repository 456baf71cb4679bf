"""Finds the states of allreduces in an optimizer state, and reads what the last step did."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._error_feedback import _sparse_state
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._roles import Rows
from optax_ext._error_feedback._sparse_state import SparseAllreduceState, StepInfo
from optax_ext._state import _index, _nnx, _placement
from optax_ext._state._wrappers import get_states as get_states
from optax_ext._state._wrappers import is_state as is_state
from optax_ext._state._wrappers import reductions as reductions
from sparse_collectives import _axes, _validation, _varying


def get_state(opt_state: Any) -> SparseAllreduceState | None:
    """The first :class:`SparseAllreduceState` anywhere in ``opt_state``, or None.

    ``opt_state`` may be an ``nnx.Optimizer``, whose variables are replaced by their arrays.
    """
    return next(iter(get_states(_nnx.arrays(opt_state))), None)


def get_info(opt_state: Any) -> StepInfo | None:
    """What the last step did, from anywhere in a chain; None without an allreduce.

    For several states (buckets, groups of parameters) counts and words are added up, and
    thresholds come from the largest buffer. Outside of the mapped function the per-worker
    fields have a leading axis of P. With :func:`dense` all entries are selected and delivered,
    and per-worker fields have a leading axis of 1, since all workers are alike. ``opt_state`` may
    be an ``nnx.Optimizer``.
    """
    found = reductions(_nnx.arrays(opt_state))
    return _joined(found) if found else None


@_placement.on_auto_axes
def _joined(found: list[Any]) -> StepInfo:
    infos = [_info_of(state) for state in found]
    states = get_states(found)
    largest = infos[0]
    if states:
        largest = max(states, key=lambda state: state.layout.size).info
    added = ("selected", "delivered", "overflow", "words", "useful", "arrived")
    return largest._replace(**{name: sum(getattr(info, name) for info in infos) for name in added})


def at_rest(opt_state: Any) -> Any:
    """The state after a step without an exchange, whose info is zero."""

    def quiet(node: Any) -> Any:
        if isinstance(node, SparseAllreduceState):
            return node._replace(info=jax.tree.map(jnp.zeros_like, node.info))
        if isinstance(node, DenseState):
            zeros = {name: jnp.zeros_like(getattr(node, name)) for name in ("delivered", "words")}
            return dataclasses.replace(node, **zeros)
        return node

    kinds = SparseAllreduceState | DenseState
    return jax.tree.map(quiet, opt_state, is_leaf=lambda node: isinstance(node, kinds))


def _info_of(state: SparseAllreduceState | DenseState) -> StepInfo:
    if isinstance(state, SparseAllreduceState):
        return state.info
    everything = jnp.asarray(state.delivered)[None]
    info = _sparse_state.per_worker(_sparse_state.no_info(), lambda x: x[None])
    return info._replace(
        selected=everything,
        arrived=everything,
        delivered=state.delivered,
        words=state.words,
        useful=jnp.asarray(state.words)[None],
    )


def workers_of(opt_state: Any) -> int:
    """P: of a sparse reduction, or of a wrapper around a dense one; 0 if nothing has rows."""
    if sparse := get_states(opt_state):
        return max(state.workers for state in sparse)
    leaves, structure = jax.tree.flatten(opt_state)
    pairs = zip(_index.index_of(structure).leaves, leaves, strict=True)
    return next((len(x) for known, x in pairs if known.rows is Rows.WORKER), 0)


def axis_of(opt_state: Any) -> Hashable:
    """The axis of the workers; see :attr:`._index.Index.axis`."""
    return _index.of(opt_state).axis


def accumulators(inner: Any, params: Any) -> Any:
    """Zeros for the gradients that each worker accumulates around ``inner``, ``f32[P, ...]``.

    Raises:
      ValueError: a dense reduction whose axis is not bound.
      TypeError: complex parameters.
    """
    sparse, axis = get_states(inner), axis_of(inner)
    bound = _axes.axis_is_bound(axis)
    if not sparse and not bound and not _axes.ranks(axis):
        raise ValueError(
            f"axis={axis!r} is not bound where init is called. Call init inside the mapped "
            "function, or use optax_ext.init_state(tx, params, mesh)."
        )
    lead = sparse[0].workers if sparse else 1
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.iscomplexobj(x):
            _validation.check_float(f"params{jax.tree_util.keystr(path)}", jnp.result_type(x))
    acc = jax.tree.map(lambda x: jnp.zeros((lead, *jnp.shape(x)), jnp.float32), params)
    return _varying.to_varying(acc, axis) if bound else acc
