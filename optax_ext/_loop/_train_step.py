"""The training step of a data-parallel loop, for the most common case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import core as jax_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_ext._state import _find
from optax_ext._step import _checks
from sparse_collectives import _compat, transport
from sparse_collectives._types import AxisName


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis: AxisName,
    *,
    has_aux: bool = False,
    check_vma: bool = True,
    donate: bool = True,
) -> TrainStep:
    """A jitted ``step(params, opt_state, batch) -> (params, opt_state, loss)``.

    Each worker differentiates the loss of its part of the batch; ``tx`` turns the
    local gradients into one update for all. Parameters stay replicated.

    Args:
      loss_fn: ``loss_fn(params, batch) -> scalar``, the mean over the batch it is
        given; with ``has_aux``, ``(scalar, aux)``.
      tx: a transformation that starts with :func:`sparse_allreduce` or
        :func:`dense`, on the same axis. One that takes extra arguments gets the mean
        loss as ``value``, as ``optax.contrib.reduce_on_plateau`` asks for.
      mesh: the mesh.
      axis: the mesh axis (or a tuple of them) of the workers. The leaves of a
        batch are split over it along their leading dimension.
      has_aux: whether the loss returns auxiliary values too; their mean over the
        workers is returned as a fourth result.
      check_vma: as in ``jax.shard_map``. It proves at trace time that the new
        parameters are the same on every worker.
      donate: whether params and opt_state are donated: updated in place, and not
        to be used again by the caller.

    Returns:
      The step. The loss is the mean over the workers.

    Raises:
      ValueError: an axis that the mesh does not have; at the first call of a
        shape, a batch whose leading dimension P does not divide, or a ``tx`` that
        does not reduce the gradients over the axis, or keeps a state that differs
        between the workers; on a mesh over several processes, a batch that is no global
        array.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = optax.chain(optax_ext.ok_topk(density=0.5, axis="data"), optax.sgd(0.1))
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh, "data")
      >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh, "data")
      >>> params, opt_state, loss = step(params, opt_state, jnp.eye(2))
      >>> float(loss), params["w"].tolist()
      (2.5, [1.0, -1.7999999523162842])
    """
    _find.check_axis(mesh, axis)
    tx = optax.with_extra_args_support(tx)
    workers = 1
    for name in _compat.axis_names(axis):
        workers *= mesh.shape[name]

    def local_step(params, opt_state, batch):
        # Varying parameters have local gradients; replicated ones would have
        # gradients that autodiff has already summed, densely.
        local_params = _compat.to_varying(params, axis)
        loss, gradients = jax.value_and_grad(loss_fn, has_aux=has_aux)(local_params, batch)
        loss = jax.tree.map(lambda x: transport.pmean(x, axis), loss)
        value = loss[0] if has_aux else loss
        updates, opt_state = tx.update(gradients, opt_state, params, value=value)
        _checks.check_replicated_updates(updates, axis)
        _checks.check_state_types(opt_state, _find.state_specs(opt_state, axis), axis)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, *loss) if has_aux else (params, opt_state, loss)

    def step(params, opt_state, batch):
        _check_batch(batch, workers, axis)
        specs = _find.state_specs(opt_state, axis)
        whole = PartitionSpec()
        return jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(whole, specs, PartitionSpec(axis)),
            out_specs=(whole, specs, whole, whole)[: 4 if has_aux else 3],
            check_vma=check_vma,
        )(params, opt_state, batch)

    return TrainStep(jax.jit(step, donate_argnums=(0, 1) if donate else ()), mesh, axis)


class TrainStep:
    """A jitted training step; see :func:`make_train_step`."""

    def __init__(self, step: Any, mesh: Mesh, axis: AxisName):
        self._step = step
        self._mesh = mesh
        self._axis = axis

    def __call__(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, ...]:
        """``(params, opt_state, loss)``, or with aux a fourth."""
        _check_global(batch, self._mesh, self._axis)
        return self._step(*self._placed(params, opt_state), batch)

    def trace(self, params: Any, opt_state: Any, batch: Any) -> jax.stages.Traced:
        """As ``jax.jit(f).trace``, for :mod:`sparse_collectives.traffic` among others."""
        return self._step.trace(*self._placed(params, opt_state), batch)

    def lower(self, params: Any, opt_state: Any, batch: Any) -> jax.stages.Lowered:
        """As ``jax.jit(f).lower``."""
        return self._step.lower(*self._placed(params, opt_state), batch)

    def _placed(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        # Where an array is belongs to its type, so arrays that are not on the
        # mesh at the first call would make it another program than the second.
        specs = (PartitionSpec(), _find.state_specs(opt_state, self._axis))

        def place(spec, tree):
            sharding = NamedSharding(self._mesh, spec)
            return jax.tree.map(lambda x: _place(x, sharding), tree)

        return jax.tree.map(place, specs, (params, opt_state), is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _place(x: Any, sharding: NamedSharding) -> Any:
    here = getattr(x, "sharding", None)
    if here == sharding:
        return x
    if isinstance(x, jax.Array) and not sharding.is_fully_addressable and _is_local(x):
        # One committed to a device of this process would not be spread over others.
        x = np.asarray(x)
    return jax.device_put(x, sharding)


def _is_local(x: Any) -> bool:
    """Whether x is an array of this process alone."""
    if isinstance(x, jax_core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _check_global(batch: Any, mesh: Mesh, axis: AxisName) -> None:
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        # jit would take it for all workers' examples, and each process for others.
        if _is_local(leaf):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is an array of this process, but the mesh has "
                "devices of several. Make a global one of the examples that each process has "
                "read: jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, "
                f"jax.sharding.PartitionSpec({axis!r})), examples)."
            )


def _check_batch(batch: Any, workers: int, axis: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        shape = jax.numpy.shape(leaf)
        if not shape or shape[0] % workers:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {shape}: its leading dimension must "
                f"be a multiple of the {workers} workers of axis {axis!r}. Drop or pad the last "
                "examples."
            )
