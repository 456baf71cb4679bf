"""What is done for the accuracy at a low density, such as by DGC: tricks, each alone and together.

Each is in front of the optimizer of its task. Momentum is behind the exchange where it is not in
the correction. ``topk_a`` is top-k with error feedback: everything that is selected is delivered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import optax

import optax_ext
from sparse_collectives import select

from .._common.contestants import DECAY
from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Variant, exact_top_k

# DGC starts with 25 %. All messages have the slots of the first stage, so that one is left out.
STAGES = (0.0625, 0.015625, 0.004)
# The largest norm of a worker's gradient, where it is clipped.
NORM = 4.0
_MASKED = "correction, masking"
# In front of SGD with momentum, at a density so low that an entry waits for many steps;
DELAYED = [
    "topk_a",
    *(f"topk_a, {trick}" for trick in ("no momentum", "correction", _MASKED, "clipping")),
    *(f"topk_a, {warm_up} warm-up" for warm_up in ("dense", "density")),
    *(f"topk_a, {_MASKED}, {t}" for t in ("clipping", "dense warm-up", "density warm-up")),
    *(f"topk_a, {_MASKED}, clipping, {warm_up} warm-up" for warm_up in ("dense", "density")),
]
# and what Ok-Topk has.
SGD = ["ok_topk, dense warm-up", "ok_topk, correction"]
ADAMW = ["ok_topk, dense warm-up, small leaves dense"]


def variant(name: str, density: float, adamw: bool) -> Callable[[float, int], Variant]:
    """The way to train of that name: an allreduce, and the tricks that are added to it."""
    allreduce, *tricks = name.split(", ")

    def made(rate: float, steps: int) -> Variant:
        given = {"axis": AXIS} | _options(tricks, density, steps)
        tx = getattr(optax_ext, allreduce)(density, **given)
        if "clipping" in tricks:
            tx = optax.chain(optax_ext.local_clip_by_global_norm(NORM, axis=AXIS), tx)
        if adamw:
            return Variant(tx, optax.adamw(schedule(rate, steps), weight_decay=DECAY))
        behind = not {"correction", "no momentum"} & set(tricks)
        # Without momentum the same distance takes a rate larger by what momentum sums up.
        peak = rate / (1 - MOMENTUM) if "no momentum" in tricks else rate
        momentum = MOMENTUM if behind else None
        return Variant(tx, optax.sgd(schedule(peak, steps), momentum=momentum))

    return made


def _options(tricks: Sequence[str], density: float, steps: int) -> dict[str, Any]:
    """Those of an allreduce, for a run of so many steps."""
    given: dict[str, Any] = {"selector": exact_top_k(density)}
    if "correction" in tricks:
        masking = "masking" in tricks
        given["correction"] = optax_ext.momentum_correction(MOMENTUM, masking=masking)
    if "density warm-up" in tricks:
        stages = [*(stage for stage in STAGES if stage > density), density]
        staged = select.staged_density(max(1, steps // 20), stages)
        given["selector"] = select.scheduled(exact_top_k(stages[0]), staged)
    if "dense warm-up" in tricks:
        given["dense_steps"] = max(1, steps // 10)
    if "small leaves dense" in tricks:
        given["dense_leaves"] = optax_ext.small_leaves()
    return given
