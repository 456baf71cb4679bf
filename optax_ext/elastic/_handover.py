"""What workers pass on when one comes or goes, as functions of all workers of a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback._roles import Role, Rows
from optax_ext._state import _find, _index
from optax_ext._state._reshard import resharded
from sparse_collectives import AxisName

_SUMS = Role.SUMMED, Role.MOVED


def _mapped(function: Callable[[_index.Leaf, jax.Array], Any], opt_state: Any) -> Any:
    """The state with ``function`` of each array, and of what it is to the workers."""
    leaves, structure = jax.tree.flatten(opt_state)
    return structure.unflatten(map(function, _index.index_of(structure).leaves, leaves))


def carried(opt_state: Any, fresh: Any) -> Any:
    """The host arrays with which a worker goes on in another group, made as by ``reshard``.

    Args:
      opt_state: the state of some workers of a group, all of whose rows this one takes over.
      fresh: the state of one worker of the new group, before its first step.
    """
    taken = resharded(_alone(opt_state), _alone(fresh))

    def of_group(node: Any, like: Any) -> Any:
        if not _find.is_state(node):
            return node
        return node._replace(owner=like.owner, settings=like.settings)

    return jax.tree.map(of_group, taken, fresh, is_leaf=_find.is_state)


def _alone(opt_state: Any) -> Any:
    """The rows of these workers as the state of all workers."""

    def of(node: Any) -> Any:
        if not _find.is_state(node):
            return node
        rows = node.workers
        settings = dataclasses.replace(node.settings, workers=rows)
        return node._replace(owner=jnp.arange(rows, dtype=jnp.int32), settings=settings)

    return jax.tree.map(of, opt_state, is_leaf=_find.is_state)


def admit(axis: AxisName, params: Any, opt_state: Any, holds: jax.Array) -> tuple[Any, Any]:
    """Parameters and state for workers that have none yet, inside the mapped function.

    They get shared values from the first worker that holds them, to the bit, and the mean of the
    statistics of the others, such as second moments. They also get the first one's selector, of
    which :func:`carried` has kept only the steps that it counts. Summed values of a newcomer, such
    as its residual, start at zero or come from its checkpoint.

    Args:
      axis: the axis of the workers.
      params: the parameters; for a worker that does not hold them, anything of their shapes.
      opt_state: the state, likewise.
      holds: ``bool[P]``, the same on every worker: whether each has the state. At least one does.
    """
    index = lax.axis_index(axis)
    mine, first = holds[index], jnp.argmax(holds) == index
    holders = holds.sum(dtype=jnp.float32)

    def shared(x: jax.Array) -> jax.Array:
        return _from_words(
            lax.psum(jnp.where(first, _words(x), jnp.zeros_like(_words(x))), axis), x
        )

    def kept(x: jax.Array) -> jax.Array:
        return jnp.where(mine, x, shared(x))

    def learned(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            # A step count, or the key of a generator.
            return kept(x)
        wide = jnp.where(mine, x, jnp.zeros_like(x)).astype(jnp.promote_types(x.dtype, "float32"))
        total = lax.psum(wide, axis)
        return jnp.where(mine, x, (total / holders).astype(x.dtype))

    def of(known: _index.Leaf, x: jax.Array) -> jax.Array:
        if known.rows in (Rows.NONE, Rows.SHARD):
            return shared(x)
        if known.role is Role.PERIODIC:
            return kept(x)
        return learned(x) if known.role is Role.STATISTIC else x

    return jax.tree.map(shared, params), _mapped(of, opt_state)


def release(axis: AxisName, opt_state: Any, leaves: jax.Array) -> Any:
    """The state after workers have handed over values that add up, inside the mapped function.

    The entries of workers that leave are split by index among those that stay. Each of these
    rounds once when it adds one to its own.

    Args:
      axis: the axis of the workers.
      opt_state: the state.
      leaves: ``bool[P]``, the same on every worker: whether each leaves. At least one stays.
    """
    index = lax.axis_index(axis)
    goes, stay = leaves[index], (~leaves).astype(jnp.int32)
    # How many workers that stay are before this one, and in all.
    turn, sharing = (jnp.cumsum(stay) - stay)[index], stay.sum()

    def added(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        nothing = jnp.zeros_like(wide)
        total = lax.psum(jnp.where(goes, wide, nothing), axis)
        mine = (jnp.arange(x.size) % sharing == turn).reshape(x.shape)
        return jnp.where(goes, nothing, wide + jnp.where(mine, total, nothing)).astype(x.dtype)

    return _mapped(lambda known, x: added(x) if known.role in _SUMS else x, opt_state)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as numbers that add up without rounding."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.iscomplexobj(x):
        return jnp.stack([_words(x.real), _words(x.imag)])
    size = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[size])
    return bits if size > 2 else bits.astype(jnp.uint32)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`_words`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if like.dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if jnp.iscomplexobj(like):
        return lax.complex(*(_from_words(x, like.real) for x in words))
    small = {1: jnp.uint8, 2: jnp.uint16}.get(like.dtype.itemsize)
    words = words if small is None else words.astype(small)
    return lax.bitcast_convert_type(words, like.dtype)
