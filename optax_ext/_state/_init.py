"""Making the state of all workers, on a mesh or on one device."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from optax_ext._state import _calls, _find, _placement, _whole, _wrappers
from optax_ext._step import _given
from optax_ext._step._checks import UnboundAxisError
from sparse_collectives import _compat


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    *,
    specs: Any = None,
) -> Any:
    """``tx.init(params)`` for all workers, each worker's part on its own device of a mesh.

    The axis is that of the transformation. Other axes of the mesh may shard the parameters: a
    worker is then several devices, each of which selects from and exchanges a part of its own,
    and the state is sharded as the parameters are.

    Args:
      tx: a transformation with :func:`sparse_allreduce` or :func:`dense` anywhere in it.
      params: the parameters, whole on each worker: replicated, or sharded over axes of the mesh
        that are not those of the workers.
      mesh: the mesh; an ``AbstractMesh`` only under ``jax.eval_shape``. Or the sizes of its
        axes, as ``{"data": 8}``: the state of all workers is then where ``params`` are, to
        be looked at, or to be filled with what the workers hold.
      specs: a tree of PartitionSpecs, or one for all leaves, of parameters whose arrays do not say
        how they are to be sharded. None: the ``NamedSharding`` of the arrays. With
        ``PartitionSpec()`` each device of a worker holds all of them, and exchanges a part.

    Returns:
      The optimizer state, sharded as :func:`state_specs` says.

    Raises:
      ValueError: the mesh has no such axis; allreduces that name different axes; parameters that
        are sharded over the axis of the workers, over another mesh, or not evenly; an optimizer
        behind a whole optimizer, as in ``optax.chain(sparse_adamw(...), optax.adamw(...))``, which
        trains uphill; see :func:`state_specs`.
      TypeError: a ``tx`` that is no transformation, a ``mesh`` that is none.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(4), {"w": 2})
      >>> state.residual.shape
      (2, 4)
    """
    call = "optax_ext.init_state(tx, params, mesh)"
    _calls.check_transformation(call, tx, mesh, AbstractMesh, Mapping)
    _calls.check_order(call, params, None)
    wanted = mesh
    if isinstance(mesh, Mesh):
        mesh = _placement.with_auto_axes(mesh)
    with _placement.around(mesh):
        return _on(wanted, *_made(tx, params, mesh, specs))


def _made(tx: Any, params: Any, mesh: Any, specs: Any) -> tuple[Any, Any]:
    """The state, and the specs of its arrays."""
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    names = tuple(sizes)
    given = _placement.given_of(params, mesh, specs)

    def init(params: Any) -> Any:
        with _given.sharded(given):
            return strongly_typed(tx.init(params))

    everywhere = init
    for name in reversed(names):
        everywhere = jax.vmap(everywhere, in_axes=None, axis_name=name, axis_size=sizes[name])
    try:
        shapes = jax.eval_shape(everywhere, params)
    except UnboundAxisError as error:
        check_axis(error.axis, names)
        raise
    local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(names) :], x.dtype), shapes)
    reduces = bool(_wrappers.reductions(local))
    if reduces:
        check_axis(_find.axis_of(local), names)
        _whole.check(tx, params, local, names)
    specs = _find.state_specs(local)
    if isinstance(mesh, Mapping):
        states = jax.jit(everywhere)(params)
        return jax.tree.map(lambda spec, x: _joined(x, spec, names), specs, states), specs
    if given is None or not reduces:
        mapped = jax.shard_map(init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
        return jax.jit(mapped)(params), specs
    workers = _compat.axis_names(_find.axis_of(local))
    mapped = jax.shard_map(
        init,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=_find.state_specs(local, manual=workers),
        axis_names=set(workers),
    )
    whole = jax.eval_shape(jax.jit(mapped), params)
    where = _placement.placements(whole, params, given)
    if isinstance(mesh, AbstractMesh):
        return jax.jit(mapped)(params), where
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), where, is_leaf=_find.is_spec)
    made = jax.jit(mapped, out_shardings=placed)(_placement.put(params, mesh, given))
    return made, where


def strongly_typed(opt_state: Any) -> Any:
    """The state without weak types, as ``optax.contrib.reduce_on_plateau`` makes one at first.

    A weak type that a step makes a strong one would be another program for the second step.
    """
    return jax.tree.map(
        lambda x: lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x,
        opt_state,
    )


def _on(mesh: Any, state: Any, specs: Any) -> Any:
    """The state on the mesh that was given, whose axes may be explicit; nothing moves."""
    tracers = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state))
    if not isinstance(mesh, Mesh) or mesh == _placement.with_auto_axes(mesh) or tracers:
        return state
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        state,
        is_leaf=_find.is_spec,
    )


def _joined(x: jax.Array, spec: PartitionSpec, names: tuple[str, ...]) -> jax.Array:
    """What all workers have, along one leading axis for the names in ``spec``."""
    split = _compat.axis_names(spec[0]) if len(spec) else ()
    # In the order of the spec; of what is the same along the other axes, the first.
    x = x[tuple(slice(None) if name in split else 0 for name in names)]
    kept = [name for name in names if name in split]
    order = [kept.index(name) for name in split]
    x = x.transpose(*order, *range(len(kept), x.ndim))
    if not split:
        return x
    lead, rest = x.shape[: len(split) + 1], x.shape[len(split) + 1 :]
    return x.reshape(math.prod(lead), *rest)


def check_axis(axis: Any, names: tuple[str, ...]) -> None:
    """Every name of ``axis`` is the name of an axis of the mesh."""
    _find.check_mesh_axis(_compat.static_axis(axis))
    missing = [name for name in _compat.axis_names(axis) if name not in names]
    if missing:
        raise ValueError(
            f"axis={axis!r} of the transformation is not an axis of the mesh, whose axes are "
            f"{names}. Make the mesh with jax.make_mesh(({jax.device_count()},), "
            f"({missing[0]!r},)), or give the transformation one of its axes."
        )
