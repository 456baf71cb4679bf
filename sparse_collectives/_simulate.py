"""Simulation of P workers on one device."""

from collections.abc import Callable
from typing import Any

import jax

from sparse_collectives import _axes, _validation
from sparse_collectives._types import AxisName


def simulate(
    fn: Callable[..., Any],
    *,
    axis: AxisName = "workers",
    axis_size: int | tuple[int, ...],
    in_axes: Any = 0,
    out_axes: Any = 0,
) -> Callable[..., Any]:
    """Runs ``fn`` as P workers on one device, collectives included.

    A function that runs under ``jax.shard_map`` over P devices runs unchanged: the
    workers are lanes of a ``jax.vmap(axis_name=...)``. Use it to try any number of
    workers, in tests, and to study convergence. A simulated step costs P steps, and a
    ``lax.cond`` whose predicate differs between the workers computes both branches.

    Args:
      fn: a function of one worker's arguments, in which ``axis`` is bound.
      axis: the name of the axis, or a tuple of names (the first is the outermost).
      axis_size: P, or one size for each name.
      in_axes: as in ``jax.vmap``: 0 if each worker has its own argument along a
        leading axis of size P, ``None`` if all share one. With several names there
        is one leading axis for each.
      out_axes: as in ``jax.vmap``.

    Returns:
      The jitted function of all workers' arguments.

    Raises:
      ValueError: ``axis_size`` does not give one size for each name, or a size is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> total = simulate(lambda x: jax.lax.psum(x, "workers"), axis_size=3)
      >>> total(jnp.array([1.0, 2.0, 3.0])).tolist()
      [6.0, 6.0, 6.0]
    """
    names = _axes.axis_names(axis)
    sizes = axis_size if isinstance(axis_size, tuple) else (axis_size,)
    if len(names) != len(sizes):
        raise ValueError(
            f"axis_size must give one size for each of the {len(names)} names of axis={axis!r}, "
            f"got {axis_size!r}."
        )
    # Traced as under shard_map, so that code that reads a worker's equations finds them.
    fn = jax.jit(fn)
    for name, size in reversed(list(zip(names, sizes, strict=True))):
        _validation.check_positive_int("axis_size", size)
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=name, axis_size=size)
    return jax.jit(fn)
