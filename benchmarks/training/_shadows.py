"""Every selector on the same accumulators: each keeps its own state, its choice is only counted."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import Layout, select

from .._common.contestants import selectors

# Drawn in the plot: what predicts how many entries pass. The others take a fixed number.
ESTIMATORS = ("threshold_reuse, no servo", "gaussian_k", "gaussian_k, adjusted")
ESTIMATORS += ("redsync", "sidco", "dgc", "threshold_reuse")


def contestants(density: float, first_threshold: float) -> dict[str, Any]:
    """All selectors and the published variants, by name.

    The fixed threshold is the k-th magnitude of the first accumulator.
    """
    published = select.published
    return selectors(density, first_threshold) | {
        "threshold_reuse, no servo": select.threshold_reuse(density=density, servo=False),
        "gaussian_k, adjusted": published.gaussian_k(density=density, adjust=True),
        "sidco, gamma": published.sidco(density=density, distribution="gamma"),
        "sidco, pareto": published.sidco(density=density, distribution="pareto"),
    }


class Quality(NamedTuple):
    """One selection beside the exact one, ``f32[]`` each."""

    # Entries in the buffer, / k.
    selected: Any
    # Those and the overflow, / k: what the threshold lets through.
    passed: Any
    # The share of the exact top-k that was selected.
    overlap: Any


class Shadows:
    """The selectors of :func:`contestants`, run over a sequence of accumulators."""

    def __init__(self, density: float, layout: Layout):
        self.density, self.layout = density, layout
        self._selectors: dict[str, Any] = {}
        self._states: Any = None
        self._records: list[Any] = []

    def feed(self, acc: jax.Array) -> None:
        """Lets every selector take its next step on ``acc``."""
        # Both results whole, in a program of its own: with a part of them XLA sorts all n.
        exact = _top_k(jnp.abs(acc), max(1, round(self.density * acc.size)))
        if not self._selectors:
            self._selectors = contestants(self.density, float(exact[0][-1]))
            self._states = {name: s.init(self.layout) for name, s in self._selectors.items()}
        self._states, record = self._measure(acc, *exact, self._states)
        self._records.append(jax.device_get(record))

    def series(self) -> dict[str, Quality]:
        """The qualities by name: ``f32[steps]`` for each number."""
        qualities = jax.tree.map(lambda *x: np.asarray(x), *self._records)
        return {name: qualities[name] for name in self._selectors}

    @functools.partial(jax.jit, static_argnums=0)
    def _measure(self, acc, magnitudes, indices, states):
        """One step of all selectors on an accumulator whose exact selection is known."""
        k, count = magnitudes.size, jnp.sum(magnitudes > 0)
        exact = jnp.zeros(acc.size + 1, bool).at[indices].set(magnitudes > 0)
        qualities, following = {}, {}
        for name, selector in self._selectors.items():
            coo, following[name], info = selector.select(acc, states[name])
            qualities[name] = Quality(
                selected=info.selected / k,
                passed=(info.selected + info.overflow) / k,
                overlap=jnp.sum(exact[coo.indices]) / count,
            )
        return following, qualities


# The exact selection by JAX, which shares nothing with the selectors.
_top_k = jax.jit(jax.lax.top_k, static_argnums=1)
