"""Checks of gradients, losses and states in a step of many workers.

Under ``shard_map(check_vma=True)`` types record whether a value is the same on all workers. Under
``pmap``, ``check_vma=False`` and :func:`~sparse_collectives.simulate` they do not. There the checks
read the traced equations that made a value, which costs nothing at run time. A value without such
equations, such as a gradient that another program has computed, proves nothing.
"""

import os
import sys
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._step._checks import workers
from optax_ext._step._equations import depends_on, is_reduced
from sparse_collectives import AxisName, _compat


def check_local_gradients(updates: Any, axis: AxisName) -> None:
    """The gradients are this worker's own, not yet summed over the axis."""
    if not _compat.checks_varying(axis):
        check_not_averaged(updates, axis)
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if not _compat.is_varying(leaf, axis):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} is the same on every worker of axis "
                f"{axis!r}: the gradients are already summed or averaged over it, so there is "
                "nothing left to compress. One of these is the cause:\n"
                "  - in a mapped function of your own, gradients with respect to parameters that "
                "all workers share, which jax.grad sums under shard_map(check_vma=True): "
                "differentiate at optax_ext.ahead(params, opt_state), as optax_ext.make_train_step "
                "does, or at\n"
                f"    jax.lax.pcast(params, {axis!r}, to='varying')\n"
                "  - jax.lax.pmean or psum of the gradients: take it out, the transformation "
                "averages them;\n"
                "  - another allreduce of optax_ext earlier in the chain: keep one of the two."
            )


def check_not_averaged(updates: Any, axis: AxisName) -> None:
    """The equations do not prove that all leaves are already sums over the axis; reads no types."""
    leaves = jax.tree.leaves(updates)
    if workers(axis) > 1 and leaves and is_reduced(leaves, axis):
        raise ValueError(_averaged(axis))


def _averaged(axis: AxisName) -> str:
    return (
        f"the updates are the same on every worker of axis {axis!r}: the gradients are summed, "
        "averaged or gathered over it before the allreduce, so there is nothing left to compress. "
        "Take jax.lax.pmean or psum of the gradients out of the step (the transformation averages "
        "them), and keep one allreduce of optax_ext in the chain."
    )


def warn_without_ahead(updates: Any, state: Any, params: Any) -> None:
    """Warns if a gradient was taken at the parameters although the optimizer looks ahead.

    The equations show that it was made from ``params`` and not from the residual. They do not
    show how another program computed a gradient.
    """
    if not state.settings.step_ahead or params is None or not state.layout.size:
        return
    leaves = jax.tree.leaves(updates)
    if not depends_on(leaves, jax.tree.leaves(params)):
        return
    if not depends_on(leaves, [state.residual]):
        warnings.warn(
            "the gradients were taken at params, but the optimizer expects them at look-ahead "
            f"parameters (step_ahead={state.settings.step_ahead!r}). Without look-ahead it is "
            "another algorithm, which converges worse: write "
            "jax.grad(loss_fn)(optax_ext.ahead(params, opt_state), batch), for a model of flax nnx "
            "optax_ext.ahead(model, optimizer), or turn look-ahead off with "
            "residual=optax_ext.residual().",
            stacklevel=level_of_caller(),
        )


_INSIDE = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(optax.__file__ or "")


def level_of_caller() -> int:
    """The ``stacklevel`` of a warning at the first code outside of this library and optax."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def check_loss(result: Any, has_aux: bool) -> Any:
    """A loss function returned a scalar of this worker, or with auxiliary values a pair."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"loss_fn must return (loss, aux), as has_aux=True says, got {_described(result)}. "
            "Return a pair, or leave has_aux out."
        )
    loss = result[0] if has_aux else result
    if loss is None or isinstance(loss, (tuple, list, dict)):
        raise TypeError(
            f"loss_fn must return a scalar, got {_described(loss)}. For auxiliary values "
            "write has_aux=True in optax_ext.make_train_step, and return (loss, aux)."
        )
    if jnp.shape(loss):
        raise TypeError(
            f"loss_fn must return a scalar, got {_described(loss)}. Return the mean over the "
            "examples, as loss.mean() is."
        )
    return result


def check_loss_is_local(loss: Any, axis: AxisName) -> None:
    """The equations of a loss do not prove that it is a sum over the workers already."""
    if is_reduced([loss], axis):
        raise ValueError(
            f"loss_fn returned the same on every worker of axis {axis!r}: it takes pmean or psum "
            "over that axis, and the gradients would be divided by the number of workers twice. "
            "Return the mean over the examples of this worker; the step averages over the workers."
        )


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    if hasattr(result, "shape"):
        return f"an array of shape {result.shape}"
    return f"a {type(result).__name__}"


def check_same_on_devices(
    updates: Any, free: Sequence[tuple[Hashable, ...]], axis: AxisName
) -> None:
    """The gradient of a parameter is the same on all devices of a worker that replicate it."""
    if not _compat.checks_varying(axis):
        return  # The types do not record it.
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, leaf), names in zip(leaves, free, strict=True):
        differs = [name for name in names if name in _compat.varying_axes(leaf)]
        if differs:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} may differ between the devices of a worker "
                f"along {differs[0]!r}, which all hold the same of that parameter: each has the "
                "gradient of its own part of the loss. Add them up with jax.lax.psum(gradient, "
                f"{differs[0]!r}) before tx.update."
            )


def check_replicated_updates(updates: Any, axis: AxisName) -> None:
    """The transformation has reduced the gradients: every worker has the same updates."""
    if not _compat.checks_varying(axis):
        return  # The types do not record it.
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if set(_compat.axis_names(axis)) & _compat.varying_axes(leaf):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} of tx differ between the workers of axis "
                f"{axis!r}: no transformation in it reduces the gradients over that axis. Put "
                f"optax_ext.ok_topk(density=..., axis={axis!r}) or optax_ext.dense(axis={axis!r}) "
                "first in the chain."
            )


def check_state_types(opt_state: Any, specs: Any, axis: AxisName) -> None:
    """Values that ``specs`` declares to be the same on every worker are the same."""
    if not _compat.checks_varying(axis):
        return  # The types do not record it.
    names = set(_compat.axis_names(axis))
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        split = set(_compat.axis_names(spec[0])) if len(spec) else set()
        if (names & _compat.varying_axes(leaf)) - split:
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} differs between the workers of axis "
                f"{axis!r}: a transformation makes its state from gradients that are not reduced "
                "yet. Put it after the allreduce in the chain, or give it to the allreduce as "
                "local=, which keeps a state for each worker. To accumulate gradients before the "
                "allreduce, use optax_ext.multi_steps; for momentum before it, use "
                "optax_ext.momentum_correction."
            )
