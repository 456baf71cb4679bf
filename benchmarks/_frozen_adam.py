"""Adam whose second moment stops after a warm-up, as in 1-bit Adam.

Error feedback delays gradients, and what is delayed arrives as a sum. A linear optimizer applies
the sum as it would have applied the parts; Adam divides by the size of the sum too, and so makes
less of a rare large entry than of many small ones. With the second moment frozen it is linear.

Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, ICML 2021.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

# Of the mean over a leaf. An entry whose gradient was zero in the whole warm-up, such as the
# embedding of a rare character, would otherwise be divided by nothing.
FLOOR = 0.01
_EPSILON = 1e-8


class FrozenAdamState(NamedTuple):
    """State of :func:`scale_by_frozen_adam`.

    Attributes:
      count: ``i32[]``, steps taken.
      first: the mean of the gradients, as the parameters.
      second: the mean of their squares, as the parameters.
    """

    count: jax.Array
    first: Any
    second: Any


def scale_by_frozen_adam(
    *, b1: float, b2: float, frozen_after: int
) -> optax.GradientTransformation:
    """``optax.scale_by_adam`` for ``frozen_after`` steps; from then on the second moment stays."""

    def init(params: Any) -> FrozenAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return FrozenAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: FrozenAdamState, params: Any = None):
        del params
        count = state.count + 1
        frozen = count > frozen_after
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(
            lambda v, g: jnp.where(frozen, v, b2 * v + (1 - b2) * g**2), state.second, updates
        )

        def scaled(m, v):
            v = v / (1 - b2 ** jnp.minimum(count, frozen_after))
            v = jnp.where(frozen, jnp.maximum(v, FLOOR * v.mean()), v)
            return m / (1 - b1**count) / (jnp.sqrt(v) + _EPSILON)

        return jax.tree.map(scaled, first, second), FrozenAdamState(count, first, second)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformation(cast(Any, init), cast(Any, update))
