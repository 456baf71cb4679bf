"""A training step that is written for one device, run by all workers of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext._loop import _ahead, _arrays, _places, _step_checks
from optax_ext._state import _find, _nnx, _placement
from sparse_collectives import AxisName, _compat, transport

_ARRAY, _WHOLE = object(), PartitionSpec()


def data_parallel(step: Callable[..., Any] | None = None, *, examples: int = 1) -> Any:
    """Runs the training step of a program for one device on every worker, instead of ``jax.jit``.

    The program keeps its step as flax, equinox, haiku or optax have it, except that gradients are
    taken at :func:`ahead`, and that its optimizer is one of this library, with a state on a mesh
    (:func:`with_mesh`, :func:`init_state`). Nothing is donated.

    Args:
      step: a function of positional arguments, the last of which is the batch: its leaves are split
        over the workers along their leading dimension. The other arguments are the same on all
        workers, except for what the optimizer state, anywhere in them, keeps for each, and for
        typed PRNG keys (``jax.random.key``, ``nnx.Rngs``), which each worker changes into its own.
        Leaves that are neither arrays nor integers are constants, as with ``eqx.filter_jit``.
      examples: how many of the last arguments are the batch, such as 2 for ``step(state, x, y)``.

    Returns:
      The jitted step; without ``step``, a decorator. Floats in its results that differ between the
      workers, such as the loss, metrics and running statistics, are averaged over them. Modules of
      flax nnx (0.12 or newer) are updated in place, as by ``nnx.jit``.

    Raises:
      ValueError: at a call: an optimizer state on no mesh, of sharded parameters or of local steps;
        a batch that cannot be split; a result that differs between the workers and cannot be
        averaged, or belongs to the optimizer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = optax_ext.with_mesh(optax_ext.sparse_sgd(0.1, axis="data", density=0.5), mesh)
      >>> @data_parallel
      ... def step(w, opt_state, x):
      ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(optax_ext.ahead(w, opt_state))
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jnp.array([1.0, -2.0])
      >>> w, opt_state = step(w, tx.init(w), jnp.eye(2))
      >>> [round(float(x), 3) for x in w]
      [1.0, -1.8]
    """
    if step is None:
        return functools.partial(data_parallel, examples=examples)
    made: dict[Any, Any] = {}
    queue = _arrays.Queue(2)

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(static: Any, arrays: list[Any]) -> Any:
        mesh, given, specs = static
        axis = _find.axis_of(_joined(given, arrays))
        kinds = list(dict.fromkeys([_WHOLE, *specs]))

        def of_worker(arrays: list[Any]) -> list[list[Any]]:
            args = _joined(given, arrays)
            own = jax.tree.map(lambda x: _own_key(x, axis) if _is_key(x) else x, args[:-examples])
            results = step(*own, *args[-examples:]), list(filter(_nnx.is_module, own))
            leaves, found, given_back = _split(results, _specs(results))
            made[static] = given_back, [kinds.index(spec) for spec in found]
            places = _places_of(results)
            leaves = [_agreed(*x, axis) for x in zip(leaves, found, places, strict=True)]
            return [[x for x, s in zip(leaves, found, strict=True) if s == kind] for kind in kinds]

        run = jax.shard_map(of_worker, mesh=mesh, in_specs=(list(specs),), out_specs=kinds)
        return run(arrays)

    @functools.wraps(step)
    def everywhere(*args: Any) -> Any:
        axis, mesh = _find.axis_of(args), _mesh_of(args)
        batch = args[-1] if examples == 1 else args[-examples:]
        _step_checks.check_global(batch, mesh, args, in_rounds=False)
        _step_checks.check_batch(batch, mesh, axis)
        split = jax.tree.map(lambda _: PartitionSpec(axis), batch)
        arrays, specs, given = _split(args, (_specs(args[:-examples]), split))
        static = mesh, given, tuple(specs)
        if static not in made:
            _step_checks.check_workers(mesh, args)
        where = [NamedSharding(mesh, spec) for spec in specs]
        arrays = _places.Places(where, [], where[0], sharded=False).put(arrays)
        try:
            with _placement.around(mesh):
                rows = jitted(static, arrays)
        except (TypeError, ValueError) as error:
            if static not in made and len(args) > examples + 1:
                split = "argument was" if examples == 1 else f"{examples} arguments were"
                error.add_note(f"Only the last {split} split over the workers (examples=).")
            raise
        queue.add(min(jax.tree.leaves(rows), key=lambda x: x.size))
        given_back, kinds = made[static]
        left = list(map(iter, rows))
        results, modules = _joined(given_back, [next(left[kind]) for kind in kinds])
        for module, new in zip(filter(_nnx.is_module, args), modules, strict=True):
            _nnx.nnx().update(module, _nnx.nnx().state(new))
        return results

    return everywhere


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _split(tree: Any, specs: Any) -> tuple[list[Any], list[PartitionSpec], Any]:
    """The arrays of a tree, their specs, and all else of it, which is static."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, jax.tree.leaves(specs, is_leaf=_placement.is_spec), strict=True)
    arrays = [(x, spec) for x, spec in pairs if _ahead.is_array(x)]
    fixed = tuple(_ARRAY if _ahead.is_array(x) else x for x in leaves)
    return [x for x, _ in arrays], [spec for _, spec in arrays], (structure, fixed)


def _joined(given: Any, arrays: list[Any]) -> Any:
    structure, fixed = given
    left = iter(arrays)
    return structure.unflatten([next(left) if x is _ARRAY else x for x in fixed])


def _specs(tree: Any) -> Any:
    """The specs of each part of a tuple alone, since ``state_specs`` fails on ``nnx.Rngs``."""
    if type(tree) in (tuple, list):
        return list(map(_specs, tree))
    if _find.reductions(tree):
        return _placement.state_specs(tree)
    return jax.tree.map(lambda _: _WHOLE, tree)


def _mesh_of(args: Any) -> Any:
    """The mesh of the optimizer state, whose parameters are whole on each device."""
    for state in _find.get_states(args):
        if state.layout.sharding.axes or state.settings.every > 1:
            raise ValueError(
                "data_parallel is for parameters that are whole on each device, and for exchanges "
                "at every step: use optax_ext.make_train_step(loss_fn, tx, mesh)."
            )
    for x in jax.tree.leaves(_find.reductions(args)):
        if isinstance(x, Tracer):
            raise ValueError("data_parallel compiles the step: take out the jit that is around it.")
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return _placement.with_auto_axes(x.sharding.mesh)
    raise ValueError(
        "the optimizer state is on no mesh. Make it with optax_ext.init_state(tx, params, mesh), "
        "or give optax_ext.with_mesh(tx, mesh) to what calls tx.init."
    )


def _own_key(keys: Any, axis: AxisName) -> Any:
    fold_in = functools.partial(jax.random.fold_in, data=_compat.axis_index(axis))
    return functools.reduce(lambda f, _: jax.vmap(f), keys.shape, fold_in)(keys)


def _places_of(results: Any) -> list[tuple[str, bool]]:
    """The name of each array that a step returned, and whether it belongs to the optimizer."""
    found: list[tuple[str, bool]] = []
    returned, modules = results
    for part in [*(returned if type(returned) is tuple else [returned]), *modules]:
        leaves = jax.tree_util.tree_leaves_with_path(part)
        names = [jax.tree_util.keystr(path) for path, x in leaves if _ahead.is_array(x)]
        named = ["opt_state" in name for name in names]
        kept = (named if any(named) else [True] * len(names)) if _find.reductions(part) else []
        found += zip(names, kept or [False] * len(names), strict=True)
    return found


def _agreed(x: Any, spec: PartitionSpec, place: tuple[str, bool], axis: AxisName) -> Any:
    """A result as all workers have it: the mean, or the key of the first."""
    split = _compat.axis_names(spec[0]) if len(spec) else ()
    if not isinstance(x, jax.Array) or not _compat.varying_axes(x) - set(split):
        return x
    if _is_key(x):
        data = jnp.where(_compat.axis_index(axis) == 0, jax.random.key_data(x), 0)
        return jax.random.wrap_key_data(jax.lax.psum(data, axis), impl=jax.random.key_impl(x))
    name, kept = place
    if kept:
        raise ValueError(
            f"{name} of the optimizer state differs between the workers of axis {axis!r}: a "
            "transformation keeps something of the gradients before they are reduced. Put it after "
            "the allreduce in the chain, or give it to the allreduce as local=. (If it is no part "
            "of the optimizer, return it as a result of its own, which is averaged.)"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"a result{name} of the step, of {x.dtype}, differs between the workers of axis "
            f"{axis!r}, and is not averaged. Return jax.lax.psum(x, {axis!r}), or floats."
        )
    return transport.pmean(x, axis)
