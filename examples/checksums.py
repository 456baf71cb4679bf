"""Checksums of a checkpoint's arrays, against a flipped bit, which orbax restores without a word.

    metadata["checksums"] = checksums(tree)  # to be saved with the tree
    check_checksums(metadata["checksums"], restored)

Copy this file to your program. A checksum is the sum, modulo 2**32, of the words of an array, each
times an odd weight that depends on its index. It detects any change of one word, and a change of
several words with a probability of about 1 - 2**-32. It is no protection against intent.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def checksums(tree: Any) -> dict[str, int]:
    """A word for the path of each array, the same however it is sharded; JSON can hold them.

    If the arrays are spread over several processes, all of them have to call it.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    sums = _checksums([leaf for _, leaf in flat])
    return {jax.tree_util.keystr(path): int(np.asarray(x)) for (path, _), x in zip(flat, sums)}


def check_checksums(saved: dict[str, int], tree: Any) -> None:
    """Raises a ValueError that names the arrays which do not have the saved checksums."""
    found = checksums(tree)
    differ = [path for path in sorted({*saved, *found}) if saved.get(path) != found.get(path)]
    if differ:
        names = ", ".join(differ[:10]) + (", ..." if len(differ) > 10 else "")
        raise ValueError(
            f"the checksums of {len(differ)} of {len(found)} arrays differ from the saved ones: "
            f"{names}. The checkpoint is damaged, or was saved from another tree: restore an older "
            "one."
        )


@jax.jit
def _checksums(leaves: list[Any]) -> list[jax.Array]:
    return [_checksum(jnp.asarray(leaf)) for leaf in leaves]


def _checksum(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    # No reshape, which would move a sharded array.
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * np.uint32(size % 2**32) + lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
    # The finalizer of MurmurHash3 makes the weights of neighboring words unrelated.
    weight = index + np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        weight = (weight ^ (weight >> shift)) * np.uint32(factor)
    weight = (weight ^ (weight >> 16)) | np.uint32(1)
    return jnp.sum(words * weight, dtype=jnp.uint32)
