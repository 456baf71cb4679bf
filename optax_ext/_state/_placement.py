"""Where parameters are on a mesh, and where the optimizer's arrays for them go."""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext._error_feedback._param_sharding import ParamSharding
from optax_ext._error_feedback._roles import Rows
from optax_ext._state import _index, _specs
from sparse_collectives import _axes, _validation


def with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, which a mapped function can leave to the compiler.

    ``jax.make_mesh`` makes explicit axes, whose arrays shard_map takes only as they are typed.
    """
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


@contextlib.contextmanager
def around(mesh: Any) -> Generator[None]:
    """Replaces the mesh of ``jax.set_mesh``, if there is one, by this one with its axis types."""
    set_by_user = _axes.ambient_mesh()
    if not isinstance(mesh, Mesh) or set_by_user is None:
        yield
    elif isinstance(set_by_user, Mesh) and set_by_user != mesh:
        with jax.set_mesh(mesh):
            yield
    elif set_by_user.shape == mesh.shape and set_by_user.axis_types != mesh.axis_types:
        # JAX is tracing.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    else:
        yield


def of_program(mesh: Mesh, arrays: Any = ()) -> Mesh:
    """The mesh for results: ``mesh`` if the program around has its explicit axes, else Auto axes.

    It has them under ``jax.set_mesh(mesh)``, and if some of its ``arrays``, traced or not, are on
    them: JAX takes an operand, or a carried value of a loop, only with the axis types of the
    others.
    """
    around = [_axes.ambient_mesh(), *map(_mesh_of, jax.tree.leaves(arrays))]
    explicit = any(m is not None and AxisType.Explicit in m.axis_types for m in around)
    return mesh if explicit else with_auto_axes(mesh)


def _mesh_of(x: Any) -> Any:
    """The mesh that an array is typed on, or None."""
    placed = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return getattr(placed, "mesh", None)


def typed(tree: Any, types: Callable[[Mesh], Mesh]) -> Any:
    """Arrays on another mesh of the same devices, in the same places."""

    def place_of(x: Any) -> NamedSharding | None:
        here = getattr(x, "sharding", None)
        if isinstance(x, Tracer) or not isinstance(here, NamedSharding):
            return None
        mesh = types(here.mesh) if isinstance(here.mesh, Mesh) else here.mesh
        return None if mesh == here.mesh else NamedSharding(mesh, here.spec)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(put_together(leaves, list(map(place_of, leaves))))


def put_together(leaves: list[Any], places: list[Any]) -> list[Any]:
    """``leaves``, those with a place put there by one call, which takes less time than many."""
    moved = [i for i, place in enumerate(places) if place is not None]
    found = [*leaves]
    # JAX puts no keys on devices of several processes, but their words.
    keys = {i for i in moved if _validation.is_key(leaves[i])} if _are_shared(places) else ()
    words = [jax.random.key_data(leaves[i]) if i in keys else leaves[i] for i in moved]
    given = words, [places[i] for i in moved]
    for i, x in zip(moved, jax.device_put(*given) if moved else (), strict=True):
        found[i] = x if i not in keys else _key_of(x, leaves[i])
    return found


def _are_shared(places: list[Any]) -> bool:
    return any(place is not None and not place.is_fully_addressable for place in places)


def _key_of(words: jax.Array, like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))


def readable(params: Any, mesh: Any) -> Any:
    """The parameters for a program on ``mesh``, whose axes are Auto.

    Arrays that are committed to other devices, as restored ones are, are read into the host.
    """
    if not isinstance(mesh, Mesh):
        return params
    devices = {*mesh.devices.flat}

    def one(x: Any) -> Any:
        if isinstance(x, Tracer) or not isinstance(x, jax.Array) or not x.committed:
            return x
        elsewhere = x.sharding.device_set != devices and x.is_fully_addressable
        return np.asarray(x) if elsewhere else x

    return typed(jax.tree.map(one, params), with_auto_axes)


def as_params(tree: Any, params: Any) -> Any:
    """Arrays for parameters, moved to where each of these is on its mesh."""

    def one(x: Any, parameter: Any) -> Any:
        if isinstance(x, Tracer) or isinstance(parameter, Tracer):
            return x
        place = getattr(parameter, "sharding", None)
        if not isinstance(place, NamedSharding) or not isinstance(place.mesh, Mesh):
            return x
        here = place.device_set == x.sharding.device_set
        return jax.device_put(x, place) if here else x

    return jax.tree.map(one, tree, params)


def on_auto_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of arrays, which computes on Auto axes also under a ``jax.set_mesh`` of others.

    Its results are on the axes that the program has.
    """

    @functools.wraps(function)
    def anywhere(*args: Any, **kwargs: Any) -> Any:
        mesh = _explicit(_axes.ambient_mesh(), (args, kwargs))
        if mesh is None:
            return function(*args, **kwargs)
        args, kwargs = typed((args, kwargs), with_auto_axes)
        with around(with_auto_axes(mesh)):
            results = function(*args, **kwargs)
        return on_axes_of(mesh, results)

    return anywhere


def _explicit(ambient: Any, arrays: Any) -> Mesh | None:
    """The mesh with explicit axes that the program or one of the arrays is on, if there is one."""
    meshes = [ambient, *map(_mesh_of, jax.tree.leaves(arrays))]
    found = [m for m in meshes if isinstance(m, Mesh) and m != with_auto_axes(m)]
    return found[0] if found else None


def on_axes_of(mesh: Mesh, tree: Any) -> Any:
    """Arrays on the devices of a mesh, with the types of its axes."""
    auto = with_auto_axes(mesh)
    return typed(tree, lambda found: mesh if found == auto else found)


def as_around(tree: Any, arrays: Any) -> Any:
    """Arrays with the explicit axes of the program, or of ``arrays``, if they are on that mesh."""
    mesh = _explicit(_axes.ambient_mesh(), arrays)
    return tree if mesh is None else on_axes_of(mesh, tree)


def given_of(
    params: Any, mesh: Mesh | AbstractMesh | Mapping[str, int], specs: Any = None
) -> ParamSharding | None:
    """How the parameters are sharded over the mesh.

    None if they are whole on each device and no ``specs`` say that this is intended. With ``specs``
    the devices of a worker divide among them the parameters that all of them hold.

    Args:
      params: arrays or their shapes.
      mesh: the mesh, or the sizes of its axes.
      specs: a tree of PartitionSpecs, a prefix of the tree of ``params``; None: the specs of the
        arrays.

    Raises:
      ValueError: a leaf is sharded over another mesh, or over an axis that this one lacks.
    """
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    flat = jax.tree_util.tree_leaves_with_path(params)
    if specs is None:
        found = [_spec_on(mesh, path, leaf) for path, leaf in flat]
    else:
        found = jax.tree.leaves(
            jax.tree.map(
                lambda spec, tree: jax.tree.map(lambda _: spec, tree),
                specs,
                params,
            ),
        )
    for (path, _), spec in zip(flat, found, strict=True):
        missing = [n for dim in spec if dim for n in _axes.axis_names(dim) if n not in sizes]
        if missing:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has the spec {spec}, and axis {missing[0]!r} "
                f"is not an axis of the mesh, whose axes are {tuple(sizes)}."
            )
    if specs is None and not any(dim for spec in found for dim in spec):
        return None
    paths = (jax.tree_util.keystr(path) for path, _ in flat)
    return ParamSharding({**sizes}, dict(zip(paths, found, strict=True)))


def _spec_on(mesh: Any, path: Any, leaf: Any) -> PartitionSpec:
    placed = getattr(leaf, "sharding", None)
    if not isinstance(placed, NamedSharding) or isinstance(leaf, Tracer):
        return PartitionSpec()
    spec = _specs.restricted(placed.spec, placed.mesh.axis_names)
    if not len(spec):
        return spec
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    same = dict(placed.mesh.shape) == sizes
    if same and isinstance(mesh, Mesh) and isinstance(placed.mesh, Mesh):
        same = np.array_equal(mesh.devices, placed.mesh.devices)
    if not same:
        raise ValueError(
            f"params{jax.tree_util.keystr(path)} is sharded over another mesh, {placed.mesh}, than "
            f"the one that was given, {mesh}. Put the parameters on it with jax.device_put."
        )
    return spec


def placements(opt_state: Any, params: Any, given: ParamSharding) -> Any:
    """The spec of each array of the state of all workers, over all axes of the mesh.

    Transformations after the exchange keep arrays in the shapes of the parameters, under their
    paths, such as ``mu`` and ``nu`` of Adam; these are sharded as the parameters are. All other
    arrays have a copy on each device, as the compiler does not report a preferred placement.

    Args:
      opt_state: shapes of the state of all workers.
      params: the parameters.
      given: how they are sharded.
    """
    leaves = {
        path: (np.shape(leaf), given.specs[jax.tree_util.keystr(path)])
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def spec_of(path: tuple, shape: tuple[int, ...]) -> PartitionSpec:
        for start in range(len(path) + 1):
            known = leaves.get(path[start:])
            if known is not None and known[0] == shape:
                return known[1]
        return PartitionSpec()

    flat, treedef = jax.tree_util.tree_flatten_with_path(opt_state)
    index = _index.index_of(treedef)
    index.check(opt_state)

    def spec(known: _index.Leaf, path: tuple, shape: tuple[int, ...]) -> PartitionSpec:
        if known.rows is Rows.NONE:
            return spec_of(path, shape)
        if known.rows in (Rows.WORKER, Rows.JOINED):
            return PartitionSpec(*known.spec, *spec_of(path, shape[1:]))
        return known.spec

    pairs = zip(index.leaves, flat, strict=True)
    return treedef.unflatten([spec(known, path, np.shape(x)) for known, (path, x) in pairs])


def specs_like(params: Any, given: ParamSharding) -> Any:
    """The specs as a tree like the parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: given.specs[jax.tree_util.keystr(path)], params
    )


def put(params: Any, mesh: Mesh, given: ParamSharding) -> Any:
    """The parameters on the mesh, placed as ``given`` says."""

    def place(path: tuple, leaf: Any) -> Any:
        if isinstance(leaf, Tracer):
            return leaf
        spec = given.specs[jax.tree_util.keystr(path)]
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, params)
