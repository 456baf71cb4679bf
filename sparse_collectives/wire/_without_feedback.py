"""Rounding whose error no worker keeps."""

import jax
import jax.numpy as jnp

from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded


def without_feedback(codec: Codec) -> Codec:
    """Sends the same messages as ``codec``, but no worker keeps the rounding error.

    SparCML's residual is ``acc - TopK(acc)``. It does not contain the quantization error, which
    cancels out over the steps because its mean is 0. This is also the only way to use
    :func:`qsgd` with 2 bits: its error is larger than most values, and error feedback of it
    diverges. Entries that find no room in a message stay with their worker, as with ``codec``.

    By design, the total and the residuals of a step then do not add up to the accumulators.

    Args:
      codec: a codec whose error has a mean of 0, such as :func:`qsgd`. With a codec that rounds
        to nearest, such as :func:`bf16`, small updates may be lost permanently.

    Returns:
      A :class:`Codec` with the same messages and cost.

    References:
      Renggli et al., `SparCML <https://arxiv.org/abs/1802.08021>`_, SC 2019, Algorithm 1.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> codec = without_feedback(sc.wire.qsgd(bits=2))
      >>> coo = sc.PaddedCOO(jnp.array([3.0, 1.0]), jnp.array([0, 2]), 3)
      >>> codec.encode(coo, jnp.uint32(0)).error.tolist()
      [0.0, 0.0]
    """

    def encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
        encoded = codec.encode(coo, seed)
        return encoded._replace(error=jnp.zeros_like(encoded.error))

    def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        message, error = codec.encode_dense(values, seed)
        return message, jnp.zeros_like(error)

    spec = None if codec.spec is None else Spec.of("without_feedback", codec=codec)
    return codec._replace(encode=encode, encode_dense=encode_dense, spec=spec)
