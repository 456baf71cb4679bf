"""A small transformer in flax nnx, whose parameters have logical axes for sharding."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# The mesh axis of each kind of dimension, if any. Tensor parallelism splits dimensions inside
# layers, FSDP those that lead from layer to layer.
RULES = {
    "tensor": {"vocabulary": "tensor", "hidden": "tensor", "heads": "tensor"},
    "fsdp": {"model": "fsdp"},
    "both": {"vocabulary": "tensor", "hidden": "tensor", "heads": "tensor", "model": "fsdp"},
}
KINDS = ("vocabulary", "model", "heads", "hidden")


def _dense(inputs: int, outputs: int, axes: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Table(nnx.Module):
    """A vector for each character, or position.

    It is a product instead of a lookup: XLA's partitioner ends the process at a gather from a
    sharded table in a mapped function that leaves two or more axes to it.
    """

    def __init__(self, rows: int, width: int, axes: tuple[str | None, str], rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), axes)
        self.rows = nnx.Param(init(rngs.params(), (rows, width), jnp.float32))

    def __call__(self, index: jax.Array) -> jax.Array:
        """Maps ``i32[...]`` to ``f32[..., width]``."""
        table = self.rows[...]
        return jax.nn.one_hot(index, table.shape[0]) @ table


class Block(nnx.Module):
    """Attention and a perceptron, each with a layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.queries = _dense(width, width, ("model", "heads"), rngs)
        self.keys = _dense(width, width, ("model", "heads"), rngs)
        self.values = _dense(width, width, ("model", "heads"), rngs)
        self.join = _dense(width, width, ("heads", "model"), rngs)
        self.up = _dense(width, 4 * width, ("model", "hidden"), rngs)
        self.down = _dense(4 * width, width, ("hidden", "model"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``f32[batch, time, width]`` to the same."""
        y = self.norms[0](x)
        split = (*y.shape[:2], self.heads, -1)
        q, k, v = (layer(y).reshape(split) for layer in (self.queries, self.keys, self.values))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.reshape(y.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class LanguageModel(nnx.Module):
    """Logits of the next character."""

    def __init__(self, characters: int, width: int, layers: int, length: int, rngs: nnx.Rngs):
        self.characters = Table(characters, width, ("vocabulary", "model"), rngs)
        self.places = Table(length, width, (None, "model"), rngs)
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = _dense(width, characters, ("model", "vocabulary"), rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Maps ``i32[batch, time]`` to ``f32[batch, time, characters]``."""
        x = self.characters(text) + self.places(jnp.arange(text.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded_model(mesh: jax.sharding.Mesh, layout: str, seed: int, **sizes: int) -> Any:
    """``(graphdef, params)``; the parameters are made where the rules of the layout place them."""
    return _split_model(mesh, RULES[layout], seed, sizes)


def whole_model(mesh: jax.sharding.Mesh, seed: int, **sizes: int) -> Any:
    """``(graphdef, params)``; every device has all of the parameters."""
    return _split_model(mesh, {}, seed, sizes)


def _split_model(mesh: jax.sharding.Mesh, rules: dict[str, str], seed: int, sizes: Any) -> Any:
    with jax.set_mesh(mesh), nnx.logical_axis_rules([(kind, rules.get(kind)) for kind in KINDS]):
        model = LanguageModel(**sizes, rngs=nnx.Rngs(seed))
    return nnx.split(model)
