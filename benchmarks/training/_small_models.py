"""Three small networks in plain JAX, and their loss.

A network of one hidden layer and a convolutional one on images, a decoder transformer on
characters. A convolution is written as a product of matrices, with the patches of the image.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

CHANNELS, DENSE = (16, 32), 96
WIDTH, HEADS, BLOCKS, CONTEXT = 32, 4, 2, 64


class Network(NamedTuple):
    """A network.

    Attributes:
      init: ``init(seed) -> params``.
      apply: ``apply(params, inputs) -> logits``, f32[..., classes].
    """

    init: Callable[[int], Any]
    apply: Callable[[Any, jax.Array], jax.Array]


def loss_of(network: Network) -> Callable[[Any, tuple[jax.Array, jax.Array]], jax.Array]:
    """The mean cross-entropy of a batch, ``loss(params, (inputs, labels))``."""

    def loss(params, batch):
        logits = network.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss


def one_hidden_layer(shape: tuple[int, ...], classes: int, hidden: int) -> Network:
    """For images of the shape, (height, width)."""

    def init(seed):
        random = np.random.default_rng(seed)
        return {
            "hidden": _layer(random, int(np.prod(shape)), hidden),
            "output": _layer(random, hidden, classes),
        }

    def apply(params, images):
        x = jax.nn.relu(_affine(params["hidden"], images.reshape(images.shape[0], -1)))
        return _affine(params["output"], x)

    return Network(init, apply)


def convolutional(shape: tuple[int, ...], classes: int) -> Network:
    """Two convolutions of 3x3, a maximum of 2x2 behind each, a hidden layer."""

    def init(seed):
        random, inputs, params = np.random.default_rng(seed), 1, {}
        for i, outputs in enumerate(CHANNELS):
            params[f"conv_{i}"] = _layer(random, 9 * inputs, outputs)
            inputs = outputs
        flat = inputs * int(np.prod([size // 2 ** len(CHANNELS) for size in shape]))
        params["dense"] = _layer(random, flat, DENSE)
        params["output"] = _layer(random, DENSE, classes)
        return params

    def apply(params, images):
        x = images[..., None]
        for i in range(len(CHANNELS)):
            x = _halved(jax.nn.relu(_affine(params[f"conv_{i}"], _patches(x))))
        x = jax.nn.relu(_affine(params["dense"], x.reshape(x.shape[0], -1)))
        return _affine(params["output"], x)

    return Network(init, apply)


def transformer(vocabulary: int, width: int = WIDTH) -> Network:
    """A decoder with the norm before each part, and learned positions."""

    def init(seed):
        random = np.random.default_rng(seed)

        def norm():
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        def table(rows):
            return jnp.asarray(random.normal(0, 0.1, (rows, width)), jnp.float32)

        # What is added to the stream starts smaller, the more is added.
        small = (4 * BLOCKS) ** -0.5
        return {
            "embedding": table(vocabulary),
            "position": table(CONTEXT),
            "blocks": [
                {
                    "norm_0": norm(),
                    "qkv": _layer(random, width, 3 * width, 0.7),
                    "mix": _layer(random, width, width, small),
                    "norm_1": norm(),
                    "up": _layer(random, width, 4 * width),
                    "down": _layer(random, 4 * width, width, small),
                }
                for _ in range(BLOCKS)
            ],
            "norm": norm(),
            "output": _layer(random, width, vocabulary, 0.7),
        }

    def apply(params, tokens):
        x = params["embedding"][tokens] + params["position"][: tokens.shape[1]]
        for block in params["blocks"]:
            heads = _affine(block["qkv"], _normed(block["norm_0"], x))
            heads = heads.reshape(*x.shape[:2], HEADS, 3, width // HEADS)
            mixed = jax.nn.dot_product_attention(
                *(heads[..., i, :] for i in range(3)), is_causal=True
            )
            x = x + _affine(block["mix"], mixed.reshape(x.shape))
            inner = jax.nn.gelu(_affine(block["up"], _normed(block["norm_1"], x)))
            x = x + _affine(block["down"], inner)
        return _affine(params["output"], _normed(params["norm"], x))

    return Network(init, apply)


def _layer(random: np.random.Generator, inputs: int, outputs: int, gain: float = 1.0) -> Any:
    scale = gain * (2 / inputs) ** 0.5
    kernel = jnp.asarray(random.normal(0, scale, (inputs, outputs)), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _affine(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _normed(layer: Any, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * layer["scale"] + layer["bias"]


def _patches(x: jax.Array) -> jax.Array:
    """Maps [batch, height, width, c] to the 3x3 around each place, [batch, height, width, 9 c]."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], -1
    )


def _halved(x: jax.Array) -> jax.Array:
    """The maximum of each 2x2; an odd last row or column is left out."""
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x = x[:, :height, :width]
    return jnp.maximum(
        jnp.maximum(x[:, ::2, ::2], x[:, 1::2, ::2]),
        jnp.maximum(x[:, ::2, 1::2], x[:, 1::2, 1::2]),
    )
