"""Kinds of gradients that exchanges go wrong on."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

STEPS = 4


def _one_worker(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    workers = x.shape[1]
    return np.where((np.arange(workers) == workers // 2)[:, None], x, 0)


def _one_region(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(x.shape[2]) >= max(1, x.shape[2] // 8), x * 1e-4, x)


def _a_region_each(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    _, workers, total = x.shape
    return x * (np.arange(total) * workers // total == np.arange(workers)[:, None])


def _cancelling(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    if x.shape[1] > 1:
        x[:, 1] = -x[:, 0]
    return x


def _one_far_above(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    x[..., rng.integers(x.shape[2])] *= 10.0 ** rng.uniform(4, 6)
    return x


def _one_sign(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.abs(x[:1]), x.shape).copy()


def _turning(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return _one_sign(rng, x) * np.where(np.arange(STEPS) < STEPS // 2, 1, -1)[:, None, None]


def _not_finite(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    bad = rng.random(x.shape) < 0.01
    x[bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    return x


# Made from normal numbers ``[STEPS, P, n]``.
_KINDS: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "normal": lambda rng, x: x,
    "ties": lambda rng, x: rng.integers(-2, 3, x.shape).astype(float),
    "all zero": lambda rng, x: 0 * x,
    "one worker": _one_worker,
    "one region": _one_region,
    "a region each": _a_region_each,
    "heavy tail": lambda rng, x: rng.standard_cauchy(x.shape),
    "cancelling": _cancelling,
    "subnormal": lambda rng, x: x * 1e-40,
    "tiny": lambda rng, x: x * 1e-20,
    "one far above": _one_far_above,
    "one sign": _one_sign,
    "turning": _turning,
    "huge": lambda rng, x: np.sign(x) * 2e38,
    "largest": lambda rng, x: np.where(rng.random(x.shape) < 0.2, np.sign(x) * 3e38, x),
    "signs of the largest": lambda rng, x: np.sign(x) * 3.4e38,
    "not finite": _not_finite,
}
DATA = tuple(_KINDS)


def gradients(configuration: Any) -> Any:
    """For each leaf ``[STEPS, P, ...]``, in its dtype, of the kind that was drawn."""
    rng = np.random.default_rng(configuration.seed)
    sizes = {name: math.prod(leaf.shape) for name, leaf in configuration.params.items()}
    x = rng.standard_normal((STEPS, configuration.workers, sum(sizes.values())))
    x = _KINDS[configuration.data](rng, x)
    tree, offset = {}, 0
    for name, leaf in configuration.params.items():
        part = x[..., offset : offset + sizes[name]].reshape(*x.shape[:2], *leaf.shape)
        offset += sizes[name]
        most = float(jnp.finfo(leaf.dtype).max)
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.clip(part, -most, most)
        tree[name] = np.where(np.isfinite(part), finite, part).astype(np.float32).astype(leaf.dtype)
    return tree | {name: tree[other] for name, other in configuration.tied.items()}
