"""The parts of a round: an exchange, local steps, and a last step that applies the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from optax_ext._error_feedback import _phases, _roles, _sparse_state
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _batch_checks, _host_checks, _index, _wrappers
from optax_ext._train import _mapped
from sparse_collectives import _varying


class Parts(NamedTuple):
    """The parts of a round, each over a mesh, and the round as a whole.

    Attributes:
      step: one step of all workers.
    """

    step: _mapped.Step

    def round(self, params: Any, opt_state: Any, batches: Any) -> Any:
        """The whole round in one program."""
        _check(self.step.mesh, opt_state, batches)
        arrived = self.exchange(self.step.mesh, params, opt_state)
        return self.last(*self.local(params, opt_state, batches), batches, arrived)

    def local(self, params: Any, opt_state: Any, batches: Any) -> tuple[Any, Any, Any]:
        """All steps but the last, without communication between workers."""
        _check(self.step.mesh, opt_state, batches)
        # The scan needs carried values to keep their types.
        opt_state = _phases.of(_phases.LOCAL, _sparse_state.strongly_typed(opt_state))
        workers = _mapped.Workers.of(opt_state)

        def one(carry: Any, batch: Any) -> Any:
            params, opt_state = carry
            made = self.step.gradients(workers, params, opt_state, batch)
            *carry, loss = self.step.update(workers, params, opt_state, made)
            return tuple(carry), loss

        batches = jax.tree.map(lambda x: x[:-1], batches)
        (params, opt_state), losses = lax.scan(one, (params, opt_state), batches)
        return params, _phases.of(None, opt_state), losses

    def exchange(self, mesh: Mesh, shapes: Any, opt_state: Any) -> Any:
        """The exchange of the residuals: an ``Arrived`` for each sparse allreduce."""
        workers = _mapped.Workers.of(opt_state)

        def of_worker(opt_state: Any) -> Any:
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            opt_state = _phases.of(_phases.EXCHANGE, opt_state)
            _, opt_state = self.step.chain.update(
                _varying.to_varying(nothing, workers.axis), opt_state, nothing, value=jnp.zeros(())
            )
            return [_in_each(x, lambda x: x[None]) for x in _phases.arrived(opt_state)]

        outs = _arrived_specs(workers)
        check_vma = self.step.check_vma
        return _mapped.mapped(of_worker, mesh, (workers.specs,), outs, check_vma=check_vma)(
            opt_state
        )

    def last(self, params: Any, opt_state: Any, losses: Any, batches: Any, arrived: Any) -> Any:
        """The last step, which applies the update that has arrived."""
        workers = _mapped.Workers.of(opt_state)
        batch = jax.tree.map(lambda x: x[-1], batches)
        made = self.step.gradients(workers, params, opt_state, batch)
        params, opt_state, loss = self.step.update(
            workers,
            params,
            opt_state,
            made,
            arrived,
            specs=(_arrived_specs(workers),),
            before=_with_arrived,
        )
        losses = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), losses, loss)
        return (params, opt_state, *losses) if self.step.has_aux else (params, opt_state, losses)


def _with_arrived(opt_state: Any, arrived: list[_phases.Arrived]) -> Any:
    return _phases.with_arrived(opt_state, [_in_each(x, lambda x: x[0]) for x in arrived])


def _check(mesh: Mesh, opt_state: Any, batches: Any) -> None:
    """Checks that these arguments make a round."""
    index = _index.of(opt_state)
    every = index.every
    if index.moves:
        raise ValueError(
            "tx of optax_ext.make_train_round has local_steps, or DiLoCo or another variant of it, "
            "which counts the steps of its rounds itself. Use it in optax_ext.make_train_step, or "
            "give make_train_round optax_ext.sparse_adamw(rate, every=10, axis=...)."
        )
    if len(every) != 1 or every == (1,) or not index.only_sparse:
        raise ValueError(
            "tx of optax_ext.make_train_round must have the same every=, greater than 1, in all of "
            f"its parts, got every={list(every) or [1]}. Write for example "
            "optax_ext.sparse_adamw(rate, every=10, axis=...)."
        )
    if index.accumulates:
        raise ValueError(
            "tx of optax_ext.make_train_round has a wrapper around its exchange that accumulates "
            "gradients or steps. Remove the wrapper, and use every= of sparse_adamw instead."
        )
    if not index.is_whole:
        raise ValueError(
            "optax_ext.make_train_round is for workers that hold all parameters and a whole "
            "residual each. With sharded parameters, or a hierarchical allreduce, use "
            "optax_ext.make_train_step."
        )
    (steps,) = every
    axis = _host_checks.axis_on(mesh, opt_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batches):
        name, shape = f"batches{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        if len(shape) < 2 or shape[0] != steps:
            raise ValueError(
                f"{name} has shape {shape}: a round takes the batches of {steps} steps, stacked, "
                f"[{steps}, batch, ...], as tx has every={steps}."
            )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    _batch_checks.check_batch(one, mesh, axis)


def _arrived_specs(workers: _mapped.Workers) -> list[Any]:
    """The specs of a list of ``Arrived``, in which values of a worker have a leading axis."""
    own, whole = workers.own, _mapped.WHOLE
    names = _roles.names(SparseAllreduceState, _roles.EXCHANGE)
    return [
        _phases.Arrived(
            mean=whole,
            changed={name: getattr(state, name) for name in names},
            kept=own,
            before=own,
            replaced=own,
        )
        for state in _wrappers.get_states(workers.specs)
        if state.layout.size
    ]


def _in_each(arrived: _phases.Arrived, function: Any) -> _phases.Arrived:
    mean, changed, *own = arrived
    info = _sparse_state.per_worker(changed["info"], function)
    return _phases.Arrived(mean, {**changed, "info": info}, *jax.tree.map(function, tuple(own)))
