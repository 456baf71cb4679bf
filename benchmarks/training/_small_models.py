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


Shape = tuple[int, ...]


class Network(NamedTuple):
    """A network: ``init(seed)`` makes parameters, ``apply(params, inputs)`` f32[..., classes]."""

    init: Callable[[int], Any]
    apply: Callable[[Any, jax.Array], jax.Array]


def loss_of(network: Network) -> Callable[[Any, tuple[jax.Array, jax.Array]], jax.Array]:
    """The mean cross-entropy of a batch, ``loss(params, (inputs, labels))``."""

    def loss(params, batch):
        logits = network.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss


def one_hidden_layer(shape: Shape, classes: int, hidden: int) -> Network:
    """A network on images of the shape (height, width)."""

    def init(seed):
        random = np.random.default_rng(seed)
        return {
            "hidden": _layer(random, int(np.prod(shape)), hidden),
            "output": _layer(random, hidden, classes),
        }

    def apply(params, images):
        x = jax.nn.relu(affine(params["hidden"], images.reshape(images.shape[0], -1)))
        return affine(params["output"], x)

    return Network(init, apply)


def convolutional(
    shape: Shape, classes: int, channels: Shape = CHANNELS, dense=DENSE, pooled: Shape = (0, 1)
) -> Network:
    """Convolutions of 3x3, each in ``pooled`` followed by a maximum of 2x2, and a hidden layer."""

    def init(seed):
        random, inputs, params = np.random.default_rng(seed), 1, {}
        for i, outputs in enumerate(channels):
            params[f"conv_{i}"] = _layer(random, 9 * inputs, outputs)
            inputs = outputs
        flat = inputs * int(np.prod([size // 2 ** len(pooled) for size in shape]))
        params["dense"] = _layer(random, flat, dense)
        params["output"] = _layer(random, dense, classes)
        return params

    def apply(params, images):
        x = images[..., None]
        for i, _ in enumerate(channels):
            x = jax.nn.relu(affine(params[f"conv_{i}"], _patches(x)))
            x = _halved(x) if i in pooled else x
        x = jax.nn.relu(affine(params["dense"], x.reshape(x.shape[0], -1)))
        return affine(params["output"], x)

    return Network(init, apply)


def transformer(vocabulary: int, width: int = WIDTH) -> Network:
    """A decoder with the norm before each part, and learned positions."""

    def init(seed):
        random = np.random.default_rng(seed)
        norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        # Layers that add to the residual stream start smaller, the more of them there are.
        small = (4 * BLOCKS) ** -0.5
        return {
            "embedding": normal(random, (vocabulary, width), 0.1),
            "position": normal(random, (CONTEXT, width), 0.1),
            "blocks": [
                {
                    "norm_0": norm,
                    "qkv": _layer(random, width, 3 * width, 0.7),
                    "mix": _layer(random, width, width, small),
                    "norm_1": norm,
                    "up": _layer(random, width, 4 * width),
                    "down": _layer(random, 4 * width, width, small),
                }
                for _ in range(BLOCKS)
            ],
            "norm": norm,
            "output": _layer(random, width, vocabulary, 0.7),
        }

    def apply(params, tokens):
        x = params["embedding"][tokens] + params["position"][: tokens.shape[1]]
        for block in params["blocks"]:
            heads = affine(block["qkv"], _normed(block["norm_0"], x))
            heads = heads.reshape(*x.shape[:2], HEADS, 3, width // HEADS)
            mixed = jax.nn.dot_product_attention(
                *(heads[..., i, :] for i in range(3)), is_causal=True
            )
            x = x + affine(block["mix"], mixed.reshape(x.shape))
            inner = jax.nn.gelu(affine(block["up"], _normed(block["norm_1"], x)))
            x = x + affine(block["down"], inner)
        return affine(params["output"], _normed(params["norm"], x))

    return Network(init, apply)


def normal(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Normal entries with a mean of 0."""
    return jnp.asarray(random.normal(0, scale, shape), jnp.float32)


def layer(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> dict[str, Any]:
    """A kernel, and a bias of zeros."""
    return {"kernel": normal(random, shape, scale), "bias": jnp.zeros(shape[-1])}


def _layer(random: np.random.Generator, inputs: int, outputs: int, gain: float = 1.0) -> Any:
    return layer(random, (inputs, outputs), gain * (2 / inputs) ** 0.5)


def affine(layer: Any, x: jax.Array) -> jax.Array:
    """``x`` through a layer."""
    return x @ layer["kernel"] + layer["bias"]


def recurrence(gates: jax.Array, recurrent: jax.Array, unroll: int = 1) -> jax.Array:
    """An LSTM: maps inputs of the gates, f32[time, batch, 4 cells], to f32[..., cells]."""

    def step(carry, gates):
        hidden, cell = carry
        gates = gates + hidden @ recurrent
        enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zero = jnp.zeros((gates.shape[1], recurrent.shape[0]))
    return lax.scan(step, (zero, zero), gates, unroll=unroll)[1]


def forgetful(cells: int) -> jax.Array:
    """The bias of an LSTM, which begins at 1 for the forget gates, as is usual."""
    return jnp.zeros(4 * cells).at[cells : 2 * cells].set(1.0)


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
    x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
    x = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])
