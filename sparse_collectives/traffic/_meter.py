"""Measures a function, a sparse allreduce, or a traced program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sparse_collectives._data import PaddedCOO
from sparse_collectives.traffic import _program
from sparse_collectives.traffic._traffic import Traffic
from sparse_collectives.traffic._weights import Weights

Frequencies = Mapping[str, Sequence[float] | float]
Conditional = Literal["worst", "best"]


def of_function(
    fn: Callable[..., Any],
    *args: Any,
    axis: str | tuple[str, ...],
    axis_size: int | tuple[int, ...],
    in_specs: Any = None,
    out_specs: Any = None,
    frequencies: Frequencies | None = None,
    conditional: Conditional = "worst",
) -> Traffic:
    """Words that each worker receives when `fn` runs under `shard_map`.

    Cost: one trace; nothing is lowered or compiled, and no device is needed.

    Args:
      fn: the function that runs on each worker; it may use the axis names.
      *args: arrays or `jax.ShapeDtypeStruct`s. With the default `in_specs`
        these are the shapes that one worker sees, otherwise global shapes.
      axis: the mesh axis name, or several.
      axis_size: workers along each name of `axis`.
      in_specs: partition specs of `args`. None: replicated.
      out_specs: partition specs of the result. None: replicated.
      frequencies: see `of_traced`.
      conditional: see `of_traced`.

    Raises:
      ValueError: `axis` and `axis_size` do not match, or as `of_traced`.

    Examples:
      >>> import jax
      >>> from sparse_collectives import traffic
      >>> x = jax.ShapeDtypeStruct((1000,), "float32")
      >>> psum = lambda x: jax.lax.psum(x, "workers")
      >>> traffic.of_function(psum, x, axis="workers", axis_size=4).words
      1500.0
    """
    names, sizes = _axes(axis, axis_size)
    whole = PartitionSpec()
    in_specs, out_specs = (whole if x is None else x for x in (in_specs, out_specs))
    mapped = _mapped(fn, names, sizes, in_specs=in_specs, out_specs=out_specs)
    # Only shapes: an array may live on a mesh other than this one.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type),
        jax.eval_shape(lambda *x: x, *args),
    )
    return of_traced(jax.jit(mapped).trace(*shapes), frequencies, conditional)


def _mapped(fn, names, sizes, **specs):
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    return jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)


def of_allreduce(
    allreduce: Any,
    *,
    size: int,
    capacity: int,
    axis_size: int | tuple[int, ...],
    axis: str | tuple[str, ...] = "workers",
    frequencies: Frequencies | None = None,
    conditional: Conditional = "worst",
) -> Traffic:
    """Words that each worker receives in one step of a sparse allreduce.

    Cost: as of `of_function`.

    Args:
      allreduce: a `SparseAllreduce`.
      size: n, gradient components.
      capacity: slots of the selection, with f32 values and i32 indices.
      axis_size: workers along each name of `axis`.
      axis: the mesh axis name, or several.
      frequencies: see `of_traced`.
      conditional: see `of_traced`.

    Raises:
      ValueError: `size` or `capacity` is below 1, `axis` and `axis_size`
        do not match, or as `of_traced`.
    """
    for name, value in (("size", size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; pass a number >= 1.")
    names, sizes = _axes(axis, axis_size)
    # The state is an argument, as in a training step: as a constant it could
    # decide a conditional while tracing.
    init = functools.partial(allreduce.init, size, math.prod(sizes))
    state = jax.eval_shape(_mapped(init, names, sizes, in_specs=(), out_specs=PartitionSpec()))

    def step(values, indices, state):
        coo = PaddedCOO(values, indices, size)
        return allreduce.reduce(coo, state, axis=axis)

    return of_function(
        step,
        jax.ShapeDtypeStruct((capacity,), "float32"),
        jax.ShapeDtypeStruct((capacity,), "int32"),
        state,
        axis=axis,
        axis_size=axis_size,
        frequencies=frequencies,
        conditional=conditional,
    )


def of_traced(
    traced: Any,
    frequencies: Frequencies | None = None,
    conditional: Conditional = "worst",
) -> Traffic:
    """Words that each worker receives in one call of a traced program.

    The branches of a conditional get their weights, in this order of precedence:

    1. from `frequencies`, if it names a scope around the conditional;
    2. from a `jax.named_scope` ending in `.everyN` around a conditional of two
       branches: 1/N for the branch with more words, 1 - 1/N for the other (work
       that is done in one call of N);
    3. from `conditional`.

    A name applies to the conditionals in its scope, but not to conditionals inside
    their branches; the innermost of several names counts. The body of a loop with a
    constant trip count is counted that many times.

    A collective whose result is unused does not count, because it is not part of the
    lowered program; within a loop it does count.

    Cost: linear in the operations of the program; the operations of a function count
    each time it is called.

    Args:
      traced: what `jax.jit(f).trace(...)`, `jax.make_jaxpr(f)(...)` or
        `TrainStep.trace(...)` returns.
      frequencies: maps a scope name (one component of the path, or several joined
        by '/') to one weight per branch by branch index (`lax.cond`: false, true),
        which sum to 1; or, for a loop whose trip count is not a constant, to the
        mean number of iterations.
      conditional: 'worst' takes the branch with the most words, 'best' the branch
        with the fewest.

    Raises:
      ValueError: a name of `frequencies` fits nothing, or its weights do not fit the branches.
      ValueError: a loop holds collectives and its trip count is unknown.
      ValueError: the volume of a collective depends on data, or the meter has no rule for it.
      ValueError: the program has an exchange over MPI.
      TypeError: `traced` is not a traced program.
    """
    if conditional not in ("worst", "best"):
        raise ValueError(f"`conditional` is {conditional!r}; pass 'worst' or 'best'.")
    jaxpr = traced.jaxpr if isinstance(traced, jax.stages.Traced) else traced
    if not hasattr(jaxpr, "eqns"):
        raise TypeError(
            f"`traced` is of type {type(traced).__name__}; pass what jax.jit(f).trace(...) or"
            " jax.make_jaxpr(f)(...) returns."
        )
    weights = Weights(*_checked(frequencies), conditional)
    rows = _program.read(jaxpr, weights)
    weights.check_all_used()
    return Traffic(math.fsum(r.words * r.weight for r in rows), tuple(rows))


def _axes(axis, axis_size):
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    sizes = (axis_size,) if isinstance(axis_size, (int, np.integer)) else tuple(axis_size)
    if not names or len(names) != len(sizes):
        raise ValueError(
            f"`axis` is {axis!r} and `axis_size` is {axis_size!r}; pass one size per name."
        )
    if any(size < 1 for size in sizes):
        raise ValueError(f"`axis_size` is {axis_size!r}; pass sizes >= 1.")
    return names, tuple(int(size) for size in sizes)


def _checked(
    frequencies: Frequencies | None,
) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """The weights of branches and the iterations of loops, by name."""
    weights: dict[str, tuple[float, ...]] = {}
    trips: dict[str, float] = {}
    for name, value in (frequencies or {}).items():
        numeric = isinstance(value, (int, float, np.number))
        numbers = (float(value),) if numeric else tuple(map(float, value))
        if not all(x >= 0 and math.isfinite(x) for x in numbers):
            raise ValueError(f"`frequencies[{name!r}]` is {value!r}; pass finite numbers >= 0.")
        if numeric:
            trips[name] = numbers[0]
        elif abs(sum(numbers) - 1) > 1e-6:
            raise ValueError(
                f"`frequencies[{name!r}]` is {value!r} and sums to {sum(numbers):g}; the weights of"
                " the branches sum to 1. (For the iterations of a loop pass one number.)"
            )
        else:
            weights[name] = numbers
    return weights, trips
