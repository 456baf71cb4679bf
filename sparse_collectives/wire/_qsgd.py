"""QSGD: values in 2, 4 or 8 bits, rounded at random without bias."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _sizes, _values


def qsgd(*, bits: int = 8, bucket: int = 512, norm: str = "max") -> Codec:
    r"""Stochastic quantization with a scale for each bucket.

    .. math::

        E[decode(encode(v))] = v, \quad
        decode(\cdot) \in \{-s, \dots, s\} \cdot \frac{scale}{s}, \quad s = 2^{bits-1} - 1

    The random numbers are a hash of the seed and the position (the index of an entry, or the place
    in a dense run), so the same seed and values give the same message everywhere. Each error is
    less than ``scale / s``. With 2 bits, the error of values below half of the scale is on average
    larger than the value. Error feedback then amplifies the error until training diverges: use 4 or
    8 bits with error feedback, or :func:`without_feedback`.

    With error feedback, a value whose bucket has another value r times as large may
    arrive as zero for up to ``r / s`` steps, until its accumulated sum reaches a level.

    A message is the indices, unchanged; ``scale / s`` of each bucket as float32; and the codes, the
    first in the lowest bits of its word. A code is s more than the signed level, or ``2**bits - 1``
    for a value that is not finite, which arrives as NaN.

    Args:
      bits: the bits of a value: 2, 4 or 8.
      bucket: the number of values that share a scale; their codes fill whole words.
      norm: the scale of a bucket. ``'max'``, the default, is its largest magnitude,
        which has finer steps and a smaller variance. ``'l2'`` is the 2-norm of the
        paper, which makes more zeros; that helps only if zeros cost less.

    Returns:
      A :class:`Codec`. ``m`` dense values take ``ceil(m bits / 32) + ceil(m / bucket)``
      words, and ``c`` pairs take c words more. Cost: about twenty operations for each
      value.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: at ``encode``, values that are not float32, bfloat16 or float16.

    References:
      Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, NeurIPS 2017; Renggli
      et al., `SparCML <https://arxiv.org/abs/1802.08021>`_, SC 2019, section 6.
    """
    if isinstance(bits, bool) or bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits!r}.")
    bucket = _validation.check_positive_int("bucket", bucket)
    if bucket * bits % 32:
        raise ValueError(
            f"bucket must be a multiple of {32 // bits} with bits={bits}, so that its codes fill "
            f"whole words; got {bucket}. Write for example bucket=512."
        )
    norm = _validation.check_choice("norm", norm, ("max", "l2"))
    levels = 2 ** (bits - 1) - 1

    def quantize(values: jax.Array, position: jax.Array, seed: jax.Array):
        """The body of a message, and the error."""
        _validation.check_float("values", values.dtype)
        magnitude = _values.encoded_magnitude(values)
        finite = magnitude < _bits.INFINITY_BITS
        numbers = lax.bitcast_convert_type(jnp.where(finite, magnitude, 0), jnp.float32)
        numbers = _values.in_blocks(numbers, bucket)
        unit = _scale(numbers, norm) / levels
        steps = numbers / jnp.where(unit > 0, unit, 1.0)[..., None]
        below = jnp.floor(steps)
        random = _values.in_blocks(_hash.uniform(seed, position), bucket)
        up = (random < steps - below).astype(jnp.float32)
        level = jnp.minimum(below + up, levels).astype(jnp.int32)
        level = _values.in_one_run(level)[..., : values.shape[-1]]
        code = levels + jnp.where(_values.is_negative(values), -level, level)
        code = jnp.where(finite, code, 2 * levels + 1)
        decoded = dequantize(code, unit, values.dtype)
        scales = lax.bitcast_convert_type(unit, jnp.int32)
        body = jnp.concatenate([scales, _bits.pack(code, bits)], axis=-1)
        return body, _values.error_of(values, decoded)

    def dequantize(code: jax.Array, unit: jax.Array, dtype) -> jax.Array:
        length = code.shape[-1]
        level = _values.in_blocks((code - levels).astype(jnp.float32), bucket)
        numbers = _values.with_range_of(level * unit[..., None], dtype)
        numbers = _values.in_one_run(numbers)[..., :length]
        return jnp.where(code == 2 * levels + 1, jnp.asarray(jnp.nan, dtype), numbers)

    def encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
        body, error = quantize(coo.values, coo.indices, seed)
        sent = coo.indices < coo.size
        message = jnp.concatenate([coo.indices, body], axis=-1)
        return Encoded(message, sent, jnp.where(sent, error, 0))

    def decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
        slots = _sizes.slots_of(message.shape[-1], lambda c: _sizes.qsgd_pairs(c, bits, bucket))
        values = decode_dense(message[..., slots:], slots, dtype)
        return PaddedCOO(values, message[..., :slots], size)

    def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
        return quantize(values, position, seed)

    def decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
        split = _sizes.block_scales(length, bucket)
        unit = lax.bitcast_convert_type(message[..., :split], jnp.float32)
        return dequantize(_bits.unpack(message[..., split:], bits)[..., :length], unit, dtype)

    spec = Spec.of("qsgd", bits=bits, bucket=bucket, norm=norm)
    return Codec(encode, decode, encode_dense, decode_dense, exact=False, spec=spec)


def _scale(numbers: jax.Array, norm: str) -> jax.Array:
    """One number for each bucket of ``f32[..., b, bucket]``, not below any number in it."""
    largest = jnp.max(numbers, axis=-1)
    if norm == "max":
        return largest
    # Relative to the largest number, because its square may be out of range.
    share = numbers / jnp.where(largest > 0, largest, 1.0)[..., None]
    length = jnp.maximum(jnp.sqrt(jnp.sum(share * share, axis=-1)), 1.0)
    return jnp.minimum(largest * length, jnp.finfo(jnp.float32).max)
