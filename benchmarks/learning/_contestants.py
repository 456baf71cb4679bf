"""The ways to train that are compared, each as a function of the rate and the length of a run."""

from collections.abc import Callable
from typing import Any

import optax

import optax_ext
import sparse_collectives as sc

from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Variant, exact_top_k
from ._tasks import ADAMW, KINDS

DENSE = "dense"
# What the sparse ones are measured by: the words of ``ok_topk`` at 1 %.
DENSITY = 0.01
DECAY = 0.01
Contestant = Callable[[float, int], Variant]


def contestants(task: str, share: float = 1.0) -> dict[str, Contestant]:
    """By name, the dense one first.

    Args:
      task: a key of KINDS, which says with which optimizer.
      share: every density is multiplied by it.
    """
    return _with_adamw(share) if KINDS[task].optimizer == ADAMW else _with_sgd(share)


def whole(make: Callable[..., Any], density: float, **options: Any) -> Contestant:
    """An optimizer of this library that is given a rate and a density."""

    def variant(rate: float, steps: int) -> Variant:
        given = dict(options)
        if make is optax_ext.sparse_adamw:
            given = {"weight_decay": DECAY, **given}
        tx = make(
            schedule(rate, steps),
            density=density,
            axis=AXIS,
            selector=exact_top_k(density),
            **given,
        )
        return Variant(tx, optax.identity())

    return variant


def in_front(density: float, optimizer: Callable[[optax.Schedule], Any]) -> Contestant:
    """``ok_topk`` in front of an optimizer of optax."""

    def variant(rate: float, steps: int) -> Variant:
        sparse = optax_ext.ok_topk(density, axis=AXIS, selector=exact_top_k(density))
        return Variant(sparse, optimizer(schedule(rate, steps)))

    return variant


def late(contestant: Contestant) -> Contestant:
    """The same on the gradients of the step before."""

    def variant(rate: float, steps: int) -> Variant:
        made = contestant(rate, steps)
        return made._replace(exchange=optax_ext.delayed(made.exchange))

    return variant


def low_rank(make: Callable[..., Any], rank: int) -> Contestant:
    """PowerSGD or ACP-SGD in front of AdamW."""

    def variant(rate: float, steps: int) -> Variant:
        return Variant(make(rank, axis=AXIS), _adamw(schedule(rate, steps)))

    return variant


def dense(optimizer: Callable[[optax.Schedule], Any]) -> Contestant:
    """All entries at every step."""

    def variant(rate: float, steps: int) -> Variant:
        return Variant(optax_ext.dense(axis=AXIS), optimizer(schedule(rate, steps)))

    return variant


def _adamw(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY)


def _sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=MOMENTUM)


def _with_adamw(share: float) -> dict[str, Contestant]:
    adamw, k = optax_ext.sparse_adamw, share * DENSITY
    ok_topk = sc.allreduce.ok_topk(density=k)
    return {
        DENSE: dense(_adamw),
        "ok_topk before AdamW": in_front(k, _adamw),
        "sparse_adamw": whole(adamw, 5 * k),
        "sparse_adamw, 32 bits": whole(adamw, 5 / 3 * k, exchange=sc.allreduce.agreed()),
        "sparse_adamw, ok_topk": whole(adamw, k, exchange=ok_topk),
        "sparse_adamw, complete ok_topk": whole(adamw, k, exchange=sc.allreduce.complete(ok_topk)),
        "sparse_adamw, delayed": late(whole(adamw, 5 * k)),
        "dense, delayed": late(dense(_adamw)),
        "sparse_adamw, no step-ahead": whole(adamw, 5 * k, residual=optax_ext.residual()),
        **{f"powersgd({r}) before AdamW": low_rank(optax_ext.powersgd, r) for r in (1, 2, 4)},
        "acp_sgd(4) before AdamW": low_rank(optax_ext.acp_sgd, 4),
    }


def _with_sgd(share: float) -> dict[str, Contestant]:
    sgd, k = optax_ext.sparse_sgd, share * DENSITY
    return {
        DENSE: dense(_sgd),
        "ok_topk before SGD": in_front(k, _sgd),
        "ok_topk_sgd": whole(optax_ext.ok_topk_sgd, k),
        "sparse_sgd": whole(sgd, 5 * k),
        "sparse_sgd, ok_topk": whole(sgd, k, exchange=sc.allreduce.ok_topk(density=k)),
    }
