"""The parameters at which a worker takes its gradient, also of models of equinox and flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from optax_ext._state import _nnx, _residual_tree


def ahead(params: Any, opt_state: Any) -> Any:
    """The parameters at which this worker takes its gradient.

    Inside the step of :func:`data_parallel`, or of a mapped function of your own::

        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, opt_state), batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)

    With a ``step_ahead`` (:func:`residual`) it is ``params`` and a share of this worker's residual,
    and with :func:`local_steps` ``params`` and what this worker has moved; else the parameters. In
    either case they are typed as this worker's own, as local gradients need under
    ``shard_map(check_vma=True)``. (:func:`make_train_step` does all of this.)

    With :func:`~sparse_collectives.allreduce.hierarchical` a node has one residual, which its
    workers gather: n words inside the node.

    Args:
      params: the parameters, the same on every worker; or a model of equinox, whose leaves that are
        no arrays stay as they are; or a model of flax nnx, which shares all other variables with
        the result. (One that the loss creates, as ``sow`` does, is in the result alone.)
      opt_state: the state of this worker, before the step. For a model of flax nnx this is the
        ``nnx.Optimizer``.

    Returns:
      The tree of ``params``, in its dtypes. Cost: one pass over n entries.

    Raises:
      ValueError: outside of the mapped function.
      ValueError: a state of other parameters.
      ValueError: no allreduce in ``opt_state``.
      ValueError: a hierarchical one over MPI communicators, with a ``step_ahead``.

    References:
      Xu, Huo and Huang, `Step-Ahead Error Feedback for Distributed Training with
      Compressed Gradient <https://arxiv.org/abs/2008.05823>`_, AAAI 2021.
    """
    if _nnx.is_module(params):
        graph, own, rest = _nnx.nnx().split(params, opt_state.wrt, ...)
        return _nnx.nnx().merge(graph, _residual_tree.ahead(own, _nnx.arrays(opt_state)), rest)
    if all(map(is_array, jax.tree.leaves(params))):
        return _residual_tree.ahead(params, opt_state)
    arrays = jax.tree.map(lambda x: x if is_array(x) else None, params)
    there, others = _residual_tree.ahead(arrays, opt_state), jax.tree.structure(params)
    left = iter(jax.tree.leaves(there))
    return others.unflatten([next(left) if is_array(x) else x for x in jax.tree.leaves(params)])


def is_array(x: Any) -> bool:
    """Whether a leaf is an array, and not a constant such as a function."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) or type(x) is int
