"""Thresholds around a change of the scale of the gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import select

from ._code import Points

SIZE, DENSITY = 20_000, 0.01
# tau' of the paper's vision model; the scale changes in the eighth step of a period.
PERIOD, SHIFT, STEPS = 32, 5 * 32 + 8, 260
# The text's rule, the rule of the program that the paper links to, and the default here.
SERVOS = {"text": False, "corrected": "fixed", "ours": True}
# Steps after the shift in which a threshold of before is in use.
REST = PERIOD - SHIFT % PERIOD


@functools.lru_cache(maxsize=8)
def counts(rule: str, factor: float, seed: int) -> np.ndarray:
    """Selected entries over k at each step, of one worker with error feedback."""
    selector = select.threshold_reuse(
        density=DENSITY, period=PERIOD, servo=SERVOS[rule], headroom=float("inf")
    )
    choose = jax.jit(selector.select)
    state, random = selector.init(SIZE), np.random.default_rng(seed)
    residual, found = np.zeros(SIZE, np.float32), []
    for step in range(STEPS):
        gradient = random.standard_t(4, SIZE).astype(np.float32)
        accumulated = residual + gradient * np.float32(factor if step >= SHIFT else 1)
        chosen, state, info = choose(jnp.asarray(accumulated), state)
        found.append(int(info.selected + info.overflow))
        indices = np.asarray(chosen.indices)
        residual = accumulated
        residual[indices[indices < SIZE]] = 0
    return np.asarray(found) / round(SIZE * DENSITY)


def _entries(factor: float, seed: int, quick: bool) -> dict[str, float]:
    """The means of the rest of the period in which the scale changes."""
    del quick
    during = slice(SHIFT, SHIFT + REST)
    made = {rule: counts(rule, factor, seed) for rule in SERVOS}
    means = {f"{rule}: entries / k": float(x[during].mean()) for rule, x in made.items()}
    return means | {
        f"{rule}: before": float(x[SHIFT - 40 : SHIFT].mean()) for rule, x in made.items()
    }


def _line(rule: str, factor: float, seed: int, quick: bool) -> Points:
    """From 20 steps before the shift to a period after it."""
    del quick
    steps = np.arange(SHIFT - 20, SHIFT + PERIOD + 20)
    return steps - SHIFT, counts(rule, factor, seed)[steps]
