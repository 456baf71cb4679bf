"""Gradients that are hard on a sparse allreduce; step and worker determine them."""

import numpy as np

# Layers of unequal size; n is their sum.
LAYERS = (4096, 1536, 512, 1024, 768, 64)
SIZE = sum(LAYERS)

PATTERNS = ("even", "one layer", "one worker", "one region", "ties", "zeros", "tiny", "one entry")
# Steps for which a pattern stays, and share of the steps with an entry that is not finite.
_TURN, _NONFINITE = 7, 0.04


def pattern_of(step: int) -> str:
    """The pattern of a step."""
    return PATTERNS[step // _TURN % len(PATTERNS)]


def gradient(step: int, worker: int, workers: int) -> np.ndarray:
    """``f32[n]``: the gradient of a worker, with NaN or infinity where :func:`faulty` says."""
    rng = np.random.default_rng([step, worker])
    turn = step // _TURN // len(PATTERNS)
    out = rng.standard_normal(SIZE, dtype=np.float32)
    match pattern_of(step):
        case "one layer":
            # The mass moves from layer to layer.
            ends = np.cumsum(LAYERS)
            layer = turn % len(LAYERS)
            out[ends[layer] - LAYERS[layer] : ends[layer]] *= 100
        case "one worker":
            out *= worker == turn % workers
        case "one region":
            start = turn * 97 % (SIZE - SIZE // 50)
            region = np.zeros_like(out)
            region[start : start + SIZE // 50] = 10
            out *= region
        case "ties":
            out = np.sign(out)
        case "zeros":
            out[:] = 0
        case "tiny":
            out *= np.float32(1e-30)
        case "one entry":
            out[:] = 0
            out[turn % SIZE] = 1 + worker
    place, values = faulty(step, worker, workers)
    out[place] = values
    return out


def faulty(step: int, worker: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a worker's gradient is not finite at a step, and what is there; usually nowhere."""
    rng = np.random.default_rng([step, 1 << 20])
    none = np.zeros(0, np.int64), np.zeros(0, np.float32)
    if rng.random() >= _NONFINITE or rng.integers(workers) != worker:
        return none
    place = np.unique(rng.integers(SIZE, size=rng.integers(1, 6)))
    values = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), size=place.size)
    return place, values
