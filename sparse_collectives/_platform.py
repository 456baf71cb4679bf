"""The form of a computation that suits a platform, with the same results to the bit.

A CPU likes one pass at the speed of memory and small loops. A GPU pays some microseconds for
each kernel that it launches, and for each turn of a loop several: it likes few kernels, however
much they count.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation

GPU, PORTABLE = "gpu", "portable"
# Comparisons beyond which a binary search is quicker on a GPU, too.
_COMPARISONS = 1 << 28
# Entries that are computed anew at less cost than that of a branch.
_FEW = 1 << 14
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("form", default=None)


def by_platform(portable: Callable[..., Any], gpu: Callable[..., Any], *args: Any) -> Any:
    """``gpu(*args)`` in programs for CUDA and ROCm, ``portable(*args)`` in those for all else.

    Which it is, is known when a program is lowered, so that it holds one of the two.
    """
    forced = _forced.get()
    if forced is not None:
        return (gpu if forced == GPU else portable)(*args)
    return lax.platform_dependent(*args, cuda=gpu, rocm=gpu, default=portable)


def once(
    worth: jax.Array, function: Callable[..., Any], otherwise: Callable[..., Any], *args: Any
) -> Any:
    """``function(*args)``, computed once for all that read it.

    XLA's compiler for CPUs computes what is elementwise anew in each loop that reads it, whatever
    that costs, and drops ``lax.optimization_barrier`` before it decides so. The result of a branch
    is written. A GPU would wait for its host at a branch.

    Args:
      worth: ``bool[]``, whether there is anything to compute.
      function: of the arguments; of less than 16,384 entries in all it is called as it is, since a
        branch would cost more than it saves, and make larger programs.
      otherwise: what it gives where ``worth`` is false, at less cost.
      *args: arrays, or trees of them.
    """
    if args and sum(x.size for x in jax.tree.leaves(args)) < _FEW:
        return function(*args)

    def branch(worth: jax.Array, *args: Any) -> Any:
        return lax.cond(worth, function, otherwise, *args)

    return by_platform(branch, lambda worth, *args: function(*args), worth, *args)


@contextlib.contextmanager
def traced_for(name: str) -> Generator[None]:
    """What is traced within has the form ``name``, "gpu" or "portable", on every platform.

    For programs that are compiled ahead of time on a machine without a GPU, and for tests.
    """
    _validation.check_choice("name", name, (GPU, PORTABLE))
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def places(ascending: jax.Array, queries: jax.Array, *, side: str = "left") -> jax.Array:
    """``jnp.searchsorted`` of ``queries [...]`` in ``ascending [m]``, ``i32[...]``.

    A binary search; on a GPU, of a few queries, one comparison with everything, since each
    step of a search is a launch.
    """
    binary = functools.partial(_binary, side=side)
    if ascending.shape[0] * queries.size > _COMPARISONS:
        return binary(ascending, queries)
    return by_platform(binary, functools.partial(_counted, side=side), ascending, queries)


def _binary(ascending: jax.Array, queries: jax.Array, *, side: str) -> jax.Array:
    return jnp.searchsorted(ascending, queries, side=side, method="scan").astype(jnp.int32)


def _counted(ascending: jax.Array, queries: jax.Array, *, side: str) -> jax.Array:
    rows = ascending.reshape((-1,) + (1,) * queries.ndim)
    before = rows < queries[None] if side == "left" else rows <= queries[None]
    return jnp.sum(before, axis=0, dtype=jnp.int32)
