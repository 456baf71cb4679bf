"""Checks at trace time: of states and gradients in an update, and of losses in a step.

Under ``shard_map(check_vma=True)`` types record whether a value is the same on all workers. Under
``pmap``, ``check_vma=False`` and :func:`~sparse_collectives.simulate` they do not. There the checks
read the traced equations that made a value, which costs nothing at run time. A value without such
equations, such as a gradient that another program has computed, proves nothing.
"""

import inspect
import os
import re
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _layout
from optax_ext._error_feedback._equations import arguments_of, depends_on, is_reduced
from optax_ext._error_feedback._sparse_state import Settings
from sparse_collectives import AxisName, _axes, _validation, _varying, transport


class UnboundAxisError(ValueError):
    """The axis of a transformation is not bound at the place of the call."""

    def __init__(self, axis: Any):
        if bound := _axes.bound_axes():
            message = (
                f"axis={axis!r} is not bound here; the bound axes are {bound}. Give the "
                f"transformation one of these as axis=, or the mapped function axis_name={axis!r}."
            )
        else:
            message = (
                f"axis={axis!r} is not bound here. Make the state with optax_ext.init_state(tx, "
                "params, mesh), on a mesh with that axis, or call tx.init under "
                "jax.set_mesh(mesh); in a program of jax.pmap map what calls it, "
                f"jax.pmap(create, axis_name={axis!r}). If other code calls tx.init, as flax's "
                "TrainState.create and nnx.Optimizer do, give it optax_ext.with_mesh(tx, mesh). "
                "Call tx.update in a step "
                "with @optax_ext.data_parallel instead of @jax.jit or @nnx.jit, or inside "
                "jax.shard_map, jax.pmap or sparse_collectives.simulate; "
                "optax_ext.make_train_step does that."
            )
        super().__init__(message)
        self.axis = axis


def workers(axis: AxisName) -> int:
    """P, the size of the bound axis."""
    if not _axes.axis_is_bound(axis):
        raise UnboundAxisError(axis)
    return transport.axis_size(axis)


def check_settings(state: Settings, tx: Settings) -> None:
    """The state was made by a transformation with these settings."""
    check_state_axis(state.axis, tx.axis)
    fields = ("selector", "allreduce", "residual", "correction")
    pairs = [(name, getattr(state, name), getattr(tx, name)) for name in fields]
    pairs.append(("every", str(state.every), str(tx.every)))
    differences = [
        f"{name}={_parts_of(then, now)} in the state and {name}={_parts_of(now, then)} in tx"
        for name, then, now in pairs
        # A custom part need not have a spec, and a traced array has no value to compare.
        if then is not None and now is not None and _without_hashes(then) != _without_hashes(now)
    ]
    if differences:
        raise ValueError(
            f"the state was made for another transformation: {'; '.join(differences)}. Give update "
            "the state of this tx. To go on with other settings, and with the residuals: "
            "optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh)). For a density "
            "that changes from step to step: selector=sparse_collectives.select.scheduled(...)."
        )


def check_state_axis(state: Any, tx: Any) -> None:
    """The state was made for the axis of the transformation."""
    if _axes.axis_names(state) != _axes.axis_names(tx):
        raise ValueError(
            f"the state was made for axis={state!r}, and the transformation has axis={tx!r}. Make "
            "the state with optax_ext.init_state(tx, params, mesh), of the same tx as the step."
        )


def check_workers(state: Settings, axis: AxisName) -> None:
    """The state was made for this number of workers."""
    if state.workers != (here := workers(axis)):
        raise ValueError(
            f"the state was made for {state.workers} workers, and axis {state.axis!r} has "
            f"{here}. optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh)) "
            f"makes one for {here}, and keeps what the residuals hold."
        )


def _parts_of(text: str, other: str) -> str:
    """A spec with only the arguments that the other spec does not have."""
    (name, arguments), (other_name, others) = _split(text), _split(other)
    kept = [argument for argument in arguments if argument not in others]
    return f"{name}({', '.join(kept)})" if kept and name == other_name else text


def _split(spec: str) -> tuple[str, list[str]]:
    """The name in a spec, and its arguments, separated at commas outside of brackets."""
    name, _, rest = spec.removesuffix(")").partition("(")
    arguments, depth = [""], 0
    for part in re.split(r"([,(\[{}\])])", rest):
        depth += (part in "([{") - (part in ")]}") if part else 0
        if part == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += part
    return name, [argument.strip() for argument in arguments]


def _without_hashes(text: str) -> str:
    return re.sub(r"#[0-9a-f]{8}", "", text)


def check_layout(expected: _layout.TreeLayout, got: _layout.TreeLayout) -> None:
    """The updates have the tree, shapes and dtypes of the parameters at init."""
    if got == expected:
        return
    if got.treedef != expected.treedef and names_of(got) != names_of(expected):
        raise ValueError(
            f"updates have another tree than the params that init was called with: expected "
            f"{expected.treedef}, got {got.treedef}. Call init with the parameters that you "
            "differentiate with respect to."
        )
    paths = jax.tree_util.tree_flatten_with_path(
        jax.tree.unflatten(expected.treedef, range(len(expected.shapes)))
    )[0]
    for path, leaf in paths:
        old = (expected.shapes[leaf], expected.dtypes[leaf])
        new = (got.shapes[leaf], got.dtypes[leaf])
        if old != new:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} has shape {new[0]} and dtype {new[1]}, but "
                f"init was called with shape {old[0]} and dtype {old[1]}. Cast or reshape the "
                "gradient, or make a new state with init. (Inside a function that is mapped over "
                "axes that shard the parameters, pass the state that "
                "optax_ext.init_state(tx, params, mesh) makes from the sharded parameters.)"
            )
    for path, leaf in paths:
        if got.dense[leaf] != expected.dense[leaf]:
            now, then = ("dense" if x[leaf] else "sparse" for x in (got.dense, expected.dense))
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {now} in one state and {then} in the "
                "other. Give both transformations the same dense_leaves (and powersgd and acp_sgd "
                "the same rank, which makes some leaves dense)."
            )


def names_of(layout: _layout.TreeLayout) -> list[tuple[Any, ...]]:
    """The path of each leaf, without the box around a single leaf, such as a variable of flax."""
    tree = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    box = jax.tree_util.GetAttrKey("value")
    return [path[:-1] if path and path[-1] == box else path for path in paths]


def check_residual(residual: Any, size: int, axis: AxisName) -> None:
    """The state is this worker's part of a state for this number of workers."""
    if residual.ndim == 2 and residual.shape == (1, size):
        # Only types can distinguish one row for all workers from a row for each.
        shared = _varying.checks_varying(axis) and not _varying.is_varying(residual, axis)
        if shared and transport.axis_size(axis) > 1:
            raise ValueError(
                f"state.residual is one row that all {workers(axis)} workers of axis {axis!r} "
                "share, and each must have its own: in_specs leaves the axis out, or the state was "
                "returned by out_specs without it, which keeps the residual of one worker and "
                "loses the others. Write optax_ext.state_specs(opt_state) in in_specs and in "
                "out_specs."
            )
        return
    if residual.ndim == 2 and residual.shape[0] > 1:
        lead, here = residual.shape[0], workers(axis)
        raise ValueError(
            f"state.residual has {lead} rows inside the mapped function, where each worker must "
            f"see one: the state was made for {lead} workers and passed whole, or for "
            f"{lead * here} and is split over {here}. Pass it with "
            "in_specs=optax_ext.state_specs(opt_state), or make a state for "
            f"{here} workers with optax_ext.init_state(tx, params, mesh). (jax.pmap has no "
            "in_specs: make the state with jax.pmap(tx.init, axis_name=...), and pass it with "
            "in_axes=0.)"
        )
    raise ValueError(
        f"state.residual has shape {tuple(residual.shape)}, expected (1, {size}) inside the mapped "
        "function. Under pmap call init inside the mapped function, so that the leading axis of "
        "each worker is kept; under shard_map pass in_specs=optax_ext.state_specs(opt_state)."
    )


def own_gradients(updates: Any, axis: AxisName) -> Any:
    """The gradients, typed as this worker's own, which are not yet summed over the axis."""
    if not _varying.checks_varying(axis):
        check_not_averaged(updates, axis)
        return updates
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        # A constant, such as zeros for a frozen leaf, is the same everywhere and no sum.
        if _varying.is_varying(leaf, axis):
            continue
        if arguments_of([leaf]) or is_reduced([leaf], axis):
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
    return _varying.to_varying(updates, axis)


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

    Also if the update itself is for the look-ahead parameters. The equations show that it was made
    from ``params`` and not from the residual. They do not show how another program computed a
    gradient.
    """
    if not state.settings.step_ahead or params is None or not state.layout.size:
        return
    if depends_on(jax.tree.leaves(params), [state.residual]):
        warnings.warn(
            "tx.update was given the look-ahead parameters of this worker, which then become "
            "those of the model and differ between the workers: only the gradient is taken at "
            "optax_ext.ahead(params, opt_state). Give params to tx.update and to "
            "optax.apply_updates.",
            stacklevel=level_of_caller(),
        )
        return
    leaves = jax.tree.leaves(updates)
    if not depends_on(leaves, jax.tree.leaves(params)):
        return
    if not depends_on(leaves, [state.residual]) and not all(map(_is_handed_over, leaves)):
        warnings.warn(
            "the gradients were taken at params, but the optimizer expects them at look-ahead "
            f"parameters (step_ahead={state.settings.step_ahead!r}). Without look-ahead it is "
            "another algorithm, which converges worse: write "
            "jax.grad(loss_fn)(optax_ext.ahead(params, opt_state), batch), for a model of flax nnx "
            "optax_ext.ahead(model, optimizer), or turn look-ahead off with "
            "residual=optax_ext.residual().",
            stacklevel=level_of_caller(),
        )


def _is_handed_over(update: Any) -> bool:
    """Whether it is made from a gradient of another part of the program, ``[1, ...]``.

    A step of all workers takes gradients there, at the look-ahead parameters. Here, a
    transformation before the exchange may read the parameters.
    """
    wanted = (1, *jnp.shape(update))
    return any(jnp.shape(x) == wanted for x in arguments_of([update]))


_INSIDE = (
    os.path.dirname(os.path.dirname(__file__)),
    *(os.path.dirname(library.__file__ or "") for library in (optax, jax)),
)


def level_of_caller() -> int:
    """The ``stacklevel`` of a warning at the first code outside of this library, optax and jax."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
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
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"loss_fn must return a real number, got one of {jnp.result_type(loss)}, which has no "
            "gradient. For an accuracy or a count return (loss, aux), with has_aux=True."
        )
    if has_aux:
        advice = "The step returns the means of auxiliary values over the workers. Leave it out."
        _validation.check_arrays("aux", result[1], advice, keys=False)
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
    if not _varying.checks_varying(axis):
        return  # The types do not record it.
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, leaf), names in zip(leaves, free, strict=True):
        differs = [name for name in names if name in _varying.varying_axes(leaf)]
        if differs:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} may differ between the devices of a worker "
                f"along {differs[0]!r}, which all hold the same of that parameter: each has the "
                "gradient of its own part of the loss. Add them up with jax.lax.psum(gradient, "
                f"{differs[0]!r}) before tx.update."
            )
