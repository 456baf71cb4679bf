"""Descriptions of a training, by which workers check that they have the same."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._state import _find, _index


def residuals(opt_state: Any) -> list[jax.Array]:
    """The residuals of all parts of the state."""
    return [state.residual for state in _find.get_states(opt_state)]


@jax.jit
def digest(params: Any, residuals: Any) -> tuple[jax.Array, jax.Array]:
    """A checksum of the parameters, and the sum of the magnitudes of the residuals."""
    total = jnp.zeros((), jnp.uint32)
    for number, x in enumerate(jax.tree.leaves(params)):
        # The weights detect an exchange of two entries.
        words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).ravel()
        weights = jnp.arange(x.size, dtype=jnp.uint32) * 2 + np.uint32(2 * number + 1)
        total += (words * weights).sum(dtype=jnp.uint32)
    waited = sum(jnp.abs(x.astype(jnp.float32)).sum() for x in residuals)
    return total, jnp.asarray(waited, jnp.float32)


def rounds(opt_state: Any) -> int:
    """Steps from one exchange to the next, the same in all parts."""
    index = _index.of(opt_state)
    if index.moves or len(index.every) > 1:
        raise ValueError(
            "tx has rounds of local steps that end at a step of their own, such as "
            "optax_ext.local_steps: what a worker has moved can't be handed over in the middle. "
            "Use every= of optax_ext.sparse_adamw or sparse_sgd, the same in all parts."
        )
    if not index.is_whole:
        raise ValueError(
            "tx shards its buffer over several axes of workers: optax_ext.elastic is for workers "
            "that hold a whole residual each."
        )
    return max(index.every, default=1)


def exchanges(opt_state: Any, every: int) -> bool:
    """Whether the step from this state has an exchange, in rounds of so many steps."""
    states = _find.get_states(opt_state)
    return every == 1 or (int(states[0].count) + 1) % every == 0


def description(params: Any, opt_state: Any) -> str:
    """The model and the optimizer in short, for processes to compare."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in leaves]
    settings = [str(state.settings) for state in _find.get_states(opt_state)]
    text = repr((shapes, settings, str(jax.tree.map(lambda x: (x.shape, x.dtype), opt_state))))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    count = sum(x.size for _, x in leaves)
    return f"a model of {count} parameters ({digest}, jax {jax.__version__})"
