"""The residuals at the end of a training, as one gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _host_checks, _index, _nnx, _placement, _shards, _wrappers
from optax_ext._state._residual_tree import check_shapes, residual_tree, spread
from sparse_collectives import _axes


@_placement.on_auto_axes
def consolidate(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Returns all residuals as one dense gradient, and the state without them.

    Use it at the end of a training, or before a model is exported: residuals hold gradients that
    the parameters have not received. The result is the mean over the workers, as if one step
    delivered everything. It is not an update yet: pass it to the part of the optimizer that
    follows the sparse allreduce. If the residuals are updates of the parameters, as in
    :func:`ok_topk_sgd` and with a ``local`` that ends in ``optax.scale_by_learning_rate``, add the
    result to the parameters with ``optax.apply_updates``.

    Args:
      params: the parameters, or anything of their structure and shapes. Leaves that
        no sparse allreduce covers get zeros.
      opt_state: the state of all workers, outside of the mapped function. For a model of flax nnx
        it may be ``optimizer.opt_state``, to which the new one can be assigned.

    Returns:
      ``(gradient, opt_state)``. The gradient has the tree of ``params`` and the
      dtypes of the gradients.

    Raises:
      ValueError: called inside the mapped function.
      ValueError: a state of other parameters, of ``jax.pmap``, or without an allreduce of this
        library.
      ValueError: arguments that have changed places.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 2.0], [3.0, 0.0]]))
      >>> gradient, state = consolidate(jnp.zeros(2), state)
      >>> gradient.tolist(), state.residual.tolist()
      ([2.0, 1.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    given, opt_state = opt_state, _nnx.arrays(opt_state)
    check("consolidate(params, opt_state)", params, opt_state)
    _check_nothing_moved(params, opt_state)
    gradient = residual_tree(opt_state, params, lambda node: _shards.leaves_of(node, mean(node)))
    rest = emptied(opt_state, lambda node: jnp.zeros_like(node.residual))
    return _placement.as_params(gradient, params), _nnx.like(given, rest)


def check(call: str, params: Any, opt_state: Any) -> None:
    """Checks that ``opt_state`` has residuals, and that the arguments are where ``call`` says."""
    if _nnx.is_module(params):
        raise TypeError(
            "params is a model of flax nnx. Give its parameters, nnx.state(model, nnx.Param), and "
            "put new ones back with nnx.update(model, params)."
        )
    _host_checks.check_order(f"optax_ext.{call}", params, opt_state)
    if not _wrappers.reductions(opt_state):
        raise ValueError(
            "opt_state has no residuals: no allreduce of optax_ext is in it. Give the state that "
            "the steps were made with, all of it."
        )


def _check_nothing_moved(params: Any, opt_state: Any) -> None:
    """Checks that no worker has moved since the last exchange.

    What parameters of 16 bits did not take of a common update is left as well. It is the same on
    every worker, and at most the last place of a parameter.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    index = _index.index_of(structure)
    rows = index.moved(leaves)

    def of_workers(number: Callable[[jax.Array], jax.Array]) -> list[Any]:
        return spread(reduced(number, rows), params)

    largest = of_workers(lambda moved: jnp.max(jnp.abs(moved), axis=0))
    is_narrow = any(jnp.result_type(leaf).itemsize < 4 for leaf in jax.tree.leaves(params))
    apart = largest
    if is_narrow:
        apart = of_workers(lambda moved: jnp.max(jnp.abs(moved - moved[:1]), axis=0))
    check_shapes(params, largest)
    for leaf, most, differs in zip(jax.tree.leaves(params), largest, apart, strict=True):
        if most is None or isinstance(most, Tracer) or not most.size:
            continue
        # Numbers, since the parameters may be on other devices than the state.
        beyond = float(jnp.max(jnp.abs(most)))
        if (dtype := jnp.result_type(leaf)).itemsize < 4 and not bool(jnp.any(differs != 0)):
            beyond -= float(jnp.finfo(dtype).eps) * float(jnp.max(jnp.abs(leaf)))
        if beyond > 0:
            first = "Apply them first, with params, opt_state = optax_ext.flush(params, opt_state)."
            if index.has_gradients:
                first = "Take steps to the end of the round first."
            raise ValueError(
                "opt_state is in the middle of a round of optax_ext.local_steps: the steps of the "
                f"workers since the last exchange are in no residual, and would be lost. {first}"
            )


def mean(node: SparseAllreduceState) -> jax.Array:
    """The mean of the residuals over the workers, ``f32[m, n]``, a row for each of m devices."""
    if _axes.axis_is_bound(node.settings.axis):
        raise ValueError(
            "consolidate was called inside the function mapped over axis "
            f"{node.settings.axis!r}, where each worker sees its own residual. Call it outside."
        )
    _host_checks.check_all_rows("opt_state", node)
    _host_checks.check_own("opt_state", node)
    rows = _shards.part_rows(node, node.residual).astype(jnp.float32)
    # Divide first: the sum may overflow when the mean does not.
    return reduced(lambda x: jnp.sum(x / node.workers, axis=0), rows)


def reduced(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """``function`` of each array, a reduction over the workers, of which one runs at a time.

    On CPUs several at once, over processes of several devices, can wait for each other.
    """
    return jax.tree.map(lambda x: jax.block_until_ready(function(x)), tree)


def emptied(opt_state: Any, rest: Callable[[SparseAllreduceState], jax.Array]) -> Any:
    """The state with other residuals."""

    def of(node: Any) -> Any:
        return node._replace(residual=rest(node)) if _wrappers.is_state(node) else node

    return jax.tree.map(of, opt_state, is_leaf=_wrappers.is_state)
