"""A training step that is written for one device, run by all workers of a mesh."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext._error_feedback import _equations
from optax_ext._state import _batch_checks, _find, _host_checks, _placement, _specs, _wrappers
from optax_ext._train import (
    _ahead,
    _arrays,
    _examples,
    _graph,
    _mapped,
    _own_keys,
    _places,
    _same_program,
    _skipped,
)
from sparse_collectives import AxisName, _axes, _jaxprs, _validation, transport

_ARRAY, _WHOLE = object(), PartitionSpec()


def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    examples: _examples.Examples = None,
    check_vma: bool = True,
    donate: bool = False,
    steps_in_flight: int | None = None,
) -> Any:
    """Runs the training step of a program for one device on every worker, instead of ``jax.jit``.

    The program keeps its step as flax, equinox, haiku or optax have it, except that gradients are
    taken at :func:`ahead`, and that its optimizer is one of this library, with a state on a mesh
    (:func:`with_mesh`, :func:`init_state`).

    Args:
      step: a function of arguments that can be given by position (a call may name them), one of
        which is the batch: its leaves are split over the workers along their leading dimension. The
        other arguments are the same on all workers, except for what the optimizer state, anywhere
        in them, keeps for each, and for typed PRNG keys (``jax.random.key``, ``nnx.Rngs``), which
        each worker changes into its own. Keys in the optimizer state stay as they are. An older
        key, ``jax.random.PRNGKey``, is the same on all workers; ``jax.random.fold_in(key,
        jax.lax.axis_index(axis))`` in the step makes it a worker's own. Numbers of Python are
        traced, as by ``jax.jit``. Other leaves that are not arrays, and floats inside of modules,
        are constants, as with ``eqx.filter_jit``.
      examples: the batch, as the names of arguments, such as ``("x", "y")``, or as the number of
        the last arguments that belong to it. None: the last argument that has more in it than
        keys and numbers, such as ``batch`` in ``step(state, batch, rng)``.
      check_vma: whether the equations of the step have to prove that all workers have the same
        parameters, and the same of all else that is not averaged. False: the results of the first
        worker are taken.
      donate: whether the arrays of all other arguments are donated, as by :func:`make_train_step`.
      steps_in_flight: as for :func:`make_train_step`.

    Returns:
      The jitted step; without ``step``, a decorator. Floats in its results that differ between the
      workers, such as the loss, metrics and running statistics, are averaged over them. Modules of
      flax nnx (0.12 or newer) are updated in place, as by ``nnx.jit``.

    Raises:
      ValueError: ``examples`` that names no argument.
      ValueError: at a call: an optimizer state on no mesh, of sharded parameters or of local steps.
      ValueError: a batch that cannot be split, or is not clear among the arguments.
      ValueError: a result that differs between the workers and cannot be averaged, or belongs to
        the optimizer.

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
        return functools.partial(
            data_parallel,
            examples=examples,
            check_vma=check_vma,
            donate=donate,
            steps_in_flight=steps_in_flight,
        )
    chosen = _examples.Chosen(step, examples)
    made: dict[Any, Any] = {}
    queues: dict[Any, _arrays.Queue] = {}
    skipped = _skipped.Watch()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1 if donate else ())
    def jitted(static: Any, kept: list[Any], batch: list[Any]) -> Any:
        mesh, given, specs, at, graph = static
        arrays = [*kept, *batch]
        axis = _find.axis_of(_joined(given, arrays))
        kinds = list(dict.fromkeys([_WHOLE, *specs]))

        def of_worker(arrays: list[Any]) -> list[list[Any]]:
            about: list[Any] = []

            def traced(arrays: list[Any]) -> list[Any]:
                own, mine = _joined(given, arrays)
                own = [_own_keys.of_worker(arg, axis) for arg in own]
                own, modules = _graph.inside(own, graph)
                returned = step(*_in_order(own, mine, at))
                results, after = (returned, modules), _graph.of_results(modules, returned)
                leaves, found, given_back = _split(results, _specs_of(results))
                made[static] = given_back, [kinds.index(spec) for spec in found], after
                about.extend(zip(found, _places_of(results), strict=True))
                return leaves

            # Without types: a scan that starts from zeros would be an error of types.
            closed = jax.make_jaxpr(traced)(arrays)
            differ = _equations.varying(closed, [bool(len(spec)) for spec in specs], axis)
            leaves = _jaxprs.evaluated(closed, arrays)
            found = [spec for spec, _ in about]
            if check_vma:
                results = zip(leaves, differ, about, strict=True)
                leaves = [
                    _agreed(x, spec, place, axis) if own else x for x, own, (spec, place) in results
                ]
            return [[x for x, s in zip(leaves, found, strict=True) if s == kind] for kind in kinds]

        run = _mapped.mapped(of_worker, mesh, (list(specs),), kinds, check_vma=False)
        # The second has no other user, who might donate it, so that its end can be waited for.
        return run(arrays), jnp.zeros(())

    @functools.wraps(step)
    def everywhere(*args: Any, **named: Any) -> Any:
        args = chosen.by_position(args, named)
        with _graph.around(args):
            return called(args)

    def called(args: tuple[Any, ...]) -> Any:
        axis, mesh = _find.axis_of(args), _mesh_of(args)
        workers = math.prod(mesh.shape[name] for name in _axes.axis_names(axis))
        at = chosen.positions(args, workers)
        batch = [args[i] for i in at]
        kept = [arg for i, arg in enumerate(args) if i not in at]
        graph = _graph.of_arguments(kept)
        kept = list(map(_with_numbers, kept))
        one = batch[0] if len(batch) == 1 else tuple(batch)
        _batch_checks.check_global(one, mesh, args, in_rounds=False)
        _batch_checks.check_batch(one, mesh, axis)
        split = jax.tree.map(lambda _: PartitionSpec(axis), batch)
        arrays, specs, given = _split((kept, batch), (_specs_of(kept), split))
        static = mesh, given, tuple(specs), at, graph
        if static not in made:
            _host_checks.check_workers(args, mesh)
            _same_program.check(mesh, args, arguments=arrays)
            _warn_of_constants(made, static)
        where = [NamedSharding(mesh, spec) for spec in specs]
        arrays = _places.Places(where, [], where[0], sharded=False).put(arrays)
        others = len(arrays) - sum(map(_ahead.is_array, jax.tree.leaves(batch)))
        kept, batch = arrays[:others], arrays[others:]
        if donate:
            kept, batch = _arrays.unshared(kept, batch)
        if mesh not in queues:
            queues[mesh] = _arrays.Queue(_arrays.limit(steps_in_flight or 2, mesh))
        with _placement.around(mesh):
            rows, done = jitted(static, kept, batch)
        queues[mesh].add(done)
        given_back, kinds, after = made[static]
        left = list(map(iter, _placement.as_around(rows, args)))
        results, modules = _joined(given_back, [next(left[kind]) for kind in kinds])
        skipped.see((results, modules), 3)
        return _graph.outside(modules, results, after)

    return everywhere


def _in_order(kept: list[Any], batch: list[Any], at: tuple[int, ...]) -> list[Any]:
    """The arguments of a step, with the batch at the positions ``at``."""
    others, own = iter(kept), iter(batch)
    return [next(own if i in at else others) for i in range(len(kept) + len(batch))]


def _with_numbers(arg: Any) -> Any:
    """An argument with weakly typed arrays for its floats that are in no model.

    They are alone, in containers of Python, or in an optimizer state.
    """
    if type(arg) in _NUMBERS:
        return jnp.asarray(arg)
    if isinstance(arg, list | tuple | dict):
        return jax.tree.map(_with_numbers, arg, is_leaf=lambda x: x is not arg)
    if not _wrappers.reductions(arg) or not _NUMBERS & set(map(type, jax.tree.leaves(arg))):
        return arg
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _with_numbers(x) if "opt_state" in jax.tree_util.keystr(path) else x, arg
    )


_MANY = 8
_NUMBERS = {float, complex}


def _warn_of_constants(made: dict[Any, Any], static: Any) -> None:
    """Warns at a program after several that differ in their constants only."""
    (_, (structure, fixed), *_) = static
    others = [given[1] for (_, given, *_) in made if given[0] == structure]
    if len(others) == _MANY and others[-1] != fixed:
        before, now = next((x, y) for x, y in zip(others[-1], fixed, strict=True) if x != y)
        warnings.warn(
            "data_parallel compiles the step anew, and keeps its program, whenever a constant in "
            f"its arguments changes, as now from {before!r} to {now!r}. Give what changes as an "
            "array, or as an argument of its own.",
            stacklevel=4,
        )


def _split(tree: Any, specs: Any) -> tuple[list[Any], list[PartitionSpec], Any]:
    """The arrays of a tree, their specs, and all else of it, which is static."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
    arrays = [(x, spec) for x, spec in pairs if _ahead.is_array(x)]
    fixed = tuple(_ARRAY if _ahead.is_array(x) else x for x in leaves)
    return [x for x, _ in arrays], [spec for _, spec in arrays], (structure, fixed)


def _joined(given: Any, arrays: list[Any]) -> Any:
    structure, fixed = given
    left = iter(arrays)
    return structure.unflatten([next(left) if x is _ARRAY else x for x in fixed])


def _specs_of(tree: Any) -> Any:
    """The specs of each part of a tuple alone, since ``state_specs`` fails on ``nnx.Rngs``."""
    if type(tree) in (tuple, list):
        return list(map(_specs_of, tree))
    if _wrappers.reductions(tree):
        return _specs.state_specs(tree)
    return jax.tree.map(lambda _: _WHOLE, tree)


def _mesh_of(args: Any) -> Any:
    """The mesh of the optimizer state, whose parameters are whole on each device."""
    states = _wrappers.get_states(args)
    in_rounds = _wrappers.moving(args) or any(state.settings.every > 1 for state in states)
    if in_rounds or any(state.layout.sharding.axes for state in states):
        raise ValueError(
            "data_parallel is for parameters that are whole on each device, and for exchanges at "
            "every step: use optax_ext.make_train_step(loss_fn, tx, mesh)."
        )
    for x in jax.tree.leaves(_wrappers.reductions(args)):
        if isinstance(x, Tracer):
            raise ValueError(
                "data_parallel compiles the step: call it outside of jax.jit, jax.lax.scan and "
                "jax.eval_shape. A step of optax_ext.make_train_step(..., donate=False) can be "
                "called inside of them."
            )
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return _placement.with_auto_axes(x.sharding.mesh)
    raise ValueError(
        "the optimizer state is on no mesh. Make a new one with optax_ext.init_state(tx, params, "
        "mesh), or give optax_ext.with_mesh(tx, mesh) to what calls tx.init. Put a restored one "
        "on the mesh with opt_state = optax_ext.reshard(opt_state, optax_ext.init_state(tx, "
        "params, mesh)), which keeps its residuals."
    )


def _places_of(results: Any) -> list[tuple[str, bool]]:
    """The name of each array that a step returned, and whether it belongs to the optimizer."""
    found: list[tuple[str, bool]] = []
    returned, modules = results
    for part in [*(returned if type(returned) is tuple else [returned]), *modules]:
        leaves = jax.tree_util.tree_leaves_with_path(part)
        names = [jax.tree_util.keystr(path) for path, x in leaves if _ahead.is_array(x)]
        named = ["opt_state" in name for name in names]
        kept = (named if any(named) else [True] * len(names)) if _wrappers.reductions(part) else []
        found += zip(names, kept or [False] * len(names), strict=True)
    return found


def _agreed(x: Any, spec: PartitionSpec, place: tuple[str, bool], axis: AxisName) -> Any:
    """A result that may differ, as all workers have it: the mean, or the key of the first."""
    if not isinstance(x, jax.Array) or len(spec):
        return x
    if _validation.is_key(x):
        data = jnp.where(_axes.axis_index(axis) == 0, jax.random.key_data(x), 0)
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
