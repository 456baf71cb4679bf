"""The exact encoding with short indices: values as they are, indices as a set of bits."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _elias_fano
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _raw, _sizes


def elias_fano() -> Codec:
    """Exact values, and indices in about half a bit more than the entropy of a set.

    The indices of a message are sorted, so that what they share need not be sent: of c indices
    below n each takes ``log2(n / c) + 2`` bits or less, 6.3 at a density of 5 % and 11.6 at 0.1 %.
    A pair arrives to the bit, in ascending order. A message that a selector or a merge has made
    is in order already; another one is sorted before it is sent.

    Returns:
      A :class:`Codec`, with ``exact``. ``c`` pairs of 32-bit values take 1.2 to 1.4 ``c`` words at
      densities from 5 to 0.1 %, 16-bit values half a word less each. Dense values are as in
      :func:`raw`. Cost: a pass over c entries for each bit of an index, and two passes over a set
      of 2 c to 4 c bits.

    Raises:
      TypeError: at ``encode``, values that are not of a floating type.

    References:
      Elias, `Efficient Storage and Retrieval by Content and Address of Static Files
      <https://doi.org/10.1145/321812.321820>`_, 1974; Fano, 1971.

    Example:
      >>> import jax.numpy as jnp
      >>> codec = elias_fano()
      >>> coo = PaddedCOO(jnp.array([0.5, -2.0, 0.0]), jnp.array([3, 90, 100], jnp.int32), 100)
      >>> message = codec.encode(coo, jnp.uint32(0)).message
      >>> found = codec.decode(message, 100, jnp.float32)
      >>> message.shape, found.indices.tolist(), found.values.tolist()
      ((6,), [3, 90, 100], [0.5, -2.0, 0.0])
    """
    raw = _raw.raw()
    return Codec(
        _encode,
        _decode,
        raw.encode_dense,
        raw.decode_dense,
        exact=True,
        spec=Spec.of("elias_fano"),
    )


def _encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    _validation.check_float("values", coo.values.dtype, float64=True)
    shape = coo.indices.shape
    rows = (math.prod(shape[:-1]), coo.capacity)
    # As integers: moving floats of 16 bits may quiet a NaN.
    unsigned = jnp.dtype(f"uint{8 * coo.values.dtype.itemsize}")
    values = lax.bitcast_convert_type(coo.values, unsigned)
    values, indices = _sorted(values.reshape(rows), coo.indices.reshape(rows))
    missing = [(0, 0), (0, -coo.capacity % _each(coo.values.dtype))]
    indices = jnp.pad(indices, missing, constant_values=coo.size)
    codes = jax.vmap(lambda row: _elias_fano.encode(row, coo.size))(indices)
    message = jnp.concatenate([_raw.encode_dense(values, seed)[0], codes], axis=-1)
    message = message.reshape(*shape[:-1], message.shape[-1])
    return Encoded(message, coo.indices < coo.size, jnp.zeros_like(coo.values))


def _each(dtype) -> int:
    """Values that share a word."""
    return max(1, 4 // jnp.dtype(dtype).itemsize)


def _sorted(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    in_order = jnp.all(indices[:, 1:] >= indices[:, :-1])

    def ordered(values: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(indices, axis=-1)
        return (
            jnp.take_along_axis(values, order, axis=-1),
            jnp.take_along_axis(indices, order, axis=-1),
        )

    return lax.cond(in_order, lambda *rows: rows, ordered, values, indices)


def _decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
    each, width = _each(dtype), jnp.dtype(dtype).itemsize

    def words(groups: int) -> int:
        return -(-groups * each * width // 4) + _elias_fano.words(groups * each, size)

    slots = each * _sizes.slots_of(message.shape[-1], words)
    of_values = slots * width // 4
    rows = message.reshape(math.prod(message.shape[:-1]), message.shape[-1])
    indices = jax.vmap(lambda row: _elias_fano.decode(row, slots, size))(rows[:, of_values:])
    values = _raw.decode_dense(message[..., :of_values], slots, dtype)
    return PaddedCOO(values, indices.reshape(*message.shape[:-1], slots), size)
