"""Words that a program's collectives make each worker receive.

The meter reads a lowered program (StableHLO). Nothing is compiled and no
device is needed, so that the volume for 1024 workers comes from a laptop in
seconds, padding included. The unit is the word, 4 bytes. The volume of each
collective is the beta term of the alpha-beta model in section 3 of the
Ok-Topk paper (https://arxiv.org/abs/2201.07598); `_volumes` states them.

Counted are the collectives that the program itself calls under `shard_map` or
`pmap`. Those that the partitioner inserts for automatically sharded arrays
appear only in the compiled program, and those of MPI are opaque calls: neither
is seen here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sparse_collectives.traffic import _stablehlo
from sparse_collectives.traffic._traffic_weights import CollectiveTraffic, Weigher

__all__ = [
    "CollectiveTraffic",
    "Traffic",
    "of_allreduce",
    "of_function",
    "of_lowered",
]

Frequencies = Mapping[str, Sequence[float] | float]
Conditional = Literal["worst", "best"]


class Traffic(NamedTuple):
    """What one call of a program receives.

    Attributes:
      words: words received per worker and call, weighted.
      collectives: one row per collective, in program order; the branches that
        have no weight are left out.
    """

    words: float
    collectives: tuple[CollectiveTraffic, ...]

    def by_scope(self, depth: int | None = None) -> dict[str, float]:
        """Weighted words per scope, in program order.

        Args:
          depth: how many components of each scope to keep; None keeps all.

        Returns:
          A dictionary from scope to words received per worker and call.
        """
        totals: dict[str, float] = {}
        for row in self.collectives:
            scope = "/".join(row.scope.split("/")[:depth])
            totals[scope] = totals.get(scope, 0.0) + row.words * row.weight
        return totals

    def table(self) -> str:
        """A printable table: one line per distinct collective, and the total."""
        # Unrolled schedules repeat one collective hundreds of times.
        counts: dict[CollectiveTraffic, int] = {}
        for row in self.collectives:
            counts[row] = counts.get(row, 0) + 1
        head = ("scope", "collective", "group", "count", "words", "weight", "total")
        lines: list[tuple[str, ...]] = [head]
        for row, count in counts.items():
            lines.append(
                (
                    row.scope or "-",
                    row.kind,
                    str(row.group_size),
                    str(count),
                    f"{row.words:,.1f}",
                    f"{row.weight:.6g}",
                    f"{row.words * row.weight * count:,.1f}",
                )
            )
        lines.append(("total", "", "", "", "", "", f"{self.words:,.1f}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


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

    Cost: one trace and one lowering, no compilation and no device.

    Args:
      fn: what runs on each worker; it may use the axis names.
      *args: arrays or `jax.ShapeDtypeStruct`s. With the default `in_specs`
        these are the shapes that one worker sees, otherwise global shapes.
      axis: the mesh axis name, or several.
      axis_size: workers along each name of `axis`.
      in_specs: partition specs of `args`. None: replicated.
      out_specs: partition specs of the result. None: replicated.
      frequencies: see `of_lowered`.
      conditional: see `of_lowered`.

    Returns:
      The traffic of one call.

    Raises:
      ValueError: `axis` and `axis_size` don't match, or as `of_lowered`.

    Examples:
      >>> import jax
      >>> from sparse_collectives import traffic
      >>> x = jax.ShapeDtypeStruct((1000,), "float32")
      >>> psum = lambda x: jax.lax.psum(x, "workers")
      >>> traffic.of_function(psum, x, axis="workers", axis_size=4).words
      1500.0
    """
    names, sizes = _axes(axis, axis_size)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=PartitionSpec() if in_specs is None else in_specs,
        out_specs=PartitionSpec() if out_specs is None else out_specs,
        check_vma=False,
    )
    # Only shapes: an array may live on a mesh other than this one.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type),
        jax.eval_shape(lambda *x: x, *args),
    )
    lowered = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cpu",))
    return of_lowered(lowered, frequencies, conditional)


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

    Cost: one trace and one lowering, no compilation and no device.

    Args:
      allreduce: a `SparseAllreduce`.
      size: n, gradient components.
      capacity: slots of the selection that goes in, f32 and i32.
      axis_size: workers along each name of `axis`.
      axis: the mesh axis name, or several.
      frequencies: see `of_lowered`.
      conditional: see `of_lowered`.

    Returns:
      The traffic of one step.

    Raises:
      ValueError: `size` or `capacity` is below 1, `axis` and `axis_size`
        don't match, or as `of_lowered`.
    """
    from sparse_collectives.padded_coo import PaddedCOO

    for name, value in (("size", size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; pass a number >= 1.")
    _, sizes = _axes(axis, axis_size)
    # The state is an argument, as in a training step: as a constant it could
    # decide a conditional while tracing.
    state = jax.eval_shape(lambda: allreduce.init(size, math.prod(sizes)))

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


def of_lowered(
    lowered: jax.stages.Lowered,
    frequencies: Frequencies | None = None,
    conditional: Conditional = "worst",
) -> Traffic:
    """Words that each worker receives in one call of a lowered program.

    The branches of a conditional weigh, in this order of precedence:

    1. by `frequencies`, where it names a scope around the conditional;
    2. where a `jax.named_scope` ending in `.everyN` is around a conditional
       of two branches: 1/N for the branch with more words, 1 - 1/N for the
       other (work that is done in one call of N);
    3. by `conditional`.

    A name applies to the conditionals in its scope, but not to those inside
    their branches; of several names the innermost counts.
    A loop with a constant trip count counts its body that often.

    Cost: linear in the operations of the program, and in the calls that its
    functions make.

    Args:
      lowered: what `jax.jit(f).lower(...)` returns.
      frequencies: from a scope name (one component of the path, or several
        joined by '/') to one weight per branch by branch index
        (`lax.cond`: false, true), which sum to 1; or, for a loop whose trip
        count is not a constant, to the mean number of iterations.
      conditional: 'worst' takes the branch with most words, 'best' that with
        fewest.

    Returns:
      The traffic of one call.

    Raises:
      ValueError: a name of `frequencies` fits nothing or its weights don't
        fit the branches; a loop holds collectives and its trip count is
        unknown; a collective's volume depends on data.
    """
    if conditional not in ("worst", "best"):
        raise ValueError(f"`conditional` is {conditional!r}; pass 'worst' or 'best'.")
    nodes = _stablehlo.Reader(lowered.compiler_ir("stablehlo")).read()
    weigher = Weigher(*_checked(frequencies), conditional)
    rows = weigher.weigh(nodes, (), (), ())
    weigher.check_all_used()
    return Traffic(math.fsum(r.words * r.weight for r in rows), tuple(rows))


# Arguments.


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
        numbers_given = (float(value),) if numeric else tuple(float(x) for x in value)
        if not all(x >= 0 and math.isfinite(x) for x in numbers_given):
            raise ValueError(f"`frequencies[{name!r}]` is {value!r}; pass finite numbers >= 0.")
        if numeric:
            trips[name] = numbers_given[0]
            continue
        total = sum(numbers_given)
        if abs(total - 1) > 1e-6:
            raise ValueError(
                f"`frequencies[{name!r}]` is {value!r} and sums to {total:g}; the weights of the"
                " branches sum to 1. (For the iterations of a loop pass one number.)"
            )
        weights[name] = numbers_given
    return weights, trips
