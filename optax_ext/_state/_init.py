"""Makes the state of all workers, on a mesh or on one device, wherever ``init`` is called."""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_ext._error_feedback import _layout, _param_sharding, _sparse_state
from optax_ext._error_feedback._trace_checks import UnboundAxisError
from optax_ext._state import (
    _find,
    _flax,
    _held,
    _host_checks,
    _index,
    _placement,
    _specs,
    _wrappers,
)
from sparse_collectives import AxisName, _axes


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    *,
    specs: Any = None,
) -> Any:
    """``tx.init(params)`` for all workers, with each worker's part on its own device of a mesh.

    The workers are along the axis of the transformation. Other axes of the mesh may shard the
    parameters: a worker then has several devices, each of which selects from and exchanges its own
    part, and the state is sharded as the parameters are.

    Args:
      tx: a transformation with :func:`sparse_allreduce` or :func:`dense` anywhere in it.
      params: the parameters, whole on each worker: replicated, or sharded over axes of the mesh
        other than the axes of the workers.
      mesh: the mesh; an ``AbstractMesh`` only under ``jax.eval_shape``. Alternatively the sizes of
        its axes, such as ``{"data": 8}``: the state of all workers is then on the devices of
        ``params``, for inspection or to be filled with the values of the workers.
      specs: a tree of PartitionSpecs, or one for all leaves, for parameters whose arrays do not
        carry their sharding. None: the ``NamedSharding`` of the arrays. With ``PartitionSpec()``
        each device of a worker holds all parameters, and exchanges a part of them.

    Returns:
      The optimizer state, sharded as :func:`state_specs` says.

    Raises:
      ValueError: the mesh lacks the axis of ``tx``.
      ValueError: an ``AbstractMesh`` outside of ``jax.eval_shape``.
      ValueError: allreduces name different axes.
      ValueError: parameters are sharded over the axis of the workers, over another mesh, or
        unevenly.
      ValueError: an optimizer follows another one, as in ``optax.chain(sparse_adamw(...),
        optax.adamw(...))``, which increases the loss.
      ValueError: as :func:`state_specs`.
      TypeError: ``tx`` is not a transformation, or ``mesh`` is not a mesh.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(4), {"w": 2})
      >>> state.residual.shape
      (2, 4)
    """
    call = "optax_ext.init_state(tx, params, mesh)"
    _host_checks.check_transformation(call, tx, mesh, AbstractMesh, Mapping)
    _host_checks.check_order(call, params, None)
    if isinstance(mesh, AbstractMesh) and not isinstance(jnp.zeros(()), Tracer):
        raise ValueError(
            f"mesh is an AbstractMesh, which has no devices for the state: {mesh}. Write "
            "optax_ext.abstract_state(tx, params, mesh) for its shapes, or call init_state inside "
            "of jax.eval_shape."
        )
    _flax.register()
    _host_checks.check_params(params)
    wanted = mesh
    if isinstance(mesh, Mesh):
        mesh = _placement.with_auto_axes(mesh)
    with _placement.around(mesh):
        return _on(wanted, *_made(tx, _placement.readable(params, mesh), mesh, specs))


def _made(tx: Any, params: Any, mesh: Any, specs: Any) -> tuple[Any, Any]:
    """The state, and the specs of its arrays."""
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    names = tuple(sizes)
    given = _placement.given_of(params, mesh, specs)

    def init(params: Any) -> Any:
        made = tx.init(_param_sharding.sharded(params, given))
        # JAX sorts the keys of a dictionary, and with them the parts of a named chain.
        if message := _index.of(_wrappers.in_order(made)).misuse:
            raise ValueError(message)
        return _sparse_state.strongly_typed(made)

    everywhere = init
    for name in reversed(names):
        everywhere = jax.vmap(everywhere, in_axes=None, axis_name=name, axis_size=sizes[name])
    try:
        shapes = jax.eval_shape(everywhere, params)
    except UnboundAxisError as error:
        _host_checks.check_axis(error.axis, names)
        raise
    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(names) :], x.dtype), shapes)
    reduces = bool(_find.reductions(local))
    if reduces:
        axis = _find.axis_of(local)
        _host_checks.check_axis(axis, names)
        for state in _find.get_states(local):
            _param_sharding.check_found(state.layout.sharding, given, axis)
        _warn_of_multi_steps(local)
    specs = _specs.state_specs(local)
    if isinstance(mesh, Mapping):
        states = jax.jit(everywhere)(params)
        return jax.tree.map(lambda spec, x: _joined(x, spec, names), specs, states), specs
    if given is None or not reduces:
        mapped = jax.shard_map(init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
        return jax.jit(mapped)(params), specs
    workers = _axes.axis_names(_find.axis_of(local))
    mapped = jax.shard_map(
        init,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=_specs.state_specs(local, manual=workers),
        axis_names=set(workers),
    )
    whole = jax.eval_shape(jax.jit(mapped), params)
    where = _placement.placements(whole, params, given)
    if isinstance(mesh, AbstractMesh):
        return jax.jit(mapped)(params), where
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), where)
    made = jax.jit(mapped, out_shardings=placed)(_placement.put(params, mesh, given))
    return made, where


def _warn_of_multi_steps(state: Any) -> None:
    """Warns if ``optax.MultiSteps`` is around an allreduce, and saves none of its words."""

    def is_around(node: Any) -> bool:
        multi = isinstance(node, optax.MultiStepsState)
        return multi and bool(_find.reductions(node.inner_opt_state))

    if any(map(is_around, jax.tree.leaves(state, is_leaf=is_around))):
        warnings.warn(
            "optax.MultiSteps is around the allreduce, which then exchanges at every mini-step. "
            "Write optax_ext.multi_steps(tx, k) instead, which exchanges once in k mini-steps.",
            stacklevel=4,
        )


def _on(mesh: Any, state: Any, specs: Any) -> Any:
    """The state on the given mesh, whose axes may be explicit; no data moves."""
    tracers = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state))
    if not isinstance(mesh, Mesh) or mesh == _placement.with_auto_axes(mesh) or tracers:
        return state
    leaves, structure = jax.tree.flatten(state)
    places = [NamedSharding(mesh, spec) for spec in structure.flatten_up_to(specs)]
    return structure.unflatten(_placement.put_together(leaves, places))


def _joined(x: jax.Array, spec: PartitionSpec, names: tuple[str, ...]) -> jax.Array:
    """The values of all workers, along one leading axis for the names in ``spec``."""
    split = _axes.axis_names(spec[0]) if len(spec) else ()
    # In the order of the spec; along all other axes values are equal, and the first is taken.
    x = x[tuple(slice(None) if name in split else 0 for name in names)]
    kept = [name for name in names if name in split]
    order = [kept.index(name) for name in split]
    x = x.transpose(*order, *range(len(kept), x.ndim))
    if not split:
        return x
    lead, rest = x.shape[: len(split) + 1], x.shape[len(split) + 1 :]
    return x.reshape(math.prod(lead), *rest)


def transformation(
    init: Callable[[Any], Any], update: Callable[..., Any], axis: AxisName
) -> optax.GradientTransformationExtraArgs:
    """A transformation from an ``init`` and an ``update`` that need the axis.

    If the axis is not bound, ``init`` makes the state of all workers on the mesh of
    ``jax.set_mesh``, as :func:`optax_ext.init_state` does.
    """

    def anywhere(params: Any) -> Any:
        _flax.register()
        if _axes.axis_is_bound(axis):
            return init(params)
        names = _axes.axis_names(axis)
        if _layout.is_placeholder(params):
            return _of_one(init, names)(params)
        mesh = _axes.ambient_mesh()
        if mesh is None or not set(names) <= set(mesh.axis_names):
            return init(params)  # Raises an error with advice.
        return init_state(made, params, mesh)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    made = optax.GradientTransformationExtraArgs(cast(Any, anywhere), cast(Any, update))
    return made


def _of_one(init: Callable[[Any], Any], names: tuple[Hashable, ...]) -> Callable[[Any], Any]:
    """The shapes of the state of one worker."""
    for name in names:
        init = jax.vmap(init, in_axes=None, axis_name=name, axis_size=1)
    return lambda params: jax.eval_shape(lambda: init(params))


def with_mesh(
    tx: optax.GradientTransformation, mesh: Mesh | AbstractMesh, *, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """``tx`` whose ``init`` makes the state of all workers on a mesh, wherever it is called.

    Use it for libraries that call ``tx.init(params)`` themselves and take no mesh, such as flax's
    ``TrainState.create`` and ``nnx.Optimizer``. Under ``jax.set_mesh(mesh)`` it is not needed.

    Args:
      tx: a transformation with :func:`sparse_allreduce` or :func:`dense` anywhere in it.
      mesh: as in :func:`init_state`.
      specs: as in :func:`init_state`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with the ``update`` of ``tx``, except that a step
      that a reduction in it skips, or whose updates are not finite, changes nothing, as in
      :func:`make_train_step`. Inside a mapped function its ``init`` is also the ``init`` of ``tx``.

    Raises:
      ValueError: at ``init``: see :func:`init_state`.
      TypeError: ``tx`` is not a transformation, or ``mesh`` is not a mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = with_mesh(optax_ext.sparse_sgd(0.1, axis="data"), mesh)
      >>> tx.init({"w": jnp.zeros(4)}).residual.shape
      (1, 4)
    """
    _host_checks.check_transformation("optax_ext.with_mesh(tx, mesh)", tx, mesh, AbstractMesh)
    tx = _held.held(tx)

    def init(params: Any) -> Any:
        if _axes.bound_axes() or _layout.is_placeholder(params):
            return tx.init(params)
        return init_state(tx, params, mesh, specs=specs)

    return tx._replace(init=cast(Any, init))
