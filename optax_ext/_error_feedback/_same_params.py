"""Parameters that differ between the workers when a state is made, noticed without types.

Under ``pmap`` and ``shard_map(check_vma=False)`` a program that draws its parameters with a key of
each worker would train P models with one sum of their updates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, _axes, _varying


def check(params: Any, axis: AxisName) -> None:
    """Raises an error when the program runs, if some worker has other parameters than the rest.

    Cost: one pass over the parameters, and two words, when a state is made. Over MPI, in
    :func:`~sparse_collectives.simulate`, and if types prove it, nothing is checked.
    """
    unknown = not _axes.is_communicator(axis) and _axes.axis_is_bound(axis)
    if not unknown or _axes.is_simulated(axis) or _varying.checks_varying(axis):
        return
    # A branch, so that XLA does not fuse this with the program that makes the parameters.
    digest = lax.cond(lax.axis_index(axis) >= 0, _digest, lambda _: jnp.uint32(0), params)
    differ = lax.pmax(digest, axis) != lax.pmin(digest, axis)
    lax.cond(differ, lambda: jax.debug.callback(_raise), lambda: None)


def _digest(params: Any) -> jax.Array:
    """The bits of all parameters, added up, ``u32[]``."""
    digest = jnp.zeros((), jnp.uint32)
    for leaf in map(jnp.asarray, jax.tree.leaves(params)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
            digest = digest * jnp.uint32(31) + jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
    return digest


def _raise() -> None:
    raise ValueError(
        "the workers have different parameters where tx.init is called, and each of them would "
        "train its own model with the updates of all. Make the parameters once, outside of "
        "jax.pmap or jax.shard_map, or with the same key on every worker: give keys of one worker "
        "to its data only."
    )
