"""The frame of a selector whose state counts its steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_collectives import _validation
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector

Choose = Callable[[jax.Array, int, jax.Array], tuple[PaddedCOO, SelectInfo]]


def counted(choose: Choose, density: float, spec: Spec | None) -> Selector:
    """A selector of ``choose(acc f[n], k, turn) -> (PaddedCOO, SelectInfo)``.

    Its state ``i32[]`` is the number of steps, which ``choose`` gets as the turn.
    """

    def init(size: int | Layout) -> jax.Array:
        as_layout(size)
        return jnp.zeros((), jnp.int32)

    def select(acc: jax.Array, state: jax.Array):
        acc = _validation.as_vector("acc", acc)
        coo, info = choose(acc, _validation.count_from_density(density, acc.shape[0]), state)
        return coo, state + 1, info

    return Selector(init, select, spec=spec)
