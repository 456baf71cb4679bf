"""The parameters at the end of a training: the mean of what the workers look ahead to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_ext._error_feedback import _buffers, _residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _consolidate, _index, _nnx, _placement, _shards, _wrappers
from optax_ext._state._residual_tree import check_shapes, residual_tree, spread


@_placement.on_auto_axes
def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Moves the parameters to the mean of the look-ahead parameters of all workers.

    Each worker has taken its last gradients at parameters of its own, which include a share of its
    residual (``step_ahead`` of :func:`residual`). This moves the parameters to the mean of these
    points, and takes the shares out of the residuals. Use it at the end of a training with
    :func:`sparse_adamw`, :func:`sparse_sgd`, or another optimizer whose residuals are updates of
    the parameters. It is a dense exchange of n numbers.

    In rounds (``every=``) the share is all of the residual, so that the result is the mean of the
    workers' models, also between two exchanges and with :func:`local_steps`. With an exchange at
    every step the default is 1/P, or 0.1 with more than ten workers. The rest stays in the
    residuals, and ``optax_ext.metrics(opt_state)["residual_norm"]`` reports its size: the updates
    of hundreds of steps would go too far if they were applied at once. :func:`consolidate` returns
    all of it.

    Args:
      params: the parameters.
      opt_state: as for :func:`consolidate`.

    Returns:
      ``(params, opt_state)``. P times the change of the parameters, plus the sum of the remaining
      residuals over the workers, equals the sum of the residuals before: what a 16-bit parameter
      cannot take of its change stays in the residuals.

    Raises:
      ValueError: the residuals are gradients (pass the result of :func:`consolidate` to the
        optimizer after the allreduce instead).
      ValueError: an optimizer without a look-ahead, such as :func:`ok_topk_sgd` (add the result of
        :func:`consolidate` to the parameters instead).
      ValueError: an update of :func:`local_steps` is on its way (``delay=``).
      ValueError: a transformation follows the optimizer in its chain, such as a mask that freezes
        leaves, which would be left out.
      ValueError: a wrapper around the optimizer makes updates of its own, as
        ``optax.contrib.schedule_free`` does.
      ValueError: as :func:`consolidate`.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.sparse_adamw(0.5, axis="w")
      >>> state = optax_ext.init_state(tx, jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 4.0], [0.0, 0.0]]))
      >>> params, state = flush(jnp.zeros(2), state)
      >>> params.tolist(), state.residual.tolist()
      ([0.25, 1.0], [[0.5, 2.0], [0.0, 0.0]])
    """
    given, opt_state = opt_state, _nnx.arrays(opt_state)
    _consolidate.check("flush(params, opt_state)", params, opt_state)
    index = _index.of(opt_state)
    still = [x for x, layout in index.sparse if layout.size and not x.step_ahead]
    if still and all(x.whole for x in still):
        raise ValueError(
            "opt_state has an optimizer without a look-ahead, such as ok_topk_sgd: its workers "
            "take their gradients at params, and flush has nothing to move. To apply all that "
            "waits in the residuals: updates, opt_state = optax_ext.consolidate(params, "
            "opt_state), then params = optax.apply_updates(params, updates)."
        )
    if index.has_gradients:
        first = "Take steps to the end of the round. Then use" if index.moves else "Use"
        raise ValueError(
            "opt_state has residuals that may be gradients, and not updates of the parameters: "
            f"they were made without a step_ahead. {first} optax_ext.consolidate(params, "
            "opt_state), and give the gradient to the optimizer after the allreduce."
        )
    _check_nothing_follows(opt_state)
    _check_nothing_late(opt_state)
    # The arrays of a step are on Auto axes, and a new state on the mesh of jax.make_mesh is not.
    opt_state = _placement.typed(opt_state, _placement.with_auto_axes)
    arrays, structure = jax.tree.flatten(opt_state)
    held = [x.residual for x in _wrappers.get_states(opt_state)] + index.moved(arrays)
    places = [getattr(x, "sharding", None) for x in jax.tree.leaves(held)]
    params = _placement.readable(params, getattr(places[0], "mesh", None) if places else None)
    steps = residual_tree(opt_state, params, _step)
    means = _consolidate.reduced(lambda x: jnp.mean(x, axis=0), index.moved(arrays))
    moves = spread(means, params)
    check_shapes(params, moves)
    pairs = zip(jax.tree.leaves(steps), moves, strict=True)
    added = [step if m is None else step.astype(m.dtype) + m for step, m in pairs]
    steps = jax.tree.structure(steps).unflatten(added)
    leaves, treedef = jax.tree.flatten(params)
    moved = list(map(_moved, leaves, jax.tree.leaves(steps)))
    errors = list(map(_error, leaves, jax.tree.leaves(steps), moved))
    # A movement takes the error of its leaf, and the other errors go to the residuals.
    others = [e if m is None else None for m, e in zip(moves, errors, strict=True)]

    def rest(node: SparseAllreduceState) -> jax.Array:
        return _with_errors(node, _kept(node), params, others)

    emptied = jax.tree.leaves(_consolidate.emptied(opt_state, rest))
    for known in index.moves:
        here = range(known.start, known.stop)
        emptied[known.start : known.stop] = [jnp.zeros_like(arrays[i]) for i in here]
        if any(error is not None for error in errors):
            for i, error in zip(spread([known.treedef.unflatten(here)], params), errors):
                if i is not None and error is not None:
                    emptied[i] += error[None]
    moved = _placement.as_params(treedef.unflatten(moved), params)
    return moved, _nnx.like(given, structure.unflatten(emptied))


def _moved(parameter: Any, step: jax.Array) -> jax.Array:
    parameter = jnp.asarray(parameter)
    return _buffers.narrowed(parameter.astype(step.dtype) + step, parameter.dtype, saturate=True)


def _error(parameter: Any, step: jax.Array, moved: jax.Array) -> jax.Array | None:
    """What a 16-bit parameter did not take of its step, ``f32``; None for another parameter."""
    if moved.dtype == step.dtype:
        return None
    error = step - (moved.astype(step.dtype) - jnp.asarray(parameter).astype(step.dtype))
    return jnp.where(jnp.isfinite(error), error, 0.0)


def _with_errors(
    node: SparseAllreduceState, residual: jax.Array, params: Any, errors: list[jax.Array | None]
) -> jax.Array:
    """``residual`` with the errors, one for each leaf of ``params``, added to every worker's."""
    if all(error is None for error in errors):
        return residual
    layout, inside = node.layout, _shards.workers_in_node(node)
    numbers = layout.treedef.unflatten(map(np.float32, range(len(layout.shapes))))
    mine: dict[int, jax.Array] = {}
    for number, error in zip(spread([numbers], params), errors, strict=True):
        if number is not None and error is not None and not layout.dense[int(number)]:
            mine[int(number)] = error
    if not mine:
        return residual
    whole = [mine.get(i, jnp.zeros(s, jnp.float32)) for i, s in enumerate(layout.shapes)]
    # Each shard of a node stands for all of its workers.
    part = inside * _shards.parts_of_leaves(layout, whole)
    rows = jnp.broadcast_to(part, (node.workers // inside, *part.shape))
    added = _shards.of_part_rows(node, rows).reshape(residual.shape)
    return (residual.astype(jnp.float32) + added).astype(residual.dtype)


def _check_nothing_late(opt_state: Any) -> None:
    """Checks that no update of ``local_steps`` is on its way."""

    def has_late(node: Any) -> bool:
        return hasattr(node, "late")

    for node in filter(has_late, jax.tree.leaves(opt_state, is_leaf=has_late)):
        for leaf in jax.tree.leaves(node.late):
            if not isinstance(leaf, Tracer) and bool(jnp.any(leaf != 0)):
                raise ValueError(
                    "opt_state has an update of optax_ext.local_steps on its way (delay=), which "
                    "flush would leave out. Take steps until it has arrived."
                )


def _check_nothing_follows(tree: Any) -> None:
    """Checks that no ``optax.chain`` would have changed the updates that residuals hold."""

    def is_chain(node: Any) -> bool:
        return type(node) is tuple or _wrappers.is_named(node)

    def is_around(node: Any) -> bool:
        # optax.contrib.schedule_free and mechanize have such states.
        return "base_optimizer_state" in getattr(node, "_fields", ())

    def is_found(node: Any) -> bool:
        return is_chain(node) or is_around(node) or _wrappers.groups(node) is not None

    for found in jax.tree.leaves(tree, is_leaf=is_found):
        if not is_found(found) or not _holds(found):
            continue
        if (parts := _wrappers.groups(found)) is not None:
            for part in parts.values():
                _check_nothing_follows(part)
            continue
        if is_around(found):
            raise ValueError(
                f"opt_state has a {type(found).__name__} around the optimizer: it makes updates of "
                "its own from those in the residuals, so flush can't apply them. Evaluate with the "
                "parameters as they are (optax.contrib.schedule_free_eval_params), or give the "
                "result of optax_ext.consolidate(params, opt_state) to the optimizer around."
            )
        named = _wrappers.is_named(found)
        chain = list(found.values()) if named else found
        # The order of a named chain is not in its state.
        first = next(i for i, part in enumerate(chain) if named or _holds(part))
        # What reduces gradients itself is for other leaves.
        if not all(map(_wrappers.reductions, chain[first:])):
            which = "next to the optimizer in a named chain" if named else "after the optimizer"
            raise ValueError(
                f"opt_state has a transformation {which}, which flush would leave out: a leaf "
                "that it freezes would move. (In optax.chain, what is before the optimizer does "
                "not matter.) To freeze leaves, write "
                "optax.partition({'train': optimizer, 'freeze': optax.set_to_zero()}, labels), or "
                "put what is for other leaves first in the chain. Otherwise apply it yourself: "
                "updates, opt_state = optax_ext.consolidate(params, opt_state), then updates, _ = "
                "following.update(updates, its_state, params), and optax.apply_updates(params, "
                "updates)."
            )
        for part in chain:
            _check_nothing_follows(part)


def _holds(tree: Any) -> bool:
    """Whether a residual with entries, or a movement, is in the tree."""
    moves = _index.of(tree).moves
    return bool(_wrappers.holding(tree) or any(x.stop > x.start for x in moves))


def _step(node: SparseAllreduceState) -> Any:
    """The leaves of the update that leads to the mean of the look-ahead parameters."""
    taken = node.residual.astype(jnp.float32) - _kept(node).astype(jnp.float32)
    # In float32 also for a parameter of 16 bits, which takes a part of it.
    dtypes = (np.dtype(np.float32),) * len(node.layout.dtypes)
    wide = dataclasses.replace(node.layout, dtypes=dtypes)
    mean = _consolidate.mean(node._replace(residual=taken))
    return _shards.leaves_of(node._replace(layout=wide), mean)


def _kept(node: SparseAllreduceState) -> jax.Array:
    """The residuals without the shares that workers have looked ahead by."""
    residuals = node.workers // _shards.workers_in_node(node)
    share = _residual.share(node.settings.step_ahead, residuals)
    if share == 1.0:
        return jnp.zeros_like(node.residual)
    return ((1.0 - share) * node.residual).astype(node.residual.dtype)
