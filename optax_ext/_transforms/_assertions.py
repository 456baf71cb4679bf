"""Assertions in a chain, for what types do not catch: local and replicated gradients."""

import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._error_feedback import _layout, _trace_checks
from optax_ext._state import _wrappers
from sparse_collectives import AxisName, _hash, extend, transport


def fingerprint(number: int, leaf: jax.Array) -> jax.Array:
    """A hash of the entries of a leaf and of their positions, ``u32[]``; 0 if all are zero."""
    flat = leaf.reshape(-1)
    bits = extend.magnitude_bits(flat).astype(jnp.uint32)
    signed = jnp.where(flat < 0, bits | jnp.uint32(1 << 31), bits)
    place = lax.iota(jnp.uint32, flat.shape[0]) ^ _hash.combine(number)
    # The same entries at other positions are another gradient.
    hashed = _hash.mix(signed + _hash.mix(place))
    # A run that diverges has NaN on all workers, which proves nothing.
    counts = (bits != 0) & jnp.isfinite(flat)
    return jnp.sum(jnp.where(counts, hashed, jnp.uint32(0)), dtype=jnp.uint32)


def assert_local_gradients(*, axis: AxisName) -> optax.GradientTransformationExtraArgs:
    """Raises an error if all workers have the same gradients, bit for bit.

    A loop that averages gradients before a sparse allreduce, by ``pmean`` or by differentiating
    with respect to replicated parameters, pays for the dense exchange and seems to train
    normally. Under ``shard_map(check_vma=True)`` the library catches this by types, without
    this assertion; under ``check_vma=False``, ``pmap`` and :func:`sparse_collectives.simulate`
    types do not catch it. Put the assertion first in the chain of a new loop, and remove it
    after a few steps.

    Gradients that are zero or not finite everywhere raise no error, nor does a single worker.

    Args:
      axis: the mesh axis (or a tuple of axes) of the workers.

    Returns:
      A stateless ``optax.GradientTransformation`` that passes gradients on unchanged. The
      error is a ValueError from a host callback; JAX reports it as a runtime error when the
      program waits for a result or calls ``jax.effects_barrier()``. Cost: one read of the
      gradients, a psum of two words, a callback.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax.chain(
      ...     assert_local_gradients(axis="data"),
      ...     optax_ext.ok_topk(density=0.01, axis="data"),
      ...     optax.adam(1e-3),
      ... )
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any = None):
        del params
        workers = _trace_checks.workers(axis)
        updates = _trace_checks.own_gradients(updates, axis)
        if workers == 1:
            return updates, state
        parts = map(fingerprint, itertools.count(), jax.tree.leaves(updates))
        mine = sum(parts, jnp.uint32(0))
        first = transport.psum(
            jnp.where(transport.axis_index(axis) == 0, mine, jnp.uint32(0)), axis
        )
        equal = transport.psum((mine == first).astype(jnp.int32), axis) == workers
        jax.debug.callback(_raise_averaged, equal & (first != 0))
        return updates, state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def _raise_averaged(equal: Any) -> None:
    if equal:
        raise ValueError(
            "all workers have the same gradients, so they were averaged before the sparse "
            "allreduce, and the dense exchange that it replaces has taken place. Give it the "
            "gradients of each worker: take pmean or psum of the gradients out of the step, and "
            "under shard_map differentiate with respect to "
            "jax.lax.pcast(params, axis, to='varying')."
        )


def assert_replicated_gradients(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Raises an error if the devices of a worker have different gradients of the same parameter.

    All devices along an axis hold the same values of a parameter that is not sharded over it. In
    a function that is mapped over that axis by hand, each device may have the gradient of its own
    part of the loss, and the function has to sum these gradients. Under
    ``shard_map(check_vma=True)`` the library catches a missing sum by types, without this
    assertion. Under ``check_vma=False`` nothing catches it, and a device exchanges entries of its
    own gradient only. Put the assertion around the chain of a new loop. (:func:`make_train_step`
    leaves these axes to the compiler, which adds the sums.)

    Args:
      tx: the whole chain, with a :func:`sparse_allreduce` in it.

    Returns:
      ``tx``, with the check at each update. The error is a ValueError from a host callback; JAX
      reports it as a runtime error when the program waits for a result or calls
      ``jax.effects_barrier()``. Cost: one read of the gradients, and a psum of two words for
      each parameter.

    Example:
      >>> import optax, optax_ext
      >>> tx = assert_replicated_gradients(
      ...     optax.chain(optax_ext.ok_topk(density=0.01, axis="data"), optax.adam(1e-3))
      ... )
    """
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        for node in _wrappers.get_states(state):
            sharding = node.layout.sharding
            if not _layout.is_manual(sharding):
                continue
            leaves = jax.tree_util.tree_leaves_with_path(updates)
            for i, (path, leaf) in enumerate(leaves):
                if free := sharding.free(i):
                    _check(jax.tree_util.keystr(path), leaf, free)
        return inner.update(updates, state, params, **extra_args)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(inner.init, cast(Any, update))


def _check(name: str, leaf: jax.Array, free: tuple[Any, ...]) -> None:
    mine = fingerprint(0, leaf)
    first = transport.psum(jnp.where(transport.axis_index(free) == 0, mine, jnp.uint32(0)), free)
    differ = transport.psum((mine != first).astype(jnp.int32), free) > 0
    jax.debug.callback(functools.partial(_raise_different, name, free), differ)


def _raise_different(name: str, free: tuple[Any, ...], differ: Any) -> None:
    if differ:
        raise ValueError(
            f"updates{name} differ between the devices of a worker along {free}, which all hold "
            "the same of that parameter: each has the gradient of its own part of the loss. Add "
            f"them up with jax.lax.psum(gradient, {free}) before tx.update."
        )
