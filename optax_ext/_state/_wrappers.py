"""The reductions in an optimizer state, and wrappers of optax that can't be around one.

Their decisions would depend on the gradients of one worker.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._roles import FIELDS, Role
from optax_ext._error_feedback._sparse_state import SparseAllreduceState

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
_REDUCTIONS = SparseAllreduceState, DenseState


def reductions(tree: Any) -> list[Any]:
    """The states of :func:`sparse_allreduce` and :func:`dense` in a tree."""
    return _nodes(tree, _REDUCTIONS)


def is_reduction(node: Any) -> bool:
    """Whether it is one of the states of :func:`reductions`."""
    return isinstance(node, _REDUCTIONS)


def is_state(node: Any) -> bool:
    """Whether it is the state of a :func:`sparse_allreduce`."""
    return isinstance(node, SparseAllreduceState)


def is_named(node: Any) -> bool:
    """Whether it may be the state of an ``optax.named_chain``, whose order the state does not say.

    The groups of ``optax.partition`` are in a dictionary as well, which :func:`groups` finds.
    """
    # An OrderedDict since optax 0.2.8.
    return isinstance(node, dict)


def groups(node: Any) -> dict[Any, Any] | None:
    """The states of the groups, if it is the state of an ``optax.partition``."""
    found = getattr(node, "inner_states", None)
    return found if isinstance(node, tuple) and type(found) is dict else None


def in_order(tree: Any) -> Any:
    """The result of an ``init`` with each ``optax.named_chain`` in it as an ``optax.chain``."""

    def is_found(node: Any) -> bool:
        return groups(node) is not None or (is_named(node) and bool(reductions(node)))

    def one(node: Any) -> Any:
        if not is_found(node):
            return node
        if (parts := groups(node)) is not None:
            return node._replace(inner_states={k: in_order(part) for k, part in parts.items()})
        return tuple(map(in_order, node.values()))

    return jax.tree.map(one, tree, is_leaf=is_found)


def is_mask(node: Any) -> bool:
    """Whether it stands for leaves that a part of an optimizer does not receive."""
    return isinstance(node, optax.MaskedNode)


class Paths:
    """The leaves that a tree of the parameters has, where masks may stand for whole subtrees.

    Attributes:
      present: the paths of the leaves, in their order.
    """

    def __init__(self, tree: Any):
        found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_mask)[0]
        self.present = [path for path, leaf in found if not is_mask(leaf)]
        self._ends = {path for path, _ in found}
        # A number next to a tree has the empty path.
        self._prefixes = {path[:i] for path in self._ends for i in range(1, len(path))}

    def fits(self, other: Paths) -> bool:
        """Whether both may be trees of the same parameters."""
        return all(
            path in other._prefixes or any(path[:i] in other._ends for i in range(len(path) + 1))
            for path in self.present
        )

    def shares(self, other: Paths) -> bool:
        """Whether both have some leaf."""
        return not {*self.present}.isdisjoint(other.present)


def get_states(opt_state: Any) -> list[SparseAllreduceState]:
    """Every :class:`SparseAllreduceState` in ``opt_state``: one for each bucket or group."""
    return list(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def holding(tree: Any) -> list[SparseAllreduceState]:
    """The states of :func:`get_states` that have a residual with entries."""
    return [state for state in get_states(tree) if state.layout.size]


def moving(tree: Any) -> list[Any]:
    """The states in which workers move on their own, such as the state of ``local_steps``."""
    return list(filter(is_moving, jax.tree.leaves(tree, is_leaf=is_moving)))


def is_moving(node: Any) -> bool:
    """Whether it is one of the states of :func:`moving`."""
    return any(x.role is Role.MOVED for x in FIELDS.get(type(node), {}).values())


def _nodes(tree: Any, kinds: tuple[type, ...]) -> list[Any]:
    def is_one(node: Any) -> bool:
        return isinstance(node, kinds)

    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def misuse(tree: Any) -> str | None:
    """The error text about wrappers around the reductions of an optimizer state, or None."""
    for node in _nodes(tree, (tuple,)):
        if isinstance(node, SparseAllreduceState):
            continue
        found = _misuse_of(node) or next(filter(None, map(misuse, node)), None)
        if found is not None:
            return found
    return None


def _misuse_of(node: tuple[Any, ...]) -> str | None:
    if type(node) is tuple:  # The state of an optax.chain.
        return _TWICE if _reduces_twice(node) else None
    if isinstance(node, tuple(_REFUSED)):
        return _refusal(*_REFUSED[type(node)]) if reductions(node) else None
    skip: Any = node.skip_state if isinstance(node, optax.MultiStepsState) else None
    # The states of optax.skip_not_finite and optax.skip_large_updates.
    decides = isinstance(skip, dict) and "should_skip" in skip
    return _DECIDES if decides and reductions(node) else None


def _refusal(name: str, why: str, instead: str) -> str:
    return (
        f"{name} is around the allreduce of optax_ext. It {why}. Put it after the allreduce: "
        f"optax.chain(optax_ext.ok_topk(...), {name}(optimizer, ...)). {instead}."
    )


_TWICE = (
    "tx has two allreduces of the same gradients, one after the other: after the first, all "
    "workers have the same gradients, so the second has nothing to add up. Keep one of them. (For "
    "leaves of two kinds: dense_leaves=, optax.masked or optax.multi_transform.)"
)
_DECIDES = (
    "optax.MultiSteps around the allreduce of optax_ext has a should_skip_update_fn that decides "
    "by the gradients of one worker, so that some workers would enter the allreduce and wait for "
    "those that don't. Leave it out, and use nonfinite='skip' (the default) in "
    "optax_ext.multi_steps; or put MultiSteps after the allreduce."
)


def _reduces_twice(chain: tuple[Any, ...]) -> bool:
    """Whether a chain reduces the same gradients twice; after the first all are equal."""
    sparse = [state.layout for state in chain if isinstance(state, SparseAllreduceState)]
    trees = [layout.treedef for layout in sparse if layout.shapes]
    dense = any(isinstance(state, DenseState) for state in chain)
    # The buckets of `bucketed` are also in a tuple, but each has other leaves.
    return len({*trees}) < len(trees) or (dense and bool(trees))


def check_multi_steps(opt_state: Any) -> None:
    """Checks that the accumulators of ``optax.MultiSteps`` can be split over the workers.

    Raises:
      ValueError: a scalar.
      ValueError: accumulators that were made outside of the mapped function.
    """
    for node in _nodes(opt_state, (optax.MultiStepsState,)):
        inside = reductions(node)
        if inside:
            _check_accumulators(node.acc_grads, inside)


def _check_accumulators(acc_grads: Any, inside: list[Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(acc_grads)
    for path, leaf in leaves:
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a scalar: the accumulators of "
                "optax.MultiSteps are split over the workers along the first dimension, and a "
                "scalar has none. Use optax_ext.multi_steps(tx, k) instead of "
                "optax.MultiSteps(tx, k), or give the parameter the shape (1,)."
            )
    for state in inside:
        if not isinstance(state, SparseAllreduceState):
            continue
        if state.layout.treedef != jax.tree.structure(acc_grads):
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
