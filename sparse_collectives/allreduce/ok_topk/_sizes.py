"""Messages of several sizes, of which a step takes the shortest that is enough.

The messages of the paper have the size of their contents, which is the lower end of its
Table 1. A program's messages are of static sizes, so it holds an exchange of each of a few,
and all workers choose the same by what they know of each other's counts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.allreduce.ok_topk._plan import Collective


def shortest(
    most: jax.Array,
    exchanges: Sequence[Collective],
    agreed: Callable[[jax.Array], jax.Array] = lambda fit: fit,
) -> jax.Array:
    """The first that has room for ``most`` entries, or else the last, ``i32[]``.

    Args:
      most: ``i32[]``, which all workers know.
      exchanges: of ascending sizes.
      agreed: whether each of some flags holds for all who take part in the exchange.
    """
    smaller = jnp.asarray([each.slots for each in exchanges[:-1]], jnp.int32)
    return jnp.sum(~agreed(most <= smaller), dtype=jnp.int32)


def run(
    which: jax.Array,
    exchanges: Sequence[Collective],
    through: Callable[[Collective], Any],
    workers: int,
) -> tuple[Any, Callable[[jax.Array], _messages.Words]]:
    """``through`` the exchange ``which``, and a function of the entries sent: what it moves."""
    result = lax.switch(which, [lambda each=each: through(each) for each in exchanges])

    def words(entries: jax.Array) -> _messages.Words:
        of_each = [
            _messages.words_of_pairs(each.received(workers), entries, each.slots_sent(workers))
            for each in exchanges
        ]
        return jax.tree.map(lambda *x: jnp.stack(x)[which], *of_each)

    return result, words
