"""Complete optimizers, and what else is in a chain with them.

The updates of a complete optimizer are steps of the parameters, with learning rate and sign
included. An optimizer that follows takes such a step for a gradient, and reverses it, so that the
loss increases. It is known by the types of its states. A learning rate alone, such as
``optax.scale(-0.1)``, keeps nothing, as clipping does, so that nothing distinguishes it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import jax
import optax

from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _wrappers

# States of optax that keep the direction of their inputs, or that hold other states. All others of
# optax take their inputs for gradients: they divide or accumulate them, take the sign, or estimate
# a step size. States from elsewhere are not judged.
_HARMLESS = {
    *("EmptyState", "NormalizeState", "ScaleByScheduleState", "EmaState", "ZeroNansState"),
    *("NonNegativeParamsState", "AddNoiseState", "DifferentiallyPrivateAggregateState"),
    *("ReduceLROnPlateauState", "WrappedScheduleState", "MonitorState", "SnapshotState"),
    *("MaskedState", "MaskedNode", "PartitionState", "MultiTransformState", "MultiStepsState"),
    *("InjectHyperparamsState", "InjectStatefulHyperparamsState", "ApplyIfFiniteState"),
    *("ConditionallyMaskState", "ConditionallyTransformState", "SkipState", "LookaheadState"),
    *("SplitRealAndImaginaryState", "SplitRealAndImaginaryArrays", "ApplyEvery"),
    *("WeightDecaySchedule", "LookaheadParams", "ScaleByBacktrackingLinesearchState"),
    *("ScaleByZoomLinesearchState", "ZoomLinesearchState", "ZoomLinesearchInfo"),
    *("BacktrackingLinesearchInfo", "BacktrackingLineSearchState"),
}


def whole(
    sparse: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """``sparse``, with a state that marks its updates as steps of the parameters.

    Args:
      sparse: a transformation with the state of a :func:`optax_ext.sparse_allreduce`.
    """

    def init(params: Any) -> SparseAllreduceState:
        state = cast(SparseAllreduceState, sparse.init(params))
        return state._replace(settings=dataclasses.replace(state.settings, whole=True))

    return optax.GradientTransformationExtraArgs(cast(Any, init), sparse.update)


def misuse(opt_state: Any) -> str | None:
    """The error text about an optimizer that takes the steps of a complete one for gradients.

    That is one of optax with a state of its own after a complete optimizer in a chain, or
    ``optax.sgd`` next to one. None if there is none.

    Args:
      opt_state: the state of the whole chain, or anything of its structure.
    """
    for chain in _chains(opt_state):
        found = [bool(_wholes(part)) for part in chain]
        first = found.index(True)
        for node in _optimizers(chain[first + 1 :]):
            if _shares_leaves(node, chain[first]):
                return _misuse_of(type(node).__name__.removesuffix("State"))
        if any(map(_is_sgd, chain)):
            return _misuse_of("optax.sgd, or a chain inside of the chain, without a state,")
    return None


def _misuse_of(name: str) -> str:
    return (
        f"tx has {name} next to sparse_adamw, sparse_sgd or ok_topk_sgd, and increases the "
        "loss: their updates include the learning rate and its sign. Take one of the two: "
        "sparse_adamw, for example, without optax.adamw or optax.sgd in the chain; or "
        "optax.chain(optax_ext.ok_topk(density, axis=...), optax.adamw(rate)). (Put the parts of "
        "a chain that is no optimizer, such as clipping, into the outer chain one by one.)"
    )


def _wholes(tree: Any) -> list[SparseAllreduceState]:
    def is_whole(node: Any) -> bool:
        return isinstance(node, SparseAllreduceState) and node.settings.whole

    return list(filter(is_whole, jax.tree.leaves(tree, is_leaf=is_whole)))


def _chains(opt_state: Any) -> Iterator[tuple[Any, ...]]:
    """The states of each ``optax.chain`` with a complete optimizer in one of its parts only."""

    def is_chain(node: Any) -> bool:
        return type(node) is tuple and 0 < sum(bool(_wholes(part)) for part in node) < len(node)

    for node in jax.tree.leaves(opt_state, is_leaf=is_chain):
        if is_chain(node):
            yield node
            yield from _chains(list(node))


def _optimizers(tree: Any) -> list[Any]:
    def is_one(node: Any) -> bool:
        kind = type(node)
        of_optax = kind.__module__.partition(".")[0] == "optax" and hasattr(node, "_fields")
        return of_optax and kind.__name__ not in _HARMLESS

    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def _is_sgd(part: Any) -> bool:
    """Whether it is a chain that keeps nothing but a count of steps, as ``optax.sgd`` does.

    It may begin with an average, as ``optax.signum`` does.
    """
    kinds = optax.EmptyState | optax.ScaleByScheduleState | optax.AddNoiseState
    is_chain = type(part) is tuple and bool(part)
    rest = part[1:] if is_chain and isinstance(part[0], optax.EmaState) else part
    return is_chain and bool(rest) and all(isinstance(x, kinds) or _is_sgd(x) for x in rest)


def _shares_leaves(node: Any, part: Any) -> bool:
    """Whether it is for some leaf that a complete optimizer in ``part`` has.

    Its moments show that. If it has none, it is for all leaves.
    """
    own = list(map(_wrappers.Paths, node))
    for state in _wholes(part):
        had = _wrappers.Paths(jax.tree.unflatten(state.layout.treedef, state.layout.dense))
        alike = [has for has in own if has.fits(had)]
        if not alike or any(has.shares(had) for has in alike):
            return True
    return False
