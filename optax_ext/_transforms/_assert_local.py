"""Finding gradients that were averaged before the allreduce, where no type tells."""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import _checks, _gradient_checks
from optax_ext._transforms._fingerprint import fingerprint
from sparse_collectives import AxisName, transport


def assert_local_gradients(*, axis: AxisName) -> optax.GradientTransformationExtraArgs:
    """Raises an error when all workers have the same gradients, bit for bit.

    A loop that averages gradients itself, by ``pmean`` or by differentiating with respect to
    replicated parameters, and then gives them to a sparse allreduce, pays for the dense
    exchange, and trains as if nothing were wrong. Under ``shard_map(check_vma=True)`` types
    tell, and the library raises an error by itself; under ``check_vma=False``, ``pmap`` and
    :func:`sparse_collectives.simulate` nothing does. Put this first in the chain while a loop
    is new, and take it out when it has run a few steps.

    Gradients that are zero, or not finite, everywhere are no evidence, and neither is one
    worker.

    Args:
      axis: the mesh axis (or a tuple of them) of the workers.

    Returns:
      A stateless ``optax.GradientTransformation`` that passes gradients on unchanged. The
      error is a ValueError from a host callback; JAX reports it as a runtime error when a
      result, or ``jax.effects_barrier()``, is waited for. Cost: one read of the gradients,
      a psum of two words, a callback.

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
        workers = _checks.workers(axis)
        _gradient_checks.check_local_gradients(updates, axis)
        if workers == 1:
            return updates, state
        parts = map(fingerprint, itertools.count(), jax.tree.leaves(updates))
        mine = sum(parts, jnp.uint32(0))
        first = transport.psum(
            jnp.where(transport.axis_index(axis) == 0, mine, jnp.uint32(0)), axis
        )
        equal = transport.psum((mine == first).astype(jnp.int32), axis) == workers
        jax.debug.callback(_raise, equal & (first != 0))
        return updates, state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def _raise(equal: Any) -> None:
    if equal:
        raise ValueError(
            "all workers have the same gradients, so they were averaged before the sparse "
            "allreduce, and the dense exchange that it replaces has taken place. Give it each "
            "worker's own: take pmean or psum of the gradients out of the step, and under "
            "shard_map differentiate with respect to jax.lax.pcast(params, axis, to='varying')."
        )
