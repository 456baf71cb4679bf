"""A training step that is written for one device, run by all workers of a mesh."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_ext._error_feedback import _equations
from optax_ext._state import _batch_checks, _host_checks, _placement, _wrappers
from optax_ext._train import (
    _ahead,
    _arrays,
    _call,
    _examples,
    _graph,
    _mapped,
    _own_keys,
    _same_program,
    _skipped,
)
from sparse_collectives import AxisName, _axes, _jaxprs, _validation, transport

_WHOLE = PartitionSpec()


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
        each worker changes into its own. A key that the step leaves as it is comes back as it was,
        and keys in the optimizer state stay as they are. An older key,
        ``jax.random.PRNGKey``, is the same on all workers; ``jax.random.fold_in(key,
        jax.lax.axis_index(axis))`` in the step makes it a worker's own. Numbers of Python are
        traced, as by ``jax.jit``. Other leaves that are not arrays, bools, and floats inside of
        modules are constants, as with ``eqx.filter_jit``.
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
    plans: dict[Any, list[_call.Plan]] = {}
    programs: dict[Any, _call.Program] = {}
    queues: dict[Any, _arrays.Queue] = {}
    skipped = _skipped.Watch()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1 if donate else ())
    def jitted(program: _call.Program, kept: list[Any], batch: list[Any]) -> Any:
        plan, specs = program.plan, list(program.plan.specs)
        kinds = list(dict.fromkeys([_WHOLE, *specs]))

        def of_worker(arrays: list[Any]) -> list[list[Any]]:
            about: list[Any] = []

            def traced(arrays: list[Any]) -> list[Any]:
                args = plan.structure.unflatten(_call.filled(program.fixed, arrays))
                own, mine = _parted(args, plan.is_batch)
                given, own = own, [_own_keys.of_worker(arg, plan.axis) for arg in own]
                # Kept, since the identity of an object that is gone may be another one's.
                pairs = list(zip(*map(jax.tree.leaves, (own, given)), strict=True))
                # A key that the step leaves as it is comes back as it was.
                before = {id(key): x for key, x in pairs if key is not x}
                own, modules = _graph.inside(own, program.graph)
                returned = step(*_joined(own, mine, plan.is_batch))
                leaves, structure = jax.tree.flatten((returned, modules))
                leaves = [before.get(id(x), x) for x in leaves]
                specs = jax.tree.leaves(_call.specs_of((returned, modules)))
                found = list(itertools.compress(specs, map(_ahead.is_array, leaves)))
                arrays, fixed = _call.split(leaves)
                after = _graph.of_results(returned, modules)
                program.results = structure, fixed, [kinds.index(spec) for spec in found], after
                about.extend(zip(found, _places_of(returned, modules), strict=True))
                return arrays

            # Without types: a scan that starts from zeros would be an error of types.
            closed = jax.make_jaxpr(traced)(arrays)
            differ = _equations.varying(closed, [bool(len(spec)) for spec in specs], plan.axis)
            leaves = _jaxprs.evaluated(closed, arrays)
            found = [spec for spec, _ in about]
            if check_vma:
                results = zip(leaves, differ, about, strict=True)
                leaves = [
                    _agreed(x, spec, place, plan.axis) if own else x
                    for x, own, (spec, place) in results
                ]
            return [[x for x, s in zip(leaves, found, strict=True) if s == kind] for kind in kinds]

        run = _mapped.mapped(of_worker, plan.mesh, (specs,), kinds, check_vma=False)
        rows = run(_joined(kept, batch, plan.in_batch))
        # The second has no other user, who might donate it, so that its end can be waited for.
        return rows, jnp.zeros(())

    @functools.wraps(step)
    def everywhere(*args: Any, **named: Any) -> Any:
        args = chosen.by_position(args, named)
        with _graph.around(args):
            return called(args)

    def called(args: tuple[Any, ...]) -> Any:
        leaves, structure = jax.tree.flatten(args)
        of_kind = plans.setdefault((structure, tuple(map(_call.kind_of, leaves))), [])
        plan = next((known for known in of_kind if known.fits(leaves)), None)
        if plan is None:
            plan = _call.Plan.of(args, chosen)
            of_kind.append(plan)
        kept, batch = _parted(args, plan.is_batch)
        one = batch[0] if len(batch) == 1 else tuple(batch)
        _batch_checks.check_global(one, plan.mesh, args, in_rounds=False)
        _batch_checks.check_batch(one, plan.mesh, plan.axis)
        graph = _graph.of_arguments(kept)
        arrays, fixed = _call.split(plan.with_arrays(leaves))
        mesh = plan.mesh
        # Constants in the results may depend on the shapes.
        shapes = tuple(map(_call.shape_of, arrays))
        constants = tuple(map(_call.constant_of, fixed))
        same = mesh, structure, plan.specs, constants, shapes, graph and graph.structure
        program = programs.get(same)
        if program is None:
            _host_checks.check_workers(args, mesh)
            _same_program.check(mesh, args, arguments=arrays)
            _call.warn_of_constants(programs, structure, fixed)
            program = _call.Program(plan, fixed, _graph.without_arrays(graph))
            programs[same] = program
        # Not by the program: JAX has no callback in one whose arrays are on explicit axes.
        kept, batch = _parted(plan.put(arrays), plan.in_batch)
        if donate:
            kept, batch = _arrays.unshared(kept, batch)
        if mesh not in queues:
            queues[mesh] = _arrays.Queue(_arrays.limit(steps_in_flight or 2, mesh))
        queues[mesh].wait()
        with _placement.around(mesh):
            rows, done = jitted(program, kept, batch)
        queues[mesh].add(done)
        structure, fixed, kinds, after = program.results
        left = list(map(iter, _placement.as_around(rows, arrays)))
        leaves = _call.filled(fixed, [next(left[kind]) for kind in kinds])
        returned, modules = structure.unflatten(leaves)
        skipped.see((returned, modules), 3)
        return _graph.outside(returned, leaves, after)

    return everywhere


def _parted(values: Any, of_batch: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The values that do not belong to the batch, and those that do."""
    parts: tuple[list[Any], list[Any]] = [], []
    for x, own in zip(values, of_batch, strict=True):
        parts[own].append(x)
    return parts


def _joined(kept: list[Any], batch: list[Any], of_batch: Sequence[bool]) -> list[Any]:
    """The values that :func:`_parted` has taken apart."""
    left = iter(kept), iter(batch)
    return [next(left[own]) for own in of_batch]


def _places_of(returned: Any, modules: list[Any]) -> list[tuple[str, bool]]:
    """The name of each array that a step returned, and whether it belongs to the optimizer."""
    found: list[tuple[str, bool]] = []
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
