"""The ways to train over simulated workers, each as a function of the rate and length of a run."""

from collections.abc import Callable
from typing import Any

import optax

from .._common.contestants import DECAY, Contestant, find
from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Variant, exact_top_k
from ._tasks import ADAMW, KINDS

DENSE = "dense"
# What the sparse ones are measured by: the words of ``ok_topk`` at 1 %.
DENSITY = 0.01
Train = Callable[[float, int], Variant]
# Which contestant each is, the dense one first.
_ADAMW = {
    DENSE: "dense/leaves",
    "ok_topk before AdamW": "ok_topk",
    "sparse_adamw": "sparse_adamw",
    "sparse_adamw, 32 bits": "sparse_adamw, 32 bits",
    "sparse_adamw, ok_topk": "sparse_adamw, ok_topk",
    "sparse_adamw, complete ok_topk": "sparse_adamw, complete ok_topk",
    "sparse_adamw, delayed": "sparse_adamw, delayed",
    "dense, delayed": "delayed(dense)",
    "sparse_adamw, no step-ahead": "sparse_adamw, no step-ahead",
    **{f"powersgd({rank}) before AdamW": f"powersgd{rank}" for rank in (1, 2, 4)},
    "acp_sgd(4) before AdamW": "acp_sgd4",
}
_SGD = {DENSE: "dense/leaves", "ok_topk before SGD": "ok_topk"}
_SGD |= {name: name for name in ("ok_topk_sgd", "sparse_sgd", "sparse_sgd, ok_topk")}


def contestants(task: str, share: float = 1.0) -> dict[str, Train]:
    """By name; every density is multiplied by the share."""
    with_adamw = KINDS[task].optimizer == ADAMW
    names, behind = (_ADAMW, _adamw) if with_adamw else (_SGD, _sgd)
    return {name: _train(find(key), share * DENSITY, behind) for name, key in names.items()}


def whole(make: Callable[..., Any], density: float) -> Train:
    """An optimizer of this library, made from a rate, a density and more."""

    def variant(rate: float, steps: int) -> Variant:
        given = {"density": density, "axis": AXIS, "selector": exact_top_k(density)}
        return Variant(make(schedule(rate, steps), **given), optax.identity())

    return variant


def _train(contestant: Contestant, k: float, behind: Callable[..., Any]) -> Train:
    density = contestant.entries * k

    def variant(rate: float, steps: int) -> Variant:
        at, selector = schedule(rate, steps), exact_top_k(density)
        made = contestant.make(density, AXIS, rate=at, selector=selector)
        return Variant(made, optax.identity() if contestant.whole else behind(at))

    return variant


def _adamw(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY)


def _sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=MOMENTUM)
