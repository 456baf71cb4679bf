"""Whole optimizers, and what else is in a chain with them.

The updates of a whole optimizer are steps of the parameters, with learning rate and sign included.
An optimizer that follows takes such a step for a gradient, reverses it, and trains uphill. The
types of states do not distinguish a learning rate from clipping, since both keep nothing. So the
chain is run: it takes a few steps of one worker with small parameters, without an exchange, once
for a gradient of 1 and once for -1. Updates that follow the gradient instead of opposing it are an
error.
"""

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._state._residual_tree import is_mask
from optax_ext._step import _transformation
from optax_ext._step._sparse_state import SparseAllreduceState

# A chain may accumulate this many gradients, or warm up for so long with a learning rate of 0.
_STEPS = 64
# These divide or accumulate their inputs, which they take for gradients.
_OF_GRADIENTS = (optax.ScaleByAdamState, optax.TraceState)

_asked: weakref.WeakSet[Any] = weakref.WeakSet()


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


def check(tx: optax.GradientTransformation, params: Any, opt_state: Any, names: Any) -> None:
    """Checks that nothing around a whole optimizer takes its steps for gradients.

    Args:
      tx: the whole chain.
      params: the parameters, or their shapes.
      opt_state: its state, or the shapes of it.
      names: the names of all axes of the mesh.

    Raises:
      ValueError: the chain trains uphill, or has ``scale_by_adam`` or ``trace`` after a whole
        optimizer.
    """
    chains = list(_chains(opt_state))
    if not chains or tx.update in _asked:
        return
    for chain in chains:
        _check_types(chain)
    if _goes_uphill(tx, params, _covered(chains), names):
        raise ValueError(
            "tx trains uphill: a transformation in its chain changes the sign of the updates of "
            f"sparse_adamw, sparse_sgd or ok_topk_sgd. {_INSTEAD}"
        )
    _asked.add(tx.update)


_INSTEAD = (
    "These are whole optimizers, whose updates include the learning rate and its sign. Take one of "
    "the two: the whole optimizer, without optax.adamw or optax.sgd in the chain; or "
    "optax.chain(optax_ext.ok_topk(density, axis=...), optax.adamw(rate))."
)


def _is_whole(node: Any) -> bool:
    return isinstance(node, SparseAllreduceState) and node.settings.whole


def _wholes(tree: Any) -> list[SparseAllreduceState]:
    return list(filter(_is_whole, jax.tree.leaves(tree, is_leaf=_is_whole)))


def _chains(opt_state: Any) -> Iterator[tuple[Any, ...]]:
    """The states of each ``optax.chain`` that may have another optimizer next to a whole one."""

    def is_chain(node: Any) -> bool:
        if type(node) is not tuple:
            return False
        found = [bool(_wholes(part)) for part in node]
        if not any(found):
            return False
        first = found.index(True)
        # Clipping and checks may come first; an optimizer there is a chain, as optax.sgd is.
        return not all(found[first:]) or any(type(part) is tuple for part in node[:first])

    for node in jax.tree.leaves(opt_state, is_leaf=is_chain):
        if is_chain(node):
            yield node


def _covered(trees: Any) -> list[bool] | None:
    """For each leaf of the parameters, whether a whole optimizer has it; None if unknown."""
    found = [
        _present(jax.tree.unflatten(state.layout.treedef, state.layout.dense))
        for state in _wholes(trees)
    ]
    if len({*map(len, found)}) != 1:
        return None
    return [any(of_leaf) for of_leaf in zip(*found, strict=True)]


def _present(tree: Any) -> list[bool]:
    return [not is_mask(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_mask)]


def _check_types(chain: tuple[Any, ...]) -> None:
    """Checks that no moments or momentum of the same leaves follow a whole optimizer."""
    first = next(i for i, part in enumerate(chain) if _wholes(part))
    covered = _covered(chain[first]) or []

    def is_kind(node: Any) -> bool:
        return isinstance(node, _OF_GRADIENTS)

    for node in filter(is_kind, jax.tree.leaves(chain[first + 1 :], is_leaf=is_kind)):
        adam = isinstance(node, optax.ScaleByAdamState)
        has = _present(node.mu if adam else node.trace)
        if len(has) == len(covered) and any(map(lambda a, b: a and b, has, covered)):
            name = "optax.scale_by_adam" if adam else "optax.trace"
            raise ValueError(
                f"tx has {name}, which is a part of optax.adamw or optax.sgd, after sparse_adamw, "
                f"sparse_sgd or ok_topk_sgd. {_INSTEAD}"
            )


def _goes_uphill(
    tx: optax.GradientTransformation, params: Any, covered: list[bool] | None, names: Any
) -> bool:
    """Whether updates of some leaf that is ``covered`` follow its gradient."""
    if covered is None or len(covered) != len(jax.tree.leaves(params)):
        return False  # Other parameters are around it, as in optax.lookahead.
    chain = optax.with_extra_args_support(tx)

    # A parameter of 0 does not decay, and has no norm.
    small = jax.tree.map(
        lambda x: np.zeros([min(length, 1) for length in jnp.shape(x)], jnp.result_type(x)), params
    )

    def step(sign: jax.Array, state: Any) -> tuple[list[jax.Array], Any]:
        gradient = jax.tree.map(lambda x: x + sign.astype(x.dtype), small)
        updates, state = chain.update(gradient, state, small, value=jnp.zeros(()))
        return [jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(updates)], state

    def init(sign: jax.Array) -> Any:
        del sign
        return chain.init(small)

    for name in names:
        of_one = {"axis_name": name, "axis_size": 1}
        init = jax.vmap(init, in_axes=None, **of_one)
        step = jax.vmap(step, in_axes=(None, 0), **of_one)
    sign = np.float32(1)
    try:
        with _transformation.without_exchange():
            # Compiled, it runs at once also while something else is traced.
            begin = jax.jit(init).lower(sign).compile()
            go = jax.jit(step).lower(sign, jax.eval_shape(init, sign)).compile()
    except Exception:  # A chain that can't take such a step trains as it did.
        return False
    states = {sign: begin(sign) for sign in (np.float32(1), np.float32(-1))}
    undecided = {leaf for leaf, here in enumerate(covered) if here}
    for _ in range(_STEPS):
        updates = []
        for sign, state in states.items():
            made, states[sign] = go(sign, state)
            updates.append([float(np.sum(np.asarray(x))) for x in made])
        ahead, back = updates
        if any(ahead[leaf] > back[leaf] for leaf in undecided):
            return True
        undecided = {leaf for leaf in undecided if not ahead[leaf] < back[leaf]}
        if not undecided:
            break
    return False
