"""Resharding: the residuals for another number of workers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._roles import Role, Rows
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import (
    _find,
    _host_checks,
    _index,
    _local_states,
    _nnx,
    _reshard_checks,
    _rows,
    _shards,
    _wrappers,
)
from sparse_collectives import _validation


def reshard(opt_state: Any, fresh_state: Any) -> Any:
    """Returns the optimizer state for other workers, with nothing of the residuals lost.

    Use it also when the sharding of the parameters changes.

    The new state has the same sum of the residuals over the workers. With more workers, each
    residual is split by index among several, without arithmetic. With fewer, the residuals are
    added up exactly: the sum at each index goes to one worker, and the part that float32 rounds
    off goes to the next ones. This is exact if the sum has no more than 24 bits for each new
    worker; with one worker it is rounded once. (With residuals in bfloat16 it is 8 bits. Some is
    then rounded off when there are fewer workers, or when the residuals were float32.) A sum that
    is not finite goes to one worker as it is, and no other index is touched. The velocity of a
    momentum correction moves in the same way; if only one of the states has a velocity, the one of
    ``fresh_state`` is kept.

    An update divides by the number of workers: with 3 instead of 8, the contents of the residuals
    weigh 8/3 as much when they are delivered.

    In rounds (``every=``, :func:`local_steps`, DiLoCo and its variants) workers take their
    gradients at parameters that they have moved themselves, so there the mean over the workers is
    kept, and not the sum: the mean of the residuals, velocities and movements is the same, to one
    rounding, and each new worker goes on from it. The parameters that an exchange would make, and
    the loss, do not jump, at any step of a round. (With :func:`sparse_sgd` as the outer optimizer
    of :func:`local_steps` the loss does: each worker looks ahead by a share of its residual that
    depends on P.) With as many workers as before, each keeps its own.

    A residual that is a copy of another worker's, as ``flax.jax_utils.replicate`` makes them, is
    left out, as in a step.

    The gradients that ``multi_steps``, or ``optax.MultiSteps`` around the allreduce, has
    accumulated are split in the same way.

    Regions, thresholds and counters of periods come from ``fresh_state``, so the next step
    evaluates them again. The factors of :func:`powersgd` and :func:`acp_sgd`, which all workers
    share, are kept. So are the step counts (``count``) of a selector or an allreduce, and the
    rest of the optimizer state.

    The new state is given instead of a number of workers, since only the
    transformation can make it, and since it says where the arrays are to be placed.
    Its selector, allreduce, density and other settings may differ from the old ones. What it has
    in common with them continues: step counts, schedules, and second moments of the same shapes.
    Other states of ``local`` begin again, which a warning says, such as the second moments after
    another choice of ``moments``.

    Args:
      opt_state: the state of all old workers, whose arrays this process can read.
      fresh_state: ``optax_ext.init_state(tx, params, mesh)`` for the new mesh.

    Returns:
      A state like ``fresh_state``, with the same placement. Both may be states in an
      ``nnx.Optimizer``.

    Raises:
      TypeError: ``fresh_state`` is a number of workers, or a mesh.
      ValueError: the states differ in more than the workers: other parameters, another optimizer,
        or residuals of another unit (``local``).
      ValueError: arrays of ``opt_state`` are spread over several processes.

    Cost: on the host, n float32 for each old and each new worker.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> def state_of(workers):
      ...     tx = optax_ext.ok_topk(0.5, axis="w")
      ...     return optax_ext.init_state(tx, jnp.zeros(4), {"w": workers})
      >>> old = state_of(1)._replace(residual=jnp.array([[1.0, 2.0, 3.0, 4.0]]))
      >>> reshard(old, state_of(2)).residual.tolist()
      [[1.0, 0.0, 3.0, 0.0], [0.0, 2.0, 0.0, 4.0]]
    """
    if isinstance(fresh_state, int | np.integer | Mesh):
        raise TypeError(
            f"fresh_state must be the optimizer state of the new workers, got {fresh_state!r}: "
            "only the transformation can make it, and it says where the arrays are to be. Give "
            "optax_ext.init_state(tx, params, new_mesh)."
        )
    return resharded(opt_state, fresh_state, keeps_mean=True)


def resharded(opt_state: Any, fresh_state: Any, *, keeps_mean: bool = False) -> Any:
    """As :func:`reshard`; ``keeps_mean`` says whether rounds keep the mean, or also the sum."""
    given, typed = fresh_state, _nnx.arrays(fresh_state)
    opt_state, fresh_state = (_without_keys(_nnx.arrays(x)) for x in (opt_state, fresh_state))
    (old, _, old_tree), (new, known, tree) = _parts(opt_state), _parts(fresh_state)
    # Everything is checked before anything is moved.
    _reshard_checks.check_optimizers((old, old_tree), (new, tree))
    _reshard_checks.check_readable(opt_state)
    workers = _find.workers_of(opt_state), _find.workers_of(fresh_state)
    for (path, before), (_, fresh), now in zip(old, new, known, strict=True):
        _reshard_checks.check(jax.tree_util.keystr(path), before, fresh, now, workers)
    pairs = zip(old, new, known, strict=True)
    in_rounds: _Across = _rows.deal
    if keeps_mean and all(workers):
        in_rounds = functools.partial(_rows.share, scale=workers[1] / workers[0])

    def across(now: Any) -> _Across:
        known = jax.tree.leaves(now, is_leaf=_is_known)
        return in_rounds if known and known[0].in_rounds else _rows.deal

    moved = [
        _moved(before, fresh, now, workers, across(now)) for (_, before), (_, fresh), now in pairs
    ]
    return _nnx.like(given, jax.tree.map(_like_key, tree.unflatten(moved), typed))


def _without_keys(opt_state: Any) -> Any:
    """The state with the words of each random key instead of it, which NumPy can hold."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _validation.is_key(x) else x, opt_state)


def _like_key(moved: Any, like: Any) -> Any:
    is_key = _validation.is_key(like)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(like)) if is_key else moved


def _parts(opt_state: Any) -> tuple[list[tuple[Any, Any]], list[Any], Any]:
    """The reductions and other arrays of a state with their paths, their index, and the tree."""
    structure = jax.tree.structure(opt_state)
    index = _index.index_of(structure)
    index.check(opt_state)
    flat, tree = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_wrappers.is_state)
    return flat, tree.flatten_up_to(structure.unflatten(index.leaves)), tree


# Rows of old workers as rows of new ones, for their number and in a dtype.
_Across = Callable[[np.ndarray, int, Any], np.ndarray]


def _moved(old: Any, new: Any, now: Any, workers: tuple[int, int], across: _Across) -> Any:
    """A part of ``new`` with the contents of ``old``."""
    if isinstance(new, SparseAllreduceState):
        return _reduction(old, new, now, across)
    if now.role is Role.SHARED:
        return _rows.placed(old, new)
    # Rows along the first axis, one or several for each worker.
    host = np.asarray(old).reshape(workers[0], -1)
    if now.role is Role.STATISTIC:
        return _rows.placed(host[np.arange(workers[1]) % workers[0]].reshape(new.shape), new)
    return _dealt(host, new, workers[1], across)


def _dealt(rows: np.ndarray, fresh: Any, workers: int, across: _Across) -> Any:
    """The rows of old workers for others; counts go to the first worker."""
    if jnp.issubdtype(fresh.dtype, jnp.integer):
        made = np.zeros(fresh.shape, fresh.dtype)
        made[0] = np.sum(rows, axis=0).reshape(made[0].shape)
    else:
        made = across(rows.astype(np.float32), workers, fresh.dtype).reshape(fresh.shape)
    return _rows.placed(made, fresh)


def _reduction(
    old: SparseAllreduceState, new: SparseAllreduceState, now: Any, across: _Across
) -> SparseAllreduceState:
    """``new`` with the contents of ``old``, field by field, as the fields are declared."""
    copied = np.isin(np.arange(old.workers), _host_checks.copies(old))

    def of_owners(before: Any) -> np.ndarray:
        host = np.asarray(before)
        if not copied.any():
            return host
        return np.where(np.repeat(copied, len(host) // old.workers)[:, None], 0, host)

    def summed(before: Any, fresh: Any, rows: Rows) -> Any:
        if rows is Rows.WORKER:
            return _dealt(np.asarray(before), fresh, new.workers, across)
        if rows is Rows.DENSE:
            # These leaves are not divided within a node.
            parts = of_owners(before).reshape(old.workers, old.devices, -1)
            whole = _shards.joined(parts, old.layout, dense=True)
            whole = across(whole, new.workers, fresh.dtype)
            parts = _shards.parted(whole, new.layout, dense=True)
            return _rows.placed(parts.reshape(fresh.shape), fresh)
        whole = _shards.rows(old, of_owners(before))
        workers = new.workers // _shards.workers_in_node(new)
        return _rows.placed(_shards.unrows(new, across(whole, workers, fresh.dtype)), fresh)

    def field(name: str) -> Any:
        before, fresh = getattr(old, name), getattr(new, name)
        known = jax.tree.leaves(getattr(now, name), is_leaf=_is_known)
        if not known or known[0].role is Role.GROUP:
            return fresh
        if known[0].role is Role.PERIODIC:
            return _with_counts(before, fresh, np.asarray(old.count) // old.settings.every)
        if known[0].role is Role.STATISTIC:
            return _local_states.taken_over(old, new)
        if jax.tree.structure(before) != jax.tree.structure(fresh):
            return fresh
        if known[0].role is Role.SUMMED:
            return summed(before, fresh, known[0].rows)
        # Factors of products belong to these matrices, in these parts.
        same = known[0].rows is Rows.NONE or old.layout == new.layout
        pairs = zip(*map(jax.tree.leaves, (before, fresh)), strict=True)
        same = same and all(np.shape(a) == np.shape(b) for a, b in pairs)
        return jax.tree.map(_rows.placed, before, fresh) if same else fresh

    return new._replace(**{name: field(name) for name in _FIELDS})


_FIELDS = tuple(_roles.FIELDS[SparseAllreduceState])


def _is_known(node: Any) -> bool:
    return isinstance(node, _index.Leaf)


def _with_counts(old: Any, new: Any, exchanges: Any) -> Any:
    """``new`` with the steps counted in ``old``: integer arrays named count.

    A schedule that is new goes on from the number of ``exchanges``, as others do.
    """

    def counts(tree):
        return {
            path: leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if jnp.issubdtype(leaf.dtype, jnp.integer)
            # A state that is a single integer, and not a tuple, is a count of steps.
            and (not path or jax.tree_util.keystr(path[-1:]) == ".count")
        }

    fresh = counts(new)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(new)}
    scheduled = {p for p in fresh if (*p[:-1], jax.tree_util.GetAttrKey("clipped")) in paths}
    before = {**dict.fromkeys(scheduled, exchanges), **counts(old)}

    def move(path, leaf):
        if path not in before or path not in fresh:
            return leaf
        # The same on every worker and for every shard, which are along the leading axis.
        count = np.asarray(before[path])
        count = count if count.ndim == 0 else count[0]
        inner = leaf.shape if leaf.ndim == 0 else leaf.shape[1:]
        return (
            _rows.placed(np.broadcast_to(count, leaf.shape), leaf) if count.shape == inner else leaf
        )

    return jax.tree_util.tree_map_with_path(move, new)
