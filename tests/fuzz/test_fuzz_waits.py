"""In any combination, an entry whose gradient stays is applied again and again.

Gradients have the same sign at each step up to the middle, and the other one from there on; one
entry may be far above the others. The bound has three parts: the steps for which a random window
over everything leaves an entry out (with a probability of 1e-6), the steps in which an entry adds
up to the smallest number of a codec next to the largest one, and the turns of the workers.
"""

import dataclasses
import math
import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import optax_ext
import sparse_collectives as sc
from tests.fuzz.configurations import flat_allreduces
from tests.fuzz.test_fuzz import PARTS, _settings, check_part
from tests.optax_ext.test_waits import longest_waits
from tests.reference.windows import longest_wait
from tests.sparse_collectives.table import SELECTORS
from tests.sparse_collectives.table import SHORT_CODECS as CODECS

SIZE, IN_A_PART = 96, 3
# Selectors of about k entries, whatever the distribution; others depend on it
# (docs/selectors.md). Codecs of 2 bits with feedback diverge (docs/allreduces.md).
STEADY = (
    *("threshold_reuse", "dgc", "random_k", "mstopk"),
    *("adtopk", "adtopk_interleaved", "adtopk_threshold", "layerwise"),
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Steady:
    """An exchange of gradients that stay."""

    text: str  # all that was drawn
    tx: Any
    workers: int
    gradients: np.ndarray  # f32[P, n]
    bound: int  # steps that an entry may wait, if nothing rounds it to zero
    huge: int  # the entry that may be far above the others
    level: float  # steps after which an entry is as large as the smallest number next to that one

    def __repr__(self) -> str:
        return self.text


@st.composite
def steady(draw: Any) -> Steady:
    """A selector, an allreduce and a codec, and gradients of which one may be far above."""
    density = draw(st.sampled_from((0.1, 0.05, 0.3)))
    codecs = tuple(name for name in CODECS if name != "qsgd2")
    name, exchange = draw(flat_allreduces(density, codecs))
    selector = draw(st.sampled_from(("topk", "topk", *STEADY)))
    workers = draw(st.sampled_from((7, 2, 3, 1, 4, 5, 6, 8)))
    times = draw(st.sampled_from((1.0, 1e2, 1e4, 1e6)))
    huge, own = draw(st.integers(0, SIZE - 1)), draw(st.sampled_from((0.0, 0.2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    gradients = rng.uniform(1, 2, SIZE) * (1 + own * rng.uniform(-1, 1, (workers, SIZE)))
    reach = reach_of(str(exchange.spec))
    times = 1.0 if times / reach > 200 else times
    k = max(1, round(density * SIZE))
    if name.startswith("partitioned_topk") and k <= workers:
        # A partition with one slot sends its largest entry alone, as a top-1 would.
        times = min(times, 1e2)
    gradients[:, huge] *= times
    if "capacity=5" in str(exchange.spec):
        k = min(k, 5)
    return Steady(
        text=(
            f"{selector} of {density}, {exchange.spec} as {name}, {workers} workers, one entry "
            f"{times:g} times the others, workers differ by {own}"
        ),
        tx=optax_ext.sparse_allreduce(SELECTORS[selector](density), exchange, axis="w"),
        workers=workers,
        gradients=gradients.astype(np.float32),
        bound=workers + longest_wait(10**3, k, 2 * SIZE),
        huge=huge,
        level=times / reach,
    )


def reach_of(text: str) -> float:
    """The ratio of the largest number to the smallest: see tests/optax_ext/test_waits.py."""
    levels = [2.0 ** (int(bits) - 1) - 1 for bits in re.findall(r"qsgd\(bits=(\d)", text)]
    return min([*levels, 2.0**16 if "narrow8" in text else math.inf])


def check(drawn: Steady) -> None:
    half = 2 * (drawn.bound + math.ceil(drawn.level))

    def run(gradient):
        def step(state, t):
            updates, state = drawn.tx.update(jnp.where(t < half, gradient, -gradient), state)
            return state, (updates, jax.lax.psum(state.residual[0], "w"))

        return jax.lax.scan(step, drawn.tx.init(gradient), jnp.arange(2 * half))[1]

    updates, waits = sc.simulate(run, axis="w", axis_size=drawn.workers)(drawn.gradients)
    updates, waits = np.asarray(updates[0], np.float64), np.asarray(waits[0], np.float64)
    total = drawn.gradients.astype(np.float64).sum(axis=0)
    # Residuals, in steps of their gradient. The largest one sets the levels of its bucket.
    held = np.abs(waits).max(axis=0) / total
    level = drawn.level * (1 + held[drawn.huge])
    bound = drawn.bound + level
    # After the change of sign the residual is taken back first.
    for now in (updates[:half], updates[half + math.ceil(drawn.bound + drawn.level) :]):
        longest = longest_waits(now != 0)
        assert longest.max() <= bound, (
            f"entry {longest.argmax()} waits {longest.max()} steps, and "
            f"{(longest > bound).sum()} entries more than {bound}"
        )
    # A worker that passes an entry on keeps less than a level.
    assert held.max() <= bound + drawn.workers * level, f"{held.max()} steps of {held.argmax()}"
    given = np.where(np.arange(2 * half) < half, 1, -1).cumsum()[:, None] * total
    missing = np.abs(given - drawn.workers * updates.cumsum(axis=0) - waits)
    assert (missing <= 1e-5 * np.abs(given).max(axis=0)).all()


@hypothesis.given(steady())
@_settings(1)
def test_waits_are_short_in_a_few_combinations(drawn):
    check(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_waits_are_short_in_all_that_can_be_combined(part):
    check_part(part, steady(), check, IN_A_PART)
