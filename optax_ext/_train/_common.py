"""Results of a transformation that all workers have alike, typed so.

Under ``shard_map(check_vma=True)`` a type says over which axes a value varies. Zeros that
``optax.set_to_zero`` makes for a frozen leaf have the type of its gradient, which varies. The
equations that made a value say whether it does.
"""

import functools
from typing import Any

import jax

from optax_ext._error_feedback._equations import common_among
from sparse_collectives import AxisName, _axes, _varying


def updates_of(updates: Any, axis: AxisName) -> Any:
    """The updates, typed as the same on every worker, which the transformation has to make them.

    Zeros that ``optax.set_to_zero`` makes have the type of the gradient that they replace.

    Raises:
      ValueError: an update depends on a gradient that nothing has reduced.
    """
    if not _varying.checks_varying(axis):
        return updates  # The types do not record it.
    names, is_common = set(_axes.axis_names(axis)), common_among(axis)

    def common(path: Any, leaf: Any) -> Any:
        if not names & _varying.varying_axes(leaf):
            return leaf
        if is_common(leaf):
            return _varying.to_invarying(leaf, axis)
        name = f"params{jax.tree_util.keystr(path)}"
        raise ValueError(
            f"the update of {name} differs between the workers of axis {axis!r}: no transformation "
            "in tx reduces its gradient over that axis, or one that is around the exchange uses "
            "the gradient of a worker, as optax.contrib.mechanize does. Put "
            f"optax_ext.ok_topk(density=..., axis={axis!r}) or optax_ext.dense(axis={axis!r}) "
            "first in the chain, and the wrapper around what follows it; or, to freeze "
            f"{name}, give it optax.set_to_zero(), which exchanges nothing: "
            "optax.partition({'train': tx, 'freeze': optax.set_to_zero()}, labels)."
        )

    return jax.tree_util.tree_map_with_path(common, updates)


def state_of(opt_state: Any, specs: Any, axis: AxisName) -> Any:
    """The state, with values typed as the same on every worker where ``specs`` say so.

    Raises:
      ValueError: such a value depends on a gradient that nothing has reduced.
    """
    if not _varying.checks_varying(axis):
        return opt_state  # The types do not record it.
    # The rows of a node's shards differ along the axis inside of it, and not along the nodes.
    names, common_along = set(_axes.axis_names(axis)), functools.cache(common_among)
    leaves, structure = jax.tree_util.tree_flatten_with_path(opt_state)

    def common(path: Any, leaf: Any, spec: Any) -> Any:
        split = set(_axes.axis_names(spec[0])) if len(spec) else set()
        along = tuple(sorted((names & _varying.varying_axes(leaf)) - split, key=str))
        if not along:
            return leaf
        if common_along(along)(leaf):
            return _varying.to_invarying(leaf, along)
        raise ValueError(
            f"opt_state{jax.tree_util.keystr(path)} differs between the workers of axis "
            f"{axis!r}: a transformation makes its state from gradients that are not reduced "
            "yet. Put it after the allreduce in the chain, or give it to the allreduce as "
            "local=, which keeps a state for each worker. To accumulate gradients before the "
            "allreduce, use optax_ext.multi_steps; for momentum before it, use "
            "optax_ext.momentum_correction."
        )

    pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
    return structure.unflatten([common(path, leaf, spec) for (path, leaf), spec in pairs])
