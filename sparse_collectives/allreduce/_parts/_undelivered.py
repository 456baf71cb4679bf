"""How an allreduce says what a worker must keep."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparse_collectives import padded_coo
from sparse_collectives._types import Undelivered
from sparse_collectives.allreduce._parts import _merge
from sparse_collectives.padded_coo import PaddedCOO


def of_slots(coo: PaddedCOO, slots: jax.Array, others: Sequence[PaddedCOO] = ()) -> Undelivered:
    """``slots f[c]`` of the selection ``coo``, and any number of other entries."""
    none = padded_coo.empty(coo.size, 0, coo.values.dtype)
    return Undelivered(slots, _merge.concatenate(others) if others else none)


def nothing(coo: PaddedCOO, others: Sequence[PaddedCOO] = ()) -> Undelivered:
    """Nothing of the selection ``coo`` itself."""
    return of_slots(coo, jnp.zeros_like(coo.values), others)
