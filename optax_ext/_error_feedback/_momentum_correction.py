"""The contract of a momentum before the residual."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from sparse_collectives import Spec


class MomentumCorrection(NamedTuple):
    """A momentum whose velocity the residual accumulates instead of the gradient.

    Attributes:
      init: ``init(size) -> velocity f32[size]``.
      update: ``update(velocity, gradient) -> (velocity, increment)``, all of the same
        shape; the increment is added to the residual.
      mask: ``mask(velocity f32[1, n], indices i32[c], delivered bool[c]) -> velocity``,
        called after the exchange with the indices that this worker selected, and whether
        each of them was delivered.
      spec: how it was made, as text; only checkpoints use it.
    """

    init: Callable[[int], jax.Array]
    update: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    mask: Callable[[jax.Array, jax.Array, jax.Array], Any]
    spec: Spec | None = None
