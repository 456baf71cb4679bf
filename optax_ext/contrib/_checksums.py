"""Checksums, by which restored arrays are compared with the saved ones, to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_ext._state import _checkpoint


def checksums(tree: Any) -> dict[str, int]:
    """A 32-bit checksum for each array of a pytree, the same however it is sharded.

    Save them with a checkpoint, and compare them with :func:`check_checksums` after it
    is restored. Checkpoint libraries notice a file that is missing or too short, but a
    changed bit in an array reaches the training. A checksum is the sum, modulo 2**32, of the words
    of the array, each times an odd weight that depends on its index. It detects any change of one
    word, and a change of several words with a probability of about 1 - 2**-32. It is no
    protection against intent.

    Args:
      tree: arrays of numbers, also global arrays of several processes, all of which then have to
        call it.

    Returns:
      A dict from the path of each array to its checksum; JSON can hold it.

    Cost: one pass over the arrays, and a psum of a word for each.

    Example:
      ```pycon
      >>> import jax.numpy as jnp
      >>> checksums({"w": jnp.array([0.0, 1.0, 2.0])})
      {"['w']": 3397386240}

      ```
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    sums = _sums([leaf for _, leaf in flat])
    return {jax.tree_util.keystr(path): int(np.asarray(x)) for (path, _), x in zip(flat, sums)}


def check_checksums(saved: dict[str, int], tree: Any) -> None:
    """Checks that the arrays have the saved checksums.

    Args:
      saved: :func:`checksums` of the saved tree.
      tree: the restored tree.

    Raises:
      TypeError: ``saved`` is not such a dictionary, so the checkpoint has no checksums.
      ValueError: an array has another checksum, or is not in both. The message names the arrays.
    """
    if not isinstance(saved, dict):
        raise TypeError(
            "saved must be what optax_ext.contrib.checksums returned, got "
            f"{_checkpoint.short(saved)}: the checkpoint was saved without checksums. Save them "
            "with the arrays, for example with checkpointer.save(path, state, "
            "custom_metadata={'checksums': checksums(state)})."
        )
    found = checksums(tree)
    differ = sorted(
        _checkpoint.short(path)
        for path in {*saved, *found}
        if not _checkpoint.equal(saved.get(path), found.get(path))
    )
    if differ:
        names = ", ".join(differ[:10]) + (", ..." if len(differ) > 10 else "")
        raise ValueError(
            f"the checksums of {len(differ)} of {len(found)} arrays differ from the saved ones: "
            f"{names}. The checkpoint is damaged, or was saved from another tree: restore an older "
            "one."
        )


@jax.jit
def _sums(leaves: list[Any]) -> list[jax.Array]:
    return [_checksum(jnp.asarray(leaf)) for leaf in leaves]


def _checksum(x: jax.Array) -> jax.Array:
    words = _as_words(x)
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


def _as_words(x: jax.Array) -> jax.Array:
    """The bits of ``x`` as ``u32[...]``, with a last axis of 2 if a number has two words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
