"""Where the arguments of a training step are, and where its results stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext._state import _host_checks, _index, _placement, _specs
from optax_ext._train import _same_program
from sparse_collectives import _axes, _validation


def of(params: Any, opt_state: Any, mesh: Mesh, batch_spec: PartitionSpec | None) -> Places:
    """The placement, from the shardings of the parameters and the settings of the state.

    Raises:
      ValueError: parameters that are sharded in another way than the state was made for.
      ValueError: a batch_spec that does not begin with the axis of the workers.
    """
    # Replicated parameters do not show whether the devices divide them up; the state does.
    index = _index.of(opt_state)
    dealt = index.is_parted
    # Along an axis of one device, sharded and whole parameters are the same.
    split = {name for name, size in mesh.shape.items() if size > 1}
    given = _placement.given_of(_with_places(params, index, mesh), mesh)
    if given is not None:
        found = {path: _specs.restricted(spec, split) for path, spec in given.specs.items()}
        given = given._replace(specs=found) if any(map(len, found.values())) else None
    if given is None and dealt:
        given = _placement.given_of(params, mesh, PartitionSpec())
    axis = index.axis
    batch = PartitionSpec(axis) if batch_spec is None else batch_spec
    workers = _axes.axis_names(axis)
    first = _axes.axis_names(batch[0]) if len(batch) and batch[0] is not None else ()
    if first[: len(workers)] != workers:
        raise ValueError(
            f"batch_spec={batch_spec} must split the leading dimension over the workers first, and "
            f"then over other axes: PartitionSpec(({', '.join(map(repr, workers))}, ...))."
        )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    _check(given, index, split)
    shared = split.intersection(first[len(workers) :])
    if given is None and shared and index.sparse:
        raise ValueError(
            f"batch_spec={batch_spec} splits the examples of a worker over several devices, which "
            "all hold all parameters, and the state is not dealt out among them. Make it with "
            "optax_ext.init_state(tx, params, mesh, specs=jax.sharding.PartitionSpec())."
        )
    if given is None:
        specs, states = [PartitionSpec()] * len(paths), _specs.state_specs(opt_state)
    else:
        specs = [given.specs[path] for path in paths]
        states = _placement.placements(opt_state, params, given)
    # XLA replicates results without entries; split, they would be other arguments at the next call.
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(opt_state), strict=True)
    leaves = [spec if np.size(x) else PartitionSpec() for spec, x in pairs]
    return Places(
        [NamedSharding(mesh, spec) for spec in specs],
        [NamedSharding(mesh, spec) for spec in leaves],
        NamedSharding(_placement.with_auto_axes(mesh), batch),
        sharded=given is not None or bool(shared),
    )


class Places:
    """The shardings of parameters, state and batch, leaf by leaf; static to a jitted step."""

    def __init__(
        self,
        params: list[NamedSharding],
        states: list[NamedSharding],
        batch: NamedSharding,
        *,
        sharded: bool,
    ):
        self._params = tuple(params)
        self._states = tuple(states)
        self._batch = batch
        self._devices = batch.device_set
        self.sharded = sharded

    def __hash__(self) -> int:
        return hash((self._params, self._states))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and (self._params, self._states) == (
            other._params,
            other._states,
        )

    @property
    def mesh(self) -> Any:
        """The mesh of parameters and state, with the axis types of the program."""
        return self._params[0].mesh if self._params else self._states[0].mesh

    @property
    def explicit(self) -> bool:
        """Whether that mesh has explicit axes."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def if_kept(self) -> Places | None:
        """The argument of a jitted step: None if there is nothing to keep in place."""
        return self if self.sharded or self.explicit else None

    def holds(self, params: Any) -> bool:
        """Whether the parameters are in their places."""
        if not self.sharded:
            # Shards would have to be gathered.
            return not any(map(_is_sharded, jax.tree.leaves(params)))
        leaves = zip(jax.tree.leaves(params), self._params, strict=True)
        return all(_is_at(leaf, place) for leaf, place in leaves)

    def holds_state(self, opt_state: Any) -> bool:
        """Whether the state is in its place."""
        leaves = zip(jax.tree.leaves(opt_state), self._states, strict=True)
        return all(getattr(leaf, "sharding", None) == place for leaf, place in leaves)

    def put(self, params: Any) -> Any:
        """The parameters, moved to their places."""
        return _put(params, self._params, "params")

    def put_state(self, opt_state: Any) -> Any:
        """The state, moved to its place."""
        return _put(opt_state, self._states, "opt_state")

    def put_batch(self, batch: Any) -> Any:
        """A batch, moved to its place if that matters."""
        if self.sharded:
            return jax.tree.map(lambda x: _place(x, self._batch), batch)
        everywhere, devices = NamedSharding(self.mesh, PartitionSpec()), self._devices

        def reached(x: Any) -> Any:
            # A program takes no array that is committed to some of its devices only.
            here = isinstance(x, Tracer) or not isinstance(x, jax.Array) or not x.committed
            here = here or x.sharding.device_set == devices
            return x if here else jax.device_put(x, everywhere)

        return jax.tree.map(reached, batch)

    @functools.cached_property
    def auto(self) -> Places:
        """The same places, with the axis types that a mapped function can leave to the compiler."""
        mesh = _placement.with_auto_axes(self.mesh)
        params, states = (
            [NamedSharding(mesh, x.spec) for x in each] for each in (self._params, self._states)
        )
        return Places(params, states, self._batch, sharded=self.sharded)

    def on_auto_axes(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """All with the axis types of :attr:`auto`."""
        if not self.explicit:
            return params, opt_state, batch

        def typed(x: Any) -> Any:
            here = jax.typeof(x).sharding
            explicit = AxisType.Explicit in here.mesh.axis_types
            return jax.device_put(x, NamedSharding(self.auto.mesh, here.spec)) if explicit else x

        return self.auto.put(params), self.auto.put_state(opt_state), jax.tree.map(typed, batch)

    def constrain(self, results: tuple[Any, ...], others: PartitionSpec) -> tuple[Any, ...]:
        """Parameters and state of a step, in the places of the previous ones.

        All ``others`` of the results are placed by one spec.
        """
        params, opt_state, *rest = results
        if not self.explicit:
            params, opt_state = map(_constrained, results[:2], (self._params, self._states))
            return params, opt_state, *rest
        place = NamedSharding(self.mesh, others)
        rest = jax.tree.map(lambda x: jax.device_put(x, place), rest)
        return self.put(params), self.put_state(opt_state), *rest


def _check(given: Any, index: _index.Index, split: Collection[Any]) -> None:
    """Checks that parameters are sharded as the state was made for, over the axes ``split``."""
    for name, then in _recorded(index):
        now = PartitionSpec() if given is None else given.specs.get(name, then)
        if _specs.restricted(then, split) != _specs.restricted(now, split):
            raise ValueError(
                f"params{name} is sharded as {now}, and was sharded as {then} when the state "
                "was made. Put it back with jax.device_put, or make another state with "
                "optax_ext.init_state(tx, params, mesh); optax_ext.reshard(opt_state, that) "
                "keeps what the residuals hold."
            )


def _recorded(index: _index.Index) -> Iterator[tuple[str, PartitionSpec]]:
    """The paths of the parameters of sparse exchanges, each with its spec in the state."""
    for _, layout in index.sparse:
        numbers = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(numbers):
            yield jax.tree_util.keystr(path), layout.sharding.spec(leaf)


def _with_places(params: Any, index: _index.Index, mesh: Mesh) -> Any:
    """The parameters; in a traced program their shapes, with the shardings that are known."""
    recorded = dict(_recorded(index))

    def known(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tracer):
            return leaf
        typed = jax.typeof(leaf).sharding
        spec = recorded.get(jax.tree_util.keystr(path), PartitionSpec())
        if AxisType.Explicit in typed.mesh.axis_types:
            spec = typed.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(known, params)


def _is_at(x: Any, place: NamedSharding) -> bool:
    here = getattr(x, "sharding", None)
    if here == place:
        return True
    return isinstance(here, NamedSharding) and here.is_equivalent_to(place, x.ndim)


def _is_sharded(x: Any) -> bool:
    placed = getattr(x, "sharding", None)
    return isinstance(placed, NamedSharding) and not placed.is_fully_replicated


def put_leaves(
    leaves: list[Any], places: Sequence[NamedSharding], name_of: Callable[[int], str]
) -> list[Any]:
    """Arrays, moved to their places; ``name_of`` is the name of one for an error.

    Raises:
      ValueError: an array of this process that is another one in another process.
    """
    own = [i for i, pair in enumerate(zip(leaves, places, strict=True)) if _is_of_process(*pair)]
    if own:
        leaves, hosts = [*leaves], [_on_host(leaves[i]) for i in own]
        _same_program.check_values(places[own[0]].mesh, hosts, lambda i: name_of(own[i]))
        for i, host in zip(own, hosts, strict=True):
            leaves[i] = _spread(host, places[i], leaves[i])
    return _placed(leaves, places)


def _is_of_process(x: Any, place: NamedSharding) -> bool:
    """Whether an array of this process alone is to be put on devices of several."""
    if isinstance(x, jax.ShapeDtypeStruct) or place.is_fully_addressable:
        return False
    return _host_checks.is_local(x)


def _on_host(x: Any) -> np.ndarray:
    """The array, or the words of keys."""
    host = np.asarray(jax.random.key_data(x) if _validation.is_key(x) else x)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


def _spread(host: np.ndarray, place: NamedSharding, like: Any) -> jax.Array:
    # jax.device_put would compare the processes by values, and NaN is not equal to itself.
    made = jax.make_array_from_callback(host.shape, place, lambda index: host[index])
    if not _validation.is_key(like):
        return made
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(like))


def _put(tree: Any, places: Sequence[NamedSharding], name: str) -> Any:
    leaves, treedef = jax.tree.flatten(tree)

    def name_of(i: int) -> str:
        return name + jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[i][0])

    return treedef.unflatten(put_leaves(leaves, places, name_of))


def _constrained(tree: Any, places: tuple[NamedSharding, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, places, strict=True)
    return treedef.unflatten([jax.lax.with_sharding_constraint(x, place) for x, place in pairs])


def _placed(leaves: Sequence[Any], places: Sequence[NamedSharding]) -> list[Any]:
    found = [_here(x, place) for x, place in zip(leaves, places, strict=True)]
    left = [None if done else place for (_, done), place in zip(found, places, strict=True)]
    return _placement.put_together([x for x, _ in found], left)


def _place(x: Any, sharding: NamedSharding) -> Any:
    return _placed([x], [sharding])[0]


def _here(x: Any, sharding: NamedSharding) -> tuple[Any, bool]:
    """The array in its place or to be put there, and whether it is there."""
    here = getattr(x, "sharding", None)
    if here == sharding:
        return x, True
    if isinstance(x, jax.ShapeDtypeStruct):
        # To lower a step, no arrays are needed.
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), True
    if isinstance(x, Tracer) and AxisType.Explicit not in sharding.mesh.axis_types:
        # Without it the compiler would choose the placement of what a loop carries.
        return jax.lax.with_sharding_constraint(x, sharding), True
    return x, False
