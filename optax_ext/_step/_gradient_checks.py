"""Checks of gradients, losses and states in a step of many workers.

Under ``shard_map(check_vma=True)`` types record whether a value is the same on all workers. Under
``pmap``, ``check_vma=False`` and :func:`~sparse_collectives.simulate` they do not. There the checks
read the traced equations that made a value, which costs nothing at run time. A value without such
equations, such as a gradient that another program has computed, proves nothing.
"""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_ext._step._checks import workers
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
            stacklevel=2,
        )


def check_loss(result: Any, has_aux: bool, axis: AxisName) -> Any:
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
    # A constant depends on no worker, and has no gradient.
    traced = isinstance(loss, Tracer) and _compat.checks_varying(axis)
    if traced and not _compat.is_varying(loss, axis):
        raise ValueError(
            f"loss_fn returned the same on every worker of axis {axis!r}: it takes pmean or psum "
            "over that axis, and the gradients would be divided by the number of workers twice. "
            "Return the mean over the examples of this worker; the step averages over the workers."
        )
    return result


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


# Their results are the same on all workers of their axes.
_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}

_REDUCTION, _OPERANDS, _OTHER = range(3)


def is_reduced(values: Iterable[Any], axis: AxisName) -> bool:
    """Whether the values are proven to be summed or gathered over the workers of ``axis``.

    Every path back from them ends in a reduction over ``axis`` or in a constant, and at least one
    in a reduction. If ``axis`` has several names, a reduction over one of them is enough.
    """
    values = [_compat.captured(x) for x in values]
    if _compat.is_communicator(axis):
        # Equations of JAX name no communicator.
        return False
    return any(_ends_in_reductions(values, name) for name in _compat.axis_names(axis))


def depends_on(values: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether any of the values was made from one of the sources, or is one."""
    wanted = {id(x) for x in map(_compat.captured, sources) if isinstance(x, Tracer)}
    seen: dict[int, Any] = {}
    stack = [_compat.captured(x) for x in values]
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue
        if id(x) in wanted:
            return True
        seen[id(x)] = x  # Kept, so that no other value gets its id.
        stack.extend(map(_compat.captured, _operands(x)))
    return False


def _operands(x: Any) -> list[Any]:
    eqn = _compat.made_by(x)
    return [] if eqn is None else list(eqn.invars)


def _ends_in_reductions(values: list[Any], name: Any) -> bool:
    reduced, seen, stack = False, {}, list(values)
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue  # A constant is the same everywhere.
        seen[id(x)] = x
        eqn = _compat.made_by(x)
        if eqn is None:
            return False  # An argument.
        kind = _kind(eqn, name)
        if kind == _OTHER:
            return False
        if kind == _REDUCTION:
            reduced = True
        else:
            stack.extend(map(_compat.captured, eqn.invars))
    return reduced


def _kind(eqn: Any, name: Any) -> int:
    """Whether the results of an equation are the same on all workers: a sum, or if operands are.

    An equation with inner equations (a call, a loop, a branch) is a reduction only if all of its
    results are reduced, as in ``jax.jit(lambda x: jax.lax.pmean(x, axis))``.
    """
    inner = [_compat.open_jaxpr(jaxpr)[0] for jaxpr in _compat.jaxprs_in(eqn)]
    if not inner:
        if name in _compat.axes_of_effects(eqn):
            whole = eqn.params.get("axis_index_groups") is None
            return _REDUCTION if eqn.primitive.name in _REDUCTIONS and whole else _OTHER
        return _OTHER if _compat.has_side_effects(eqn) else _OPERANDS
    if any(_kind(e, name) == _OTHER for jaxpr in inner for e in jaxpr.eqns):
        return _OTHER
    return _REDUCTION if all(_all_reduced(jaxpr, name) for jaxpr in inner) else _OPERANDS


def _all_reduced(jaxpr: Any, name: Any) -> bool:
    """Whether every result of a jaxpr comes from reductions only."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    stack = [x for x in jaxpr.outvars if _compat.is_variable(x)]
    reduced = bool(stack)
    while stack:
        eqn = made.get(stack.pop())
        if eqn is None:
            return False
        if _kind(eqn, name) == _OPERANDS:
            stack.extend(x for x in eqn.invars if _compat.is_variable(x))
    return reduced
