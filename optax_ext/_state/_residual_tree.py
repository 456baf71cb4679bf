"""Residuals as a tree of the parameters, and the parameters a step ahead."""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_ext._error_feedback import _buffers, _layout, _owner, _residual, _trace_checks
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _index, _wrappers
from optax_ext._state._wrappers import is_mask
from sparse_collectives import _axes, _varying, transport
from sparse_collectives._platform import once


def residual_tree(
    opt_state: Any, params: Any, leaves_of: Callable[[SparseAllreduceState], Any]
) -> Any:
    """The trees ``leaves_of(state)`` of all allreduces in an optimizer state, as one tree.

    Args:
      opt_state: the optimizer state.
      params: a tree with the structure and shapes of the parameters. Leaves that no sparse
        allreduce covers get zeros.
      leaves_of: the leaves for a state; :func:`of_vector` makes them from a vector.

    Raises:
      ValueError: a state of other parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    found = spread(map(leaves_of, _wrappers.get_states(opt_state)), params)
    whole = [
        jnp.zeros_like(leaf) if part is None else part
        for leaf, part in zip(leaves, found, strict=True)
    ]
    check_shapes(params, whole)
    return jax.tree.unflatten(treedef, whole)


def check_shapes(params: Any, parts: list[Any]) -> None:
    """Checks that parts of a state, one for each leaf or None, have the shapes of parameters."""
    for (path, leaf), part in zip(jax.tree_util.tree_leaves_with_path(params), parts, strict=True):
        if part is not None and np.shape(leaf) != np.shape(part):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, but opt_state was "
                f"made for one of shape {np.shape(part)}. Give the parameters that go with it."
            )


_OF_LOOKAHEAD = (
    "; with optax.lookahead these are params.fast, and the step is one of your own: "
    "jax.grad(loss_fn)(optax_ext.ahead(params.fast, opt_state), batch) in a function with "
    "@optax_ext.data_parallel"
)


def spread(trees: Iterable[Any], params: Any) -> list[Any]:
    """The leaves of several trees with masks, as leaves of ``params``; None where all have masks.

    A state for some of the parameters, as in ``optax.multi_transform``, has masks elsewhere, each
    for a leaf, or for a variable of flax with a leaf in it.
    """
    found: list[Any] = [None] * len(jax.tree.leaves(params))
    for tree in trees:
        parts, structure = jax.tree.flatten(_unwrapped(tree, params), is_leaf=is_mask)
        try:
            sizes = [len(jax.tree.leaves(x)) for x in structure.flatten_up_to(params)]
        except ValueError:
            sizes = []
        wrong = [size for part, size in zip(parts, sizes) if size != 1 and not is_mask(part)]
        if wrong or sum(sizes) != len(found):
            of_some = (
                " (One vector does not say for which leaves it is: put optax.flatten around "
                "optax.partition or optax.masked, not inside of them.)"
            )
            raise ValueError(
                f"opt_state was made for parameters with another tree than params: {structure}, "
                f"and {jax.tree.structure(params)}. Give the parameters that init was called with"
                f"{_OF_LOOKAHEAD if isinstance(params, optax.LookaheadParams) else ''}."
                f"{of_some if structure.num_nodes == 1 else ''}"
            )
        each = [part for part, size in zip(parts, sizes, strict=True) for _ in range(size)]
        for i, part in enumerate(each):
            if not is_mask(part):
                found[i] = part if found[i] is None else found[i] + part
    return found


def _unwrapped(tree: Any, params: Any) -> Any:
    """The tree that an optimizer has without what optax wraps around it to change the leaves.

    ``optax.flatten`` gives an optimizer all leaves as one vector. With
    ``optax.contrib.split_real_and_imaginary`` it has two leaves for a complex one, the real part
    first.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [np.shape(leaf) for leaf in leaves]
    if isinstance(tree, jax.Array | np.ndarray) and shapes and shapes != [tree.shape]:
        ends = np.cumsum([np.size(leaf) for leaf in leaves])
        if tree.shape == (ends[-1],):
            return structure.unflatten(map(jnp.reshape, jnp.split(tree, ends[:-1]), shapes))
    if not any(map(jnp.iscomplexobj, leaves)):
        return tree
    try:
        parts = structure.flatten_up_to(tree)
    except ValueError:
        return tree

    def whole(leaf: Any, part: Any) -> Any:
        pair = jax.tree.leaves(part)
        return jax.lax.complex(*pair) if jnp.iscomplexobj(leaf) and len(pair) == 2 else part

    return structure.unflatten(map(whole, leaves, parts))


def of_vector(vector: jax.Array, layout: _layout.TreeLayout) -> Any:
    """``f32[n]`` as leaves; dense leaves are 0."""
    dense = jnp.zeros((layout.dense_size,), jnp.float32)
    return _buffers.unravel(vector, dense, layout, saturate=True)


_OUTSIDE = (
    "optax_ext.ahead was called where axis={axis!r} is not bound. It gives the parameters at which "
    "one worker takes its gradient, and is for the step of optax_ext.data_parallel, or of a "
    "function mapped over that axis. To evaluate or save a model, take the parameters as they are."
)


def ahead(params: Any, opt_state: Any) -> Any:
    """The parameters at which this worker takes its gradient; see :func:`optax_ext.ahead`.

    Args:
      params: the parameters as a tree of arrays, the same on every worker.
      opt_state: the state of this worker before the step.

    Returns:
      The tree of ``params``, in its dtypes. Cost: one pass over n entries.

    Raises:
      ValueError: outside of the mapped function.
      ValueError: a state of other parameters.
      ValueError: no allreduce in ``opt_state``.
      ValueError: a hierarchical one over MPI communicators, with a ``step_ahead``.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    index = _index.index_of(structure)
    # Over MPI the state has the number of ranks, and nothing is typed as varying.
    axis = index.axis
    ranks = _axes.ranks(axis)
    if not ranks and not _axes.axis_is_bound(axis):
        raise ValueError(_OUTSIDE.format(axis=axis))
    workers = ranks or _trace_checks.workers(axis)
    local = params if ranks else _varying.to_varying(params, axis)
    if moved := index.moved(leaves):
        mine, treedef = jax.tree.flatten(local)
        here = spread([jax.tree.map(lambda x: x[0], tree) for tree in moved], local)
        pairs = zip(mine, here, strict=True)
        local = treedef.unflatten([p if m is None else p + m.astype(p.dtype) for p, m in pairs])
    if not index.looks_ahead:
        return local
    states = _wrappers.get_states(opt_state)

    def stepped() -> Any:
        waiting = residual_tree(opt_state, params, lambda state: _share(state, workers))
        return jax.tree.map(lambda p, r: p + r.astype(p.dtype), local, waiting)

    if ranks or any(_is_in_parts(state) for state in states):
        return stepped()
    # Layers read their parameters several times, and would each add the residual again.
    owned = [_owner.is_own(state.owner, state.settings.axis) for state in states]
    return once(functools.reduce(operator.or_, owned), stepped, lambda: local)


def _is_in_parts(state: SparseAllreduceState) -> bool:
    """Whether devices have to gather parts of the residual, which no branch may do."""
    return state.devices > 1 or bool(state.settings.shard_axis)


def _share(state: SparseAllreduceState, workers: int) -> Any:
    """The part of its residual that this worker applies, as leaves."""
    layout, settings = state.layout, state.settings
    part = _layout.device_layout(layout)

    def of_device(residual: jax.Array) -> Any:
        mine = _share_of_part(residual, part, settings, workers)
        return _layout.gather(mine, layout)

    split, leaves = PartitionSpec(layout.sharding.axes), _layout.specs_of(layout)
    return _layout.on_each_device(
        of_device, layout.sharding, settings.axis, in_specs=(split,), out_specs=leaves
    )(_own_residual(state))


def _own_residual(state: SparseAllreduceState) -> jax.Array:
    """The residual in float32, without another worker's."""
    axis = state.settings.axis
    residual = state.residual.astype(jnp.float32)
    # Over MPI the rank is not in the state; the step leaves out copies.
    return residual if _axes.ranks(axis) else _owner.own(residual, state.owner, axis)


def _share_of_part(residual: jax.Array, layout: Any, settings: Any, workers: int) -> Any:
    """:func:`_share` for the part of one device."""
    size = layout.size
    if not settings.step_ahead:
        return of_vector(jnp.zeros((size,), jnp.float32), layout)
    inside = settings.shard_axis
    if _axes.ranks(inside):
        raise ValueError(
            "ahead: of a hierarchical allreduce over MPI communicators a worker can't gather the "
            "residual of its node. Leave out step_ahead=."
        )
    # The residual of a node has the sum of its workers' updates, and is applied as their mean.
    together = transport.axis_size(inside)
    share = _residual.share(settings.step_ahead, workers // together) / together * residual[0]
    share = transport.all_gather(share, inside).reshape(-1) if inside else share
    return of_vector(share[:size], layout)
