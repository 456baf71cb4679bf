"""The contestants: names for the command line, and what they are."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_ext
from sparse_collectives import allreduce, select, wire

AXIS = "workers"
BASELINE = "dense"
# Of one worker alone this does nothing but apply the update.
REST = "dense/leaves"


def _ok_topk(codec: str = "raw", reuse: bool = False, **options: Any):
    def make(density: float) -> optax.GradientTransformation:
        selector = select.threshold_reuse(density=density) if reuse else None
        return optax_ext.ok_topk(
            density=density, axis=AXIS, selector=selector, codec=getattr(wire, codec)(), **options
        )

    return make


def _agreed(bits: int | str):
    def make(density: float) -> optax.GradientTransformation:
        selector, exchange = select.topk(density=density), allreduce.agreed(bits=bits)
        return optax_ext.sparse_allreduce(selector, exchange, axis=AXIS)

    return make


def _sparse_adamw(density: float) -> optax.GradientTransformation:
    # Five times the entries in the words of Ok-Topk.
    return optax_ext.sparse_adamw(1e-3, density=min(1.0, 5 * density), axis=AXIS, weight_decay=0.01)


def _sparse_sgd(density: float) -> optax.GradientTransformation:
    return optax_ext.sparse_sgd(1e-3, min(1.0, 5 * density), axis=AXIS)


def _powersgd(rank: int):
    def make(density: float) -> optax.GradientTransformation:
        del density
        return optax_ext.powersgd(rank, axis=AXIS)

    return make


def _half(density: float) -> optax.GradientTransformation:
    """Sums of float16, as PyTorch's `fp16_compress_hook` has them."""

    def cast(dtype):
        return optax.stateless(lambda g, p: jax.tree.map(lambda x: x.astype(dtype), g))

    return optax.chain(cast(jnp.float16), _dense(density), cast(jnp.float32))


def _acp_sgd(density: float) -> optax.GradientTransformation:
    del density
    return optax_ext.acp_sgd(1, axis=AXIS)


def _dense(density: float) -> optax.GradientTransformation:
    del density
    return optax_ext.dense(axis=AXIS, buckets=1)


# Whole optimizers, whose gradients are taken a step ahead.
WHOLE = ("sparse_adamw", "sparse_sgd")

# Those whose parameters come to differ between the workers.
ALONE = ("alone/adamw",)

# Each makes a transformation from a density.
JAX = {
    # One allreduce of everything: the strongest dense one where messages have a latency.
    "dense": _dense,
    "dense/adamw": _dense,
    "dense16/adamw": _half,
    # Nothing is exchanged: what is left of a step whose exchange costs nothing.
    "alone/adamw": lambda density: optax.identity(),
    "dense/leaves": lambda density: optax_ext.dense(axis=AXIS),
    "ok_topk": _ok_topk(),
    "ok_topk/rotation": _ok_topk(schedule="rotation"),
    "ok_topk/narrow16": _ok_topk("narrow16"),
    "ok_topk/narrow8": _ok_topk("narrow8"),
    "ok_topk/reuse": _ok_topk(reuse=True),
    "ok_topk/reuse/narrow16": _ok_topk("narrow16", reuse=True),
    "ok_topk/reuse/narrow8": _ok_topk("narrow8", reuse=True),
    "ok_topk/reuse/global32": _ok_topk(reuse=True, global_period=32),
    "agreed": _agreed(32),
    "agreed/few": _agreed("few"),
    "sparse_adamw": _sparse_adamw,
    "sparse_sgd": _sparse_sgd,
    "powersgd1": _powersgd(1),
    "powersgd1/adamw": _powersgd(1),
    "powersgd4/adamw": _powersgd(4),
    "acp_sgd1": _acp_sgd,
    "topk_a": lambda density: optax_ext.topk_a(density, axis=AXIS),
    "topk_dsa": lambda density: optax_ext.topk_dsa(density, axis=AXIS),
    "gtopk": lambda density: optax_ext.gtopk(density, axis=AXIS),
}


def behind(method: str) -> optax.GradientTransformation:
    """What makes updates of the means: plain SGD, so that little but the exchange is timed."""
    if method in WHOLE:
        return optax.identity()
    if method.endswith("/adamw"):
        return optax.adamw(1e-3, weight_decay=0.01)
    return optax.sgd(1e-3)


# Hooks of DistributedDataParallel; see `_torch_worker`.
TORCH = ("ddp", "ddp/fp16", "ddp/powersgd1", "ddp/powersgd4")

QUICK = ("dense", "ok_topk", "ok_topk/reuse/narrow8", "topk_a")
