"""The ways to train that are compared over real links, each as a function of the rate."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_ext
from sparse_collectives import select

from ._contestants import DECAY, DENSE, DENSITY
from ._neighbours import Option, arguments, name_of

AXIS = "workers"
Make = Callable[[optax.Schedule], optax.GradientTransformation]
_LOW_RANK = {"powersgd": optax_ext.powersgd, "acp_sgd": optax_ext.acp_sgd}
_RANKS = (1, 2, 4)
NOTHING = "nothing exchanged"
# The hooks of DistributedDataParallel in front of PyTorch's AdamW; see `_torch_trainer`.
TORCH = {
    "PyTorch, dense": "",
    "PyTorch, float16": "fp16",
    **{f"PyTorch, PowerSGD({rank})": f"powersgd{rank}" for rank in _RANKS},
}


def contestants() -> dict[str, Make]:
    """By name, the dense one first."""
    made: dict[str, Make] = {
        # One allreduce of everything: the strongest dense one where messages have a latency.
        DENSE: before_adamw(optax_ext.dense(axis=AXIS, buckets=1)),
        "dense, float16": before_adamw(half(optax_ext.dense(axis=AXIS, buckets=1))),
        "sparse_adamw": neighbour([])[1],
        "ok_topk before AdamW": before_adamw(
            optax_ext.ok_topk(DENSITY, axis=AXIS, selector=select.threshold_reuse(density=DENSITY))
        ),
    }
    for (name, low_rank), rank in itertools.product(_LOW_RANK.items(), _RANKS):
        made[f"{name}({rank}) before AdamW"] = before_adamw(low_rank(rank, axis=AXIS))
    return made


def in_buckets() -> dict[str, Make]:
    """Exchanges that may begin before the gradient is whole, beside those that may not."""
    sparse = optax_ext.ok_topk(DENSITY, axis=AXIS, selector=select.threshold_reuse(density=DENSITY))
    return {
        DENSE: before_adamw(optax_ext.dense(axis=AXIS, buckets=1)),
        NOTHING: before_adamw(_of_sums(optax_ext.dense(axis=AXIS, buckets=1))),
        **{
            f"dense, {count} buckets": before_adamw(optax_ext.dense(axis=AXIS, buckets=count))
            for count in (2, 4, 8)
        },
        "dense, each leaf": before_adamw(optax_ext.dense(axis=AXIS)),
        "ok_topk": before_adamw(sparse),
        **{
            f"ok_topk, {count} buckets": before_adamw(optax_ext.bucketed(sparse, count))
            for count in (2, 4)
        },
    }


def with_norms() -> dict[str, Make]:
    """LAMB behind a dense exchange, by who computes the norms of the layers."""
    ratios = {
        "lamb, every worker": optax.scale_by_trust_ratio(),
        "lamb, slices": optax_ext.scale_by_trust_ratio(axis=AXIS),
        "lamb, layers": optax.stateless(_by_layers),
    }

    def made(ratio: optax.GradientTransformation) -> Make:
        return lambda rate: optax.chain(
            optax_ext.dense(axis=AXIS, buckets=1),
            optax.scale_by_adam(),
            optax.add_decayed_weights(DECAY),
            ratio,
            optax.scale_by_learning_rate(rate),
        )

    return {name: made(ratio) for name, ratio in ratios.items()}


def _by_layers(updates: Any, params: Any) -> Any:
    """The trust ratio of each layer from one worker."""

    def ratio(update: jax.Array, weights: jax.Array) -> jax.Array:
        norms = jnp.linalg.norm(weights), jnp.linalg.norm(update)
        return jnp.where((norms[0] == 0) | (norms[1] == 0), 1.0, norms[0] / norms[1])

    ratios = optax_ext.partition(ratio, axis=AXIS)(updates, params)
    return jax.tree.map(lambda x, scale: x * scale, updates, ratios)


def _of_sums(exchange: optax.GradientTransformation) -> optax.GradientTransformation:
    """All of the gradients is computed, and of each leaf one number exchanged."""

    def init(params: Any) -> Any:
        return exchange.init(jax.tree.map(jnp.sum, params))

    def update(tree: Any, state: Any, params: Any = None):
        del params
        sums, state = exchange.update(jax.tree.map(jnp.sum, tree), state)
        return jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), sums, tree), state

    return optax.GradientTransformation(init, update)


def neighbour(given: Sequence[Option]) -> tuple[str, Make]:
    """``sparse_adamw`` with options, and its name.

    Raises:
      ValueError: there is no such option, or the value is none for it.
    """
    make = optax_ext.sparse_adamw
    made: dict[str, Any] = {"axis": AXIS, "weight_decay": DECAY, **arguments(make, given)}
    make(0.1, **made)
    return name_of(make, given), lambda rate: make(rate, **made)


def before_adamw(exchange: optax.GradientTransformation) -> Make:
    """An exchange of gradients in front of optax's AdamW."""
    return lambda rate: optax.chain(exchange, optax.adamw(rate, weight_decay=DECAY))


def half(exchange: optax.GradientTransformation) -> optax.GradientTransformation:
    """An exchange of float16, as DDP's `fp16_compress_hook` does it.

    (XLA makes bfloat16 wider before it adds up on a CPU, so that nothing would be saved.)
    """
    return optax.chain(_cast(jnp.float16), exchange, _cast(jnp.float32))


def _cast(dtype: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda tree, _: jax.tree.map(lambda x: x.astype(dtype), tree))
