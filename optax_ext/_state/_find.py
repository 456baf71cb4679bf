"""Finds the states of allreduces in an optimizer state, and optax's wrappers around them.

A wrapper around :func:`sparse_allreduce` or :func:`dense` sees local gradients. Its accumulators
differ between the workers, and so may decisions that depend on the gradients.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._state import _nnx
from optax_ext._step import _sparse_state
from optax_ext._step._dense import DenseState
from optax_ext._step._sparse_state import SparseAllreduceState, StepInfo
from sparse_collectives import _compat


def is_state(node: Any) -> bool:
    """Whether it is the state of a :func:`sparse_allreduce`."""
    return isinstance(node, SparseAllreduceState)


def get_states(opt_state: Any) -> list[SparseAllreduceState]:
    """Every :class:`SparseAllreduceState` in ``opt_state``: one for each bucket or group."""
    return list(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def get_state(opt_state: Any) -> SparseAllreduceState | None:
    """The first :class:`SparseAllreduceState` anywhere in ``opt_state``, or None.

    ``opt_state`` may be an ``nnx.Optimizer``, whose variables are replaced by their arrays.
    """
    return next(iter(get_states(_nnx.arrays(opt_state))), None)


def takes_local_steps(opt_state: Any) -> bool:
    """Whether workers take steps on their own between two exchanges."""
    rounds = any(state.settings.every > 1 for state in get_states(opt_state))
    return rounds or bool(moved(opt_state))


def moved(opt_state: Any) -> list[Any]:
    """The parameter change of this worker in each ``local_steps``, with a leading axis."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_has_moved)
    return [node.moved for node in nodes if _has_moved(node)]


def _has_moved(node: Any) -> bool:
    """Whether it is the state of ``local_steps``, whose module imports this one."""
    return {"inner", "outer", "moved"} <= set(getattr(type(node), "_fields", ()))


def get_info(opt_state: Any) -> StepInfo | None:
    """What the last step did, from anywhere in a chain; None without an allreduce.

    For several states (buckets, groups of parameters) counts and words are added up, and
    thresholds come from the largest buffer. Outside of the mapped function the per-worker
    fields have a leading axis of P. With :func:`dense` all entries are selected and delivered,
    and per-worker fields have a leading axis of 1, since all workers are alike. ``opt_state`` may
    be an ``nnx.Optimizer``.
    """
    opt_state = _nnx.arrays(opt_state)
    found = reductions(opt_state)
    if not found:
        return None
    infos = [_info_of(state) for state in found]
    states = get_states(opt_state)
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

    return jax.tree.map(quiet, opt_state, is_leaf=_is_reduction)


def _is_reduction(node: Any) -> bool:
    return isinstance(node, SparseAllreduceState | DenseState)


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


def axis_of(opt_state: Any) -> Hashable:
    """The axis that the allreduces of an optimizer state were made for.

    Raises:
      ValueError: there is none, or they name different axes.
    """
    axes = _axes_of(jax.tree.structure(opt_state))
    if not axes:
        raise ValueError(
            "opt_state has no sparse allreduce, and no optax_ext.dense, in it, so the axis over "
            "which gradients are averaged is unknown. Make it with optax_ext.init_state(tx, "
            "params, mesh), where tx is an optimizer of optax_ext, or has "
            "optax_ext.ok_topk(density=..., axis='data') or optax_ext.dense(axis='data') first in "
            "its chain."
        )
    if len(axes) > 1:
        names = " and ".join(map(repr, axes))
        raise ValueError(
            f"tx has allreduces over different axes, {names}: all of them average the gradients of "
            "the same workers. Give each the same axis=, as a tuple if it has several names."
        )
    return axes[0]


@functools.lru_cache(maxsize=256)
def _axes_of(structure: Any) -> list[Hashable]:
    """The axes that the reductions name; cached, since every call asks for them."""
    opt_state = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    axes = (
        state.settings.axis if isinstance(state, SparseAllreduceState) else state.axis
        for state in reductions(opt_state)
    )
    return list(dict.fromkeys(axes))


_REFUSED = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "decides by the gradients of one worker, so that some workers would enter the allreduce "
        "and wait for those that don't",
        "For local gradients use nonfinite='skip' (the default), by which all workers skip a step "
        "by agreement",
    ),
    optax.ConditionallyTransformState: (
        "optax.conditionally_transform",
        "passes on the gradients of one worker when its condition is not met, so that the "
        "workers' parameters would drift apart",
        "To begin with a dense allreduce, give dense_steps= to the sparse one",
    ),
    optax.ConditionallyMaskState: (
        "optax.conditionally_mask",
        "drops the gradients of a step when its condition is not met: they would be in no "
        "residual, and lost",
        "To exchange at every k-th step only, use optax_ext.multi_steps",
    ),
}


def accumulators(inner: Any, params: Any) -> Any:
    """Zeros for the gradients that each worker accumulates around ``inner``, ``f32[P, ...]``.

    Raises:
      ValueError: a dense reduction whose axis is not bound.
    """
    inside = reductions(inner)
    sparse = [state for state in inside if isinstance(state, SparseAllreduceState)]
    axis = sparse[0].settings.axis if sparse else inside[0].axis
    bound = _compat.axis_is_bound(axis)
    if not sparse and not bound and not _compat.ranks(axis):
        raise ValueError(
            f"axis={axis!r} is not bound where init is called. Call init inside the mapped "
            "function, or use optax_ext.init_state(tx, params, mesh)."
        )
    lead = sparse[0].workers if sparse else 1
    acc = jax.tree.map(lambda x: jnp.zeros((lead, *jnp.shape(x)), jnp.float32), params)
    return _compat.to_varying(acc, axis) if bound else acc


@dataclasses.dataclass(frozen=True)
class PerWorker:
    """Values of each worker; a leaf of the tree that :func:`mark` returns.

    Attributes:
      tree: accumulated gradients, or other values. The gradients of ``optax.MultiSteps`` have no
        axis for the workers; outside of the mapped function they are concatenated along the first
        axis.
      workers: their number, P outside of the mapped function; None for gradients before
        :func:`dense`, whose state does not say it.
      adds_up: whether only the sum over the workers counts, as for gradients; otherwise each worker
        has a value of its own, such as the state of an inner optimizer.
    """

    tree: Any
    workers: int | None
    adds_up: bool = True


def reductions(opt_state: Any) -> list[Any]:
    """The states of :func:`sparse_allreduce` and :func:`dense` in an optimizer state."""
    return list(filter(_is_reduction, jax.tree.leaves(opt_state, is_leaf=_is_reduction)))


def accumulates(node: Any) -> bool:
    """Whether it is the state of a wrapper that accumulates gradients, by optax's field names."""
    return {"inner_opt_state", "acc_grads"} <= set(getattr(type(node), "_fields", ()))


def mark(opt_state: Any) -> Any:
    """The state with a :class:`PerWorker` for each tree of per-worker values.

    Raises:
      ValueError: a wrapper that can't be around a reduction; two reductions of the same
        gradients; accumulators that were made outside of the mapped function.
    """
    _check_refused(opt_state)
    _check_chained(opt_state)

    def marked(node):
        if _has_moved(node):
            workers = node.missed.shape[0]
            return node._replace(
                missed=PerWorker(node.missed, workers),
                inner=PerWorker(node.inner, workers, adds_up=False),
                moved=PerWorker(node.moved, workers),
                outer=mark(node.outer),
            )
        if not accumulates(node):
            return node
        inside = reductions(node.inner_opt_state)
        inner = mark(node.inner_opt_state)
        if not inside:
            # After the reduction all workers have the same gradients.
            return node._replace(inner_opt_state=inner)
        if isinstance(node, optax.MultiStepsState):
            _check_multi_steps(node, inside)
        sparse = [state for state in inside if isinstance(state, SparseAllreduceState)]
        workers = sparse[0].workers if sparse else None
        return node._replace(inner_opt_state=inner, acc_grads=PerWorker(node.acc_grads, workers))

    return jax.tree.map(marked, opt_state, is_leaf=lambda x: accumulates(x) or _has_moved(x))


def _check_refused(opt_state: Any) -> None:
    refused = tuple(_REFUSED)
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, refused)):
        if not isinstance(node, refused):
            continue
        if reductions(node.inner_state):
            name, why, instead = _REFUSED[type(node)]
            raise ValueError(
                f"{name} is around the allreduce of optax_ext. It {why}. Put it after the "
                f"allreduce: optax.chain(optax_ext.ok_topk(...), {name}(optimizer, ...)). "
                f"{instead}."
            )
        _check_refused(node.inner_state)


def _check_chained(opt_state: Any) -> None:
    """Checks that no chain reduces the same gradients twice; after the first all are equal."""

    def twice(node: Any) -> bool:
        if type(node) is not tuple:  # The state of an optax.chain.
            return False
        sparse = [state.layout for state in node if isinstance(state, SparseAllreduceState)]
        trees = [layout.treedef for layout in sparse if layout.shapes]
        dense = any(isinstance(state, DenseState) for state in node)
        # The buckets of `bucketed` are also in a tuple, but each has other leaves.
        return len({*trees}) < len(trees) or (dense and bool(trees))

    if any(twice(node) for node in jax.tree.leaves(opt_state, is_leaf=twice)):
        raise ValueError(
            "tx has two allreduces of the same gradients, one after the other: after the first, "
            "all workers have the same gradients, so the second has nothing to add up. Keep one of "
            "them. (For leaves of two kinds: dense_leaves=, optax.masked or optax.multi_transform.)"
        )


def _check_multi_steps(node: Any, inside: list[Any]) -> None:
    """Checks that optax's accumulators can be split over the workers, and that all decide alike."""
    # The states of optax.skip_not_finite and optax.skip_large_updates.
    if isinstance(node.skip_state, dict) and "should_skip" in node.skip_state:
        raise ValueError(
            "optax.MultiSteps around the allreduce of optax_ext has a should_skip_update_fn that "
            "decides by the gradients of one worker, so that some workers would enter the "
            "allreduce and wait for those that don't. Leave it out, and use nonfinite='skip' (the "
            "default) in optax_ext.multi_steps; or put MultiSteps after the allreduce."
        )
    leaves = jax.tree_util.tree_leaves_with_path(node.acc_grads)
    for path, leaf in leaves:
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a scalar: the accumulators of "
                "optax.MultiSteps are split over the workers along the first dimension, and a "
                "scalar has none. Use optax_ext.multi_steps(tx, k) instead of "
                "optax.MultiSteps(tx, k), "
                "or give the parameter the shape (1,)."
            )
    for state in inside:
        if not isinstance(state, SparseAllreduceState):
            continue
        if state.layout.treedef != jax.tree.structure(node.acc_grads):
            continue  # A part of the parameters, as in optax.masked.
        workers = state.workers
        for (path, leaf), shape in zip(leaves, state.layout.shapes, strict=True):
            expected = (workers * shape[0], *shape[1:])
            if np.shape(leaf) != expected:
                raise ValueError(
                    f"acc_grads{jax.tree_util.keystr(path)} of optax.MultiSteps has shape "
                    f"{np.shape(leaf)}, expected {expected} for {workers} workers: the state was "
                    "made outside of the mapped function. Make it with "
                    "optax_ext.init_state(tx, params, mesh)."
                )
