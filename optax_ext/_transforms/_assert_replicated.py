"""Finding gradients that differ where the devices of a worker hold the same of a parameter."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._state import _find
from optax_ext._step import _sharding
from optax_ext._transforms._fingerprint import fingerprint
from sparse_collectives import transport


def assert_replicated_gradients(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Raises an error when the devices of a worker have other gradients of the same parameter.

    Of a parameter that is not sharded over an axis all devices along it hold the same. In a
    function that is mapped over that axis by hand each of them may have the gradient of its own
    part of the loss, and has to add up all of them. Under ``shard_map(check_vma=True)`` types
    tell, and the library raises an error by itself; under ``check_vma=False`` nothing does: the
    entries that a device exchanges would be taken from its own gradient alone. Put this around
    the chain while a loop is new. (:func:`make_train_step` leaves these axes to the compiler,
    which adds up what belongs together.)

    Args:
      tx: the whole chain, with a :func:`sparse_allreduce` in it.

    Returns:
      ``tx``, with the check at each update. The error is a ValueError from a host callback; JAX
      reports it as a runtime error when a result, or ``jax.effects_barrier()``, is waited for.
      Cost: one read of the gradients, and a psum of two words for each parameter.

    Example:
      >>> import optax, optax_ext
      >>> tx = assert_replicated_gradients(
      ...     optax.chain(optax_ext.ok_topk(density=0.01, axis="data"), optax.adam(1e-3))
      ... )
    """
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        for node in _find.get_states(state):
            sharding = node.layout.sharding
            if not _sharding.is_manual(sharding):
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
    jax.debug.callback(functools.partial(_raise, name, free), differ)


def _raise(name: str, free: tuple[Any, ...], differ: Any) -> None:
    if differ:
        raise ValueError(
            f"updates{name} differ between the devices of a worker along {free}, which all hold "
            "the same of that parameter: each has the gradient of its own part of the loss. Add "
            f"them up with jax.lax.psum(gradient, {free}) before tx.update."
        )
