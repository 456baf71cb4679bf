"""Optimizers of optax, and what exchanges gradients or updates for them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import optax_ext

from ..training._simulated_training import AXIS, exact_top_k

DECAY, DENSITY = 1e-4, 0.05
Make = Callable[[optax.Schedule], optax.GradientTransformation]
DENSE = "dense"


class Optimizer(NamedTuple):
    """An optimizer, its usual learning rate, and its scaling for ``sparse_optimizer``.

    ``averaged`` is of an optimizer that averages parameters instead of lowering its learning rate:
    those to evaluate, of those in training and the states of exchange and optimizer.
    """

    make: Make
    rate: float
    scaling: Callable[[], Any] | None = None
    averaged: Callable[[Any, Any, Any], Any] | None = None


def _rms() -> optax.GradientTransformation:
    return optax.scale_by_rms(0.999, eps_in_sqrt=False, bias_correction=True)


def _schedule_free(rate: optax.Schedule) -> optax.GradientTransformation:
    decay, scale = optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate)
    return optax.contrib.schedule_free(optax.chain(_rms(), decay, scale), rate)


def _average(params: Any, exchange: Any, optimizer: Any) -> Any:
    if isinstance(exchange, optax.contrib.ScheduleFreeState):
        optimizer = jax.tree.map(lambda x: x[0], exchange)
    return optax.contrib.schedule_free_eval_params(optimizer, params)


# Only matrices of at least this width are factored, which the small models have.
_FACTORED = 16
OPTIMIZERS = {
    "adam": Optimizer(lambda rate: optax.adamw(rate, weight_decay=DECAY), 0.01),
    "nadam": Optimizer(lambda rate: optax.nadamw(rate, weight_decay=DECAY), 0.01),
    "adabelief": Optimizer(optax.adabelief, 0.01),
    "adafactor": Optimizer(
        lambda rate: optax.adafactor(
            rate, min_dim_size_to_factor=_FACTORED, multiply_by_parameter_scale=False
        ),
        0.01,
        lambda: optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=_FACTORED),
            optax.clip_by_block_rms(1.0),
        ),
    ),
    "yogi": Optimizer(optax.yogi, 0.01, lambda: optax.scale_by_yogi(b1=0.0)),
    "lamb": Optimizer(optax.lamb, 0.02),
    "lion": Optimizer(optax.lion, 0.004),
    "muon": Optimizer(optax.contrib.muon, 0.02),
    "momentum": Optimizer(lambda rate: optax.sgd(rate, momentum=0.9), 0.2),
    "schedule_free": Optimizer(_schedule_free, 0.02, _rms, _average),
}
OPTIMIZERS["adam"] = OPTIMIZERS["adam"]._replace(scaling=lambda: optax_ext.scale_by_local_adam())
INSIDE = "inside"
# Rounds of so many steps of the optimizer, with its momentum: a sparse exchange, and a dense one.
LENGTHS = (3, 10, 30)
ROUNDS = {f"every={steps}": steps for steps in LENGTHS}
DILOCO = {f"diloco({steps})": steps for steps in LENGTHS}
IN_ROUNDS = 0.5  # the density
EXCHANGES: dict[str, Callable[[], optax.GradientTransformation]] = {
    # One sum: a sum for each leaf takes twice as long between processes that share cores.
    DENSE: lambda: optax_ext.dense(axis=AXIS, buckets=1),
    "ok_topk(0.01)": lambda: optax_ext.ok_topk(0.01, axis=AXIS, selector=exact_top_k(0.01)),
    **{
        f"powersgd({rank})": functools.partial(optax_ext.powersgd, rank, axis=AXIS)
        for rank in (1, 2, 4, 8)
    },
    **{
        f"quantized({bits})": functools.partial(optax_ext.quantized, bits, axis=AXIS)
        for bits in ((1, 3), (2, 3), (2, 4), (3, 5))
    },
}


def transformations(
    name: str, exchange: str, at: optax.Schedule, selector: Callable[[float], Any] | None = None
) -> tuple[Any, Any]:
    """An exchange and the optimizer after it.

    Args:
      name: of an optimizer.
      exchange: before it; or the scaling of the optimizer in a sparse one, or rounds of it.
      at: learning rates.
      selector: of a density; None: the default of the library.
    """
    optimizer = OPTIMIZERS[name]
    if exchange in EXCHANGES:
        return EXCHANGES[exchange](), optimizer.make(at)
    if exchange in DILOCO:
        every = DILOCO[exchange]
        whole = optax_ext.published.diloco(
            optimizer.make(at), axis=AXIS, every=every, momentum=0.0, outer_rate=1.0
        )
        return whole, optax.identity()
    every, density = ROUNDS.get(exchange), DENSITY if exchange == INSIDE else IN_ROUNDS
    if every:
        scaling = optax.chain(optimizer.make(lambda count: 1.0), optax.scale(-1.0))
    else:
        assert optimizer.scaling is not None
        scaling = optimizer.scaling()
    chosen = selector(density) if selector else None
    whole = optax_ext.sparse_optimizer(
        scaling, at, density=density, axis=AXIS, every=every, selector=chosen
    )
    if optimizer.averaged:
        whole = optax.contrib.schedule_free(whole, at)
    return whole, optax.identity()
