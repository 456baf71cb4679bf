"""A selector to start from: the largest entry of each run of consecutive ones.

Copy the file, rename ``my_selector``, and replace the numbered parts. Every selector has the
other parts. The file passes the checks as it stands:

    make contract SELECTOR=docs/templates/my_selector.py:my_selector
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import sparse_collectives as sc
from sparse_collectives import extend


class MySelectorState(NamedTuple):
    """Everything that changes from step to step. Shapes and dtypes stay the same.

    Attributes:
      count: ``i32[]``, steps taken.
    """

    count: jax.Array


def my_selector(*, density: float) -> sc.Selector:
    """Selects the largest magnitude of each of ``k = max(1, round(density * n))`` runs.

    The runs begin elsewhere at each step, so that two large neighbors do not always share one.
    Cost: one pass over n entries, and a sort of k indices.

    Args:
      density: k / n, in (0, 1].

    Returns:
      A :class:`sparse_collectives.Selector` whose buffers have k slots.

    Raises:
      ValueError: density is not in (0, 1].
    """
    density = extend.check_density(density)

    def init(layout: int | sc.Layout) -> MySelectorState:
        # A selector by layer would have a state for each of layout.shapes.
        del layout
        return MySelectorState(count=jnp.zeros((), jnp.int32))

    def select(acc: jax.Array, state: MySelectorState):
        size = acc.shape[0]
        # The capacity is static: it depends on the size, and not on values.
        k = min(size, max(1, round(density * size)))

        # 1. Choose the entries. Magnitudes as bits are integers that order NaN above infinity.
        width = -(-size // k)
        turn = state.count % width
        bits = jnp.roll(extend.magnitude_bits(acc), -turn)
        runs = jnp.pad(bits, (0, k * width - size)).reshape(k, width)
        place = jnp.arange(k, dtype=jnp.int32) * width + jnp.argmax(runs, axis=1).astype(jnp.int32)
        index = (place + turn) % size
        found = jnp.max(runs, axis=1) > 0  # Zeros are never sent.

        # 2. Sort the unique indices, with the padding (index n, value 0) last.
        indices = jnp.sort(jnp.where(found, index, size))
        values = acc.at[indices].get(mode="fill", fill_value=0)

        # 3. The info of the step: the smallest magnitude that is sent, and the overflow.
        selected = jnp.sum(indices < size, dtype=jnp.int32)
        magnitudes = jnp.where(indices < size, jnp.abs(values).astype(jnp.float32), jnp.inf)
        info = sc.SelectInfo(
            selected=selected,
            overflow=jnp.zeros_like(selected),
            threshold=jnp.min(magnitudes),
        )
        return sc.PaddedCOO(values, indices, size), MySelectorState(state.count + 1), info

    # The spec is for checkpoints: a name and arguments. A selector without a spec also trains.
    return sc.Selector(init, select, spec=sc.Spec.of("my_selector", density=density))
