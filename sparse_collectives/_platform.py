"""The form of a computation that suits a platform, with the same results to the bit.

On a CPU a single pass at memory speed and small loops are fast. A GPU pays some microseconds for
each kernel launch, and more for each iteration of a loop. Fewer kernels are faster there, even if
they compute more.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _varying

# With more comparisons a binary search is faster on a GPU as well.
_COMPARISONS = 1 << 25
# Recomputing fewer entries costs less than a branch.
_FEW = 1 << 14
# Compiling so few kernels takes less than the branch that saves them.
_MANY = 16


def by_platform(portable: Callable[..., Any], gpu: Callable[..., Any], *args: Any) -> Any:
    """``gpu(*args)`` in programs for CUDA and ROCm, ``portable(*args)`` in all others.

    The platform is fixed when a program is lowered, so a program holds only one of the two.
    """
    return lax.platform_dependent(*args, cuda=gpu, rocm=gpu, default=portable)


def once(
    worth: jax.Array, function: Callable[..., Any], otherwise: Callable[..., Any], *args: Any
) -> Any:
    """``function(*args)``, computed once for all that read it.

    XLA's compiler for CPUs repeats an elementwise computation in each loop that reads its result,
    at any cost, and drops ``lax.optimization_barrier`` before it decides this. It writes the
    result of a branch to memory. A GPU takes no branch, because it would wait for its host there.

    Args:
      worth: ``bool[]``, whether there is anything to compute.
      function: a function of the arguments. With fewer than 16,384 entries in all arguments it is
        called directly, since a branch would cost more than it saves and make larger programs.
      otherwise: gives the same result at less cost if ``worth`` is false.
      *args: arrays, or trees of them.
    """
    if args and sum(x.size for x in jax.tree.leaves(args)) < _FEW:
        return function(*args)
    # Traced once for both platforms.
    function = jax.jit(function, inline=True)

    def branch(worth: jax.Array, *args: Any) -> Any:
        return lax.cond(worth, function, otherwise, *args)

    return by_platform(branch, lambda worth, *args: function(*args), worth, *args)


def written(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """``function(*args)``, which a CPU computes once, for results that are always needed.

    As :func:`once` says, it would compute them again in each loop that reads them. With many loops
    that read a scalar of many operands, the program would also take minutes to compile.
    """
    function = jax.jit(function, inline=True)

    def nothing(*args: Any) -> jax.Array:
        made = jax.eval_shape(function, *args)
        zeros = jnp.zeros(made.shape, made.dtype)
        return _varying.varying_like(zeros, *jax.tree.leaves(args))

    def branch(*args: Any) -> jax.Array:
        return lax.cond(_always(), function, nothing, *args)

    return by_platform(branch, function, *args)


def _always() -> jax.Array:
    # XLA drops a barrier around values, and keeps a branch whose condition it can't see through.
    return lax.optimization_barrier(jnp.ones((), jnp.bool_))


def operands(numbers: Sequence[int]) -> list[jax.Array]:
    """The numbers as ``i32[]``, which XLA's compiler for CPUs does not take for constants.

    It makes one kernel for all computations that are equal, constants included. Offsets of leaves
    in a buffer would be the only difference between leaves of a shape, and compiling a kernel for
    each took most of the time that a step of 300 leaves compiles.
    """

    def branch() -> list[jax.Array]:
        return lax.cond(_always(), constants, lambda: [jnp.int32(0) for _ in numbers])

    def constants() -> list[jax.Array]:
        return [jnp.int32(number) for number in numbers]

    return constants() if len(numbers) < _MANY else by_platform(branch, constants)


def places(ascending: jax.Array, queries: jax.Array, *, side: str = "left") -> jax.Array:
    """``jnp.searchsorted`` of ``queries [...]`` in ``ascending [m]``, ``i32[...]``.

    This is a binary search. On a GPU, a few queries are compared with all entries at once, since
    each step of a loop is a launch, and of more queries the steps are unrolled.
    """
    loop = functools.partial(_binary, side=side, method="scan")
    few = ascending.shape[0] * queries.size <= _COMPARISONS
    unrolled = functools.partial(_binary, side=side, method="scan_unrolled")
    at_once = functools.partial(_counted, side=side) if few else unrolled
    return by_platform(loop, at_once, ascending, queries)


def _binary(ascending: jax.Array, queries: jax.Array, *, side: str, method: str) -> jax.Array:
    return jnp.searchsorted(ascending, queries, side=side, method=method).astype(jnp.int32)


def _counted(ascending: jax.Array, queries: jax.Array, *, side: str) -> jax.Array:
    rows = ascending.reshape((-1,) + (1,) * queries.ndim)
    before = rows < queries[None] if side == "left" else rows <= queries[None]
    return jnp.sum(before, axis=0, dtype=jnp.int32)
