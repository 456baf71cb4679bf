"""Checks of calls at trace time, with errors that name the fix."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._step import _layout
from optax_ext._step._accumulation import Residual
from optax_ext._step._sparse_state import Settings
from sparse_collectives import AxisName, Selector, SparseAllreduce, _compat, _validation, transport


class UnboundAxisError(ValueError):
    """The axis of a transformation is not bound at the place of the call."""

    def __init__(self, axis: Any):
        if bound := _compat.bound_axes():
            message = (
                f"axis={axis!r} is not bound here; the bound axes are {bound}. Give the "
                f"transformation one of these as axis=, or the mapped function axis_name={axis!r}."
            )
        else:
            message = (
                f"axis={axis!r} is not bound here. Make the state with optax_ext.init_state(tx, "
                "params, mesh), on a mesh with that axis, or call tx.init under "
                "jax.set_mesh(mesh). If other code calls tx.init, as flax's TrainState.create and "
                "nnx.Optimizer do, give it optax_ext.with_mesh(tx, mesh). Call tx.update in a step "
                "with @optax_ext.data_parallel instead of @jax.jit or @nnx.jit, or inside "
                "jax.shard_map, jax.pmap or sparse_collectives.simulate; "
                "optax_ext.make_train_step does that."
            )
        super().__init__(message)
        self.axis = axis


def workers(axis: AxisName) -> int:
    """P, the size of the bound axis."""
    if not _compat.axis_is_bound(axis):
        raise UnboundAxisError(axis)
    return transport.axis_size(axis)


def check_parts(selector: Any, allreduce: Any) -> None:
    """Each part has the type of its argument."""
    wanted = (
        ("selector", selector, Selector, "sparse_collectives.select.topk(density=0.01)"),
        ("allreduce", allreduce, SparseAllreduce, "sparse_collectives.allreduce.topk_a()"),
    )
    for name, part, kind, example in wanted:
        if not isinstance(part, kind):
            raise TypeError(
                f"{name} must be a {kind.__name__}, got {part!r} of type {type(part).__name__}. "
                f"Write for example {name}={example}."
            )


def check_residual_option(residual: Any) -> None:
    """The option was made by :func:`optax_ext.residual`."""
    if residual is not None and not isinstance(residual, Residual):
        raise TypeError(
            f"residual must be made by optax_ext.residual, got {residual!r}. Write for example "
            "residual=optax_ext.residual(jnp.bfloat16, decay=0.99)."
        )


def check_step_ahead(residual: Residual | None, local: Any) -> None:
    """A residual that is applied to the parameters has their unit."""
    if residual is not None and residual.step_ahead and local is None:
        raise ValueError(
            f"residual has step_ahead={residual.step_ahead}, but without local= it holds "
            "gradients, which can't be added to parameters. Apply the learning rate and its sign "
            "before the exchange, with local=optax.scale_by_learning_rate(rate), and use no "
            "optimizer after it; or use optax_ext.sparse_adamw or sparse_sgd."
        )


def check_limit(limit: Any, local: Any) -> None:
    """A limit of updates is positive, and the exchanged values are updates of parameters."""
    if limit is None:
        return
    if local is None:
        raise ValueError(
            "limit bounds how far an entry of the parameters moves in a step, but without local= "
            "the exchanged values are gradients. Apply the learning rate and its sign before the "
            "exchange, with local=optax.scale_by_learning_rate(rate), and use no optimizer after "
            "it; or use optax_ext.sparse_adamw. To clip gradients, use "
            "optax_ext.local_clip_by_global_norm."
        )
    check_positive_limit(limit)


def check_positive_limit(limit: Any) -> None:
    """A limit is a schedule, an array, or a number above 0."""
    if callable(limit) or isinstance(limit, jax.Array):
        return
    number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not number or not limit > 0:
        raise ValueError(f"limit must be a number greater than 0 or None, got {limit!r}.")


def check_every(every: Any) -> int:
    """H; 1 for None, the default, as optax.inject_hyperparams would make an array of a number."""
    return 1 if every is None else _validation.check_positive_int("every", every)


def check_late(decay: float, dense_steps: Any) -> None:
    """An exchange during the steps of a round is sparse, and its residuals have no decay."""
    if decay != 1.0:
        raise ValueError(
            f"residual(decay={decay}) in optax_ext.make_train_round: workers take steps during an "
            "exchange, and a decay at its end would lose a part of the delivered entries. Leave "
            "decay out."
        )
    if callable(dense_steps) or dense_steps:
        raise ValueError(
            f"dense_steps={dense_steps!r} in optax_ext.make_train_round, whose exchanges are all "
            "sparse. Take the dense steps with optax_ext.make_train_step, and make the rounds with "
            "a tx that has none: the state is the same."
        )


def check_rounds(every: Any, local: Any, dense_leaves: Any) -> int:
    """H; in rounds residuals hold updates of parameters, and every parameter has a residual."""
    every = check_every(every)
    if every == 1:
        return every
    if local is None:
        raise ValueError(
            f"every={every} lets each worker take its own steps between two exchanges, but without "
            "local= its residual holds gradients, which are no steps of the parameters. Apply the "
            "learning rate and its sign before the exchange, with "
            "local=optax.scale_by_learning_rate(rate), and use no optimizer after it; or use "
            "optax_ext.sparse_adamw or sparse_sgd. To accumulate gradients and exchange their sum: "
            "optax_ext.multi_steps(tx, k)."
        )
    if dense_leaves is not None:
        raise ValueError(
            f"every={every} lets each worker take its own steps between two exchanges, and dense "
            "leaves have no residual that keeps them. Leave out dense_leaves=, or write every=1."
        )
    return every


def check_hyperparameter(name: str, value: Any, low: float, high: float) -> float | jax.Array:
    """A number in [low, high], or a scalar array of any value from ``inject_hyperparams``."""
    if not isinstance(value, jax.Array):
        return _validation.check_number(name, value, low, high)
    if value.shape:
        raise ValueError(f"{name} must be a number or a scalar, got an array of {value.shape}.")
    return value.astype(jnp.float32)


def check_learning_rate(rate: Any) -> None:
    """A number, an array of ``inject_hyperparams``, or a schedule."""
    number = isinstance(rate, int | float | np.generic | np.ndarray | jax.Array)
    if not number and not callable(rate):
        raise TypeError(
            f"learning_rate must be a number, such as 1e-3, or a schedule of optax, got {rate!r}."
        )


def whether_dense(answer: Any) -> jax.Array:
    """The answer of a function ``dense_steps``, as ``bool[]``."""
    given = jnp.asarray(answer) if isinstance(answer, (bool, np.bool_, jax.Array)) else None
    if given is None or given.shape or given.dtype != jnp.bool_:
        came = repr(answer) if given is None else f"{given.dtype}{list(given.shape)}"
        raise ValueError(
            "dense_steps must return one bool for the number of the step, as lambda step: "
            f"step >= 9000 does; it returned {came}."
        )
    return given


def check_densities(selector: Selector, allreduce: SparseAllreduce) -> None:
    """The selector selects no more than the allreduce delivers, if both declare a density."""
    specs = selector.spec, allreduce.spec
    selected, delivered = (None if spec is None else spec.number("density") for spec in specs)
    if selected is not None and delivered is not None and selected > delivered:
        raise ValueError(
            f"the selector has density={selected} and the allreduce density={delivered}: every "
            "worker would select entries that the result has no room for, and keep them. Give "
            f"both density={selected}, or both density={delivered}."
        )


def check_shard_axis(axis: AxisName, shard_axis: AxisName) -> None:
    """``axis`` has the axes of the nodes and, as ``shard_axis``, of the workers in a node."""
    # In the form in which it was given: a single name is not a tuple.
    names = _compat.axis_names(shard_axis)
    _compat.outer_axis(axis, names[0] if len(names) == 1 else names)


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
    if _compat.axis_names(state) != _compat.axis_names(tx):
        raise ValueError(
            f"the state was made for axis={state!r}, and the transformation has axis={tx!r}. Make "
            "the state with optax_ext.init_state(tx, params, mesh), of the same tx as the step."
        )


def check_workers(state: Settings, workers: int) -> None:
    """The state was made for this number of workers."""
    if state.workers != workers:
        raise ValueError(
            f"the state was made for {state.workers} workers, and axis {state.axis!r} has "
            f"{workers}. optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh)) "
            f"makes one for {workers}, and keeps what the residuals hold."
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
    if got.treedef != expected.treedef and _names(got) != _names(expected):
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


def _names(layout: _layout.TreeLayout) -> list[tuple[Any, ...]]:
    """The path of each leaf, without the box around a single leaf, such as a variable of flax."""
    tree = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    box = jax.tree_util.GetAttrKey("value")
    return [path[:-1] if path and path[-1] == box else path for path in paths]


def check_residual(residual: Any, size: int, workers: int, axis: AxisName) -> None:
    """The state is this worker's part of a state for this number of workers."""
    if residual.ndim == 2 and residual.shape == (1, size):
        # Only types can distinguish one row for all workers from a row for each.
        shared = _compat.checks_varying(axis) and not _compat.is_varying(residual, axis)
        if shared and workers > 1:
            raise ValueError(
                f"state.residual is one row that all {workers} workers of axis {axis!r} share, and "
                "each must have its own: in_specs leaves the axis out, or the state was returned "
                "by out_specs without it, which keeps the residual of one worker and loses the "
                "others. Write optax_ext.state_specs(opt_state) in in_specs and in out_specs."
            )
        return
    if residual.ndim == 2 and residual.shape[0] > 1:
        lead = residual.shape[0]
        raise ValueError(
            f"state.residual has {lead} rows inside the mapped function, where each worker must "
            f"see one: the state was made for {lead} workers and passed whole, or for "
            f"{lead * workers} and is split over {workers}. Pass it with "
            "in_specs=optax_ext.state_specs(opt_state), or make a state for "
            f"{workers} workers with optax_ext.init_state(tx, params, mesh)."
        )
    raise ValueError(
        f"state.residual has shape {tuple(residual.shape)}, expected (1, {size}) inside the mapped "
        "function. Under pmap call init inside the mapped function, so that the leading axis of "
        "each worker is kept; under shard_map pass in_specs=optax_ext.state_specs(opt_state)."
    )
