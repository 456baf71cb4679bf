"""The parts of a round: an exchange, local steps, and a last step that applies the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from optax_ext._loop import _step_checks, _train_step
from optax_ext._state import _find, _placement
from optax_ext._step import _phases, _sparse_state
from sparse_collectives import _compat


class Parts:
    """The parts of a round, and the round as a whole, each over a mesh."""

    def __init__(
        self,
        chain: optax.GradientTransformationExtraArgs,
        loss_fn: Callable[..., Any],
        check_vma: bool,
    ):
        self._chain = chain
        self._loss_fn = loss_fn
        self._check_vma = check_vma

    def round(self, mesh: Mesh, params: Any, opt_state: Any, batches: Any) -> Any:
        """The whole round in one program."""
        axis = _check(mesh, opt_state, batches)
        shapes = params  # Only the shapes are read.

        def of_worker(params, opt_state, batches):
            arrived = self._exchanged(axis, shapes, opt_state)
            params, opt_state, losses = self._local(axis, params, opt_state, batches)
            return self._last(axis, params, opt_state, batches, losses, arrived)

        return self._mapped(mesh, axis, opt_state, of_worker, arrives=False)(
            params, opt_state, batches
        )

    def local(self, mesh: Mesh, params: Any, opt_state: Any, batches: Any) -> Any:
        """All steps but the last, without communication between workers."""
        axis = _check(mesh, opt_state, batches)

        def of_worker(params, opt_state, batches):
            return self._local(axis, params, opt_state, batches)

        return self._mapped(mesh, axis, opt_state, of_worker, arrives=False)(
            params, opt_state, batches
        )

    def exchange(self, mesh: Mesh, shapes: Any, opt_state: Any) -> Any:
        """The exchange of the residuals: an ``Arrived`` for each sparse allreduce."""
        axis = _find.axis_of(opt_state)

        def of_worker(opt_state):
            return [_sent(x) for x in self._exchanged(axis, shapes, opt_state)]

        return jax.shard_map(
            of_worker,
            mesh=mesh,
            in_specs=(_placement.state_specs(opt_state),),
            out_specs=_arrived_specs(opt_state, axis),
            check_vma=self._check_vma,
        )(opt_state)

    def last(self, mesh: Mesh, *args: Any) -> Any:
        """The last step, which applies the update that has arrived."""
        opt_state, batches = args[1], args[2]
        axis = _check(mesh, opt_state, batches)

        def of_worker(params, opt_state, batches, losses, arrived):
            arrived = [_received(x) for x in arrived]
            return self._last(axis, params, opt_state, batches, losses, arrived)

        return self._mapped(mesh, axis, opt_state, of_worker, arrives=True)(*args)

    def _mapped(self, mesh: Mesh, axis: Any, opt_state: Any, function: Any, *, arrives: bool):
        specs, whole = _placement.state_specs(opt_state), PartitionSpec()
        of_each = PartitionSpec(None, axis)
        more = (of_each, _arrived_specs(opt_state, axis)) if arrives else ()
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(whole, specs, of_each, *more),
            out_specs=(whole, specs, of_each),
            check_vma=self._check_vma,
        )

    def _exchanged(self, axis: Any, shapes: Any, opt_state: Any) -> list[_phases.Arrived]:
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        opt_state = _phases.of(_phases.EXCHANGE, opt_state)
        _, opt_state = self._chain.update(
            _compat.to_varying(nothing, axis), opt_state, nothing, value=jnp.zeros(())
        )
        return _phases.arrived(opt_state)

    def _local(self, axis: Any, params: Any, opt_state: Any, batches: Any) -> Any:
        def step(carry, batch):
            params, opt_state = carry
            *new, loss = self._step(axis, params, opt_state, batch)
            return jax.tree.map(_compat.varying_like, tuple(new), carry), loss[None]

        # The scan needs carried values to keep their types.
        opt_state = _phases.of(_phases.LOCAL, _sparse_state.strongly_typed(opt_state))
        batches = jax.tree.map(lambda x: x[:-1], batches)
        (params, opt_state), losses = lax.scan(step, (params, opt_state), batches)
        return params, _phases.of(None, opt_state), losses

    def _last(self, axis: Any, params, opt_state, batches, losses, arrived) -> Any:
        batch = jax.tree.map(lambda x: x[-1], batches)
        opt_state = _phases.with_arrived(opt_state, arrived)
        params, opt_state, loss = self._step(axis, params, opt_state, batch)
        return params, opt_state, jnp.concatenate([losses, loss[None, None]])

    def _step(self, axis: Any, params: Any, opt_state: Any, batch: Any) -> Any:
        params, opt_state, loss = _train_step.step_of_worker(
            self._chain, self._loss_fn, axis, params, opt_state, batch, of_each=True
        )
        return params, _sparse_state.strongly_typed(opt_state), loss


def _check(mesh: Mesh, opt_state: Any, batches: Any) -> Any:
    """The axis of the workers, after a check that these arguments make a round."""
    states = _find.get_states(opt_state)
    every = {state.settings.every for state in states}
    if len(every) != 1 or every == {1} or len(_find.reductions(opt_state)) > len(states):
        raise ValueError(
            "tx of optax_ext.make_train_round must have the same every=, greater than 1, in all of "
            f"its parts, got every={sorted(every) or [1]}. Write for example "
            "optax_ext.sparse_adamw(rate, every=10, axis=...)."
        )
    if _has_wrapper(opt_state):
        raise ValueError(
            "tx of optax_ext.make_train_round has a wrapper around its exchange that accumulates "
            "gradients or steps. Remove the wrapper, and use every= of sparse_adamw instead."
        )
    if any(state.settings.shard_axis or state.devices > 1 for state in states):
        raise ValueError(
            "optax_ext.make_train_round is for workers that hold all parameters and a whole "
            "residual each. With sharded parameters, or a hierarchical allreduce, use "
            "optax_ext.make_train_step."
        )
    (steps,) = every
    axis = _step_checks.axis_on(mesh, opt_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batches):
        name, shape = f"batches{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        if len(shape) < 2 or shape[0] != steps:
            raise ValueError(
                f"{name} has shape {shape}: a round takes the batches of {steps} steps, stacked, "
                f"[{steps}, batch, ...], as tx has every={steps}."
            )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    _step_checks.check_batch(one, mesh, axis)
    return axis


def _has_wrapper(opt_state: Any) -> bool:
    def wraps(node: Any) -> bool:
        return _find.accumulates(node) and bool(_find.reductions(node))

    nodes = jax.tree.leaves(opt_state, is_leaf=wraps)
    return bool(_find.moved(opt_state)) or any(map(wraps, nodes))


def _arrived_specs(opt_state: Any, axis: Any) -> list[Any]:
    """The specs of a list of ``Arrived``, as :func:`_sent` returns them."""
    whole, own = PartitionSpec(), PartitionSpec(axis)
    states = [state for state in _find.get_states(opt_state) if state.layout.size]

    def one_of(state: Any) -> Any:
        info = jax.tree.map(lambda _: whole, state.info)
        return _phases.Arrived(
            mean=whole,
            changed={
                "selector": own,
                "allreduce": whole,
                "dropped": whole,
                "withheld": whole,
                "info": _sparse_state.per_worker(info, lambda _: own),
            },
            kept=own,
            before=own,
            replaced=own,
        )

    return list(map(one_of, states))


def _sent(arrived: _phases.Arrived) -> _phases.Arrived:
    """Adds a leading axis to the values of each worker."""
    return _in_each(arrived, lambda x: x[None])


def _received(arrived: _phases.Arrived) -> _phases.Arrived:
    return _in_each(arrived, lambda x: x[0])


def _in_each(arrived: _phases.Arrived, function: Any) -> _phases.Arrived:
    mean, changed, *own = arrived
    info = _sparse_state.per_worker(changed["info"], function)
    return _phases.Arrived(mean, {**changed, "info": info}, *jax.tree.map(function, tuple(own)))
