"""Conservation, equal replicas, counters and finiteness, for any combination."""

import functools
import os
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from tests.fuzz.configurations import (
    AROUND,
    MINI_STEPS,
    Configuration,
    configurations,
    of_one_program,
)
from tests.fuzz.data import STEPS, gradients
from tests.fuzz.laws import (
    by_worker,
    check_ahead,
    check_conserved,
    check_counters,
    check_finite,
    check_replicas,
    check_same,
    check_untouched,
    of_bucket,
    reductions,
)

# Parts, for several processes to share; programs in each part; gradients for each program.
PARTS, IN_A_PART, GRADIENTS = int(os.environ.get("FUZZ_PARTS", "12")), 20, 6


def program_of(configuration: Configuration) -> tuple[Any, Any, Any]:
    """:func:`program` of a configuration."""
    tied, leaves = (tuple(x.items()) for x in (configuration.tied, configuration.params))
    return program(
        *(configuration.tx, configuration.around, configuration.axes, configuration.shape),
        *(leaves, tied),
    )


def trajectory(configuration: Configuration) -> tuple[list[Any], list[Any], Any]:
    """The states before and after each step, and the updates, of all workers; as NumPy."""
    shape, tied = configuration.shape, configuration.tied
    state, step, _ = program_of(configuration)
    given = gradients(configuration)
    states, updates = [jax.device_get(state)], []
    for t in range(STEPS):
        now = jax.tree.map(lambda x: x[t].reshape(*shape, *x.shape[2:]), given)  # noqa: B023
        update, state = step(state, now | {name: now[other] for name, other in tied.items()})
        states.append(jax.device_get(state))
        updates.append(jax.device_get(update))
    assert step._cache_size() == 1
    return states, updates, given


@functools.lru_cache(maxsize=1)
def program(
    tx: Any, around: str, axes: Any, shape: tuple[int, ...], leaves: Any, tied: Any
) -> tuple[Any, Any, Any]:
    """The first state of all workers, ``step(state, gradients)`` and ``ahead(state)``."""
    names: Any = axes if len(axes) > 1 else axes[0]
    tx = AROUND[around](tx)

    def params():
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in leaves}
        return zeros | {name: zeros[other] for name, other in tied}

    def init(_):
        return tx.init(params())

    def ahead(state):
        return optax_ext.ahead(params(), state)

    def step(state, gradient):
        return tx.update(gradient, state)

    sizes = shape if len(axes) > 1 else shape[0]
    # Not compiled: it is made once.
    everywhere = init
    for name, size in reversed(list(zip(axes, shape, strict=True))):
        everywhere = jax.vmap(everywhere, axis_name=name, axis_size=size)
    each = (sc.simulate(function, axis=names, axis_size=sizes) for function in (step, ahead))
    return everywhere(jnp.zeros(shape)), *each


def exchanges(configuration: Configuration) -> Any:
    """For each exchange, the states before and after it, the update and the gradient."""
    states, updates, given = trajectory(configuration)
    *_, ahead = program_of(configuration)
    check_ahead(configuration, states[-1], ahead(states[-1]))
    states = [by_worker(state, configuration) for state in states]
    left = {name: np.zeros(leaf.shape[1:], np.float32) for name, leaf in given.items()}
    for t, update in enumerate(updates):
        before, after = reductions(states[t]), reductions(states[t + 1])
        update = by_worker(update, configuration)
        gradient = {name: leaf[t] for name, leaf in given.items()}
        if configuration.around.startswith("delayed"):
            # The gradient of the step before; zeros at the first step.
            gradient = {
                name: leaf[t - 1] if t else np.zeros_like(leaf[0]) for name, leaf in given.items()
            }
        if configuration.around.startswith("multi_steps"):
            if (t + 1) % MINI_STEPS:
                assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(update))
                for old, new in zip(before, after, strict=True):
                    check_same(old, new)
                continue
            for name, leaf in given.items():
                of_step = leaf[t + 1 - MINI_STEPS : t + 1]
                gradient[name], left[name] = mean_of(of_step, left[name])
        for old, new in zip(before, after, strict=True):
            yield old, new, of_bucket(update, new), of_bucket(gradient, new)


def mean_of(leaf: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the first axis as a leaf of its dtype, and what that leaves of the sum."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum((x.astype(np.float32) for x in leaf), left) / np.float32(len(leaf))
        most = np.float32(jnp.finfo(leaf.dtype).max)
        held = np.where(np.isfinite(total), np.clip(total, -most, most), total).astype(leaf.dtype)
        rest = total - held.astype(np.float32)
        return held, np.where(np.isfinite(rest), rest, 0) * np.float32(len(leaf))


def check(configuration: Configuration) -> None:
    for before, after, update, gradient in exchanges(configuration):
        check_replicas(update, after)
        check_counters(before, after)
        skipped = after.skipped[0] > before.skipped[0]
        if configuration.policy != "propagate":
            check_finite(update, after)
        if skipped:
            check_untouched(update, before, after)
            continue
        check_conserved(configuration, before, after, update, gradient)


# The same configurations at every run, as all tests here: a gate must not depend on luck.
def _settings(examples: int) -> Any:
    return hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate,),
    )


def check_part(part: int, strategy: Any, check: Any, examples: int) -> None:
    """Checks so many draws of a strategy, others in each part."""

    @hypothesis.seed(part)
    @hypothesis.given(strategy)
    @_settings(examples)
    def holds(drawn):
        check(drawn)

    holds()


@hypothesis.given(configurations())
@_settings(2)
@pytest.mark.slow
def test_laws_hold_for_a_few_configurations(configuration):
    check(configuration)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_laws_hold_for_all_that_can_be_combined(part):
    seen = set()

    @hypothesis.seed(part)
    @hypothesis.given(of_one_program(GRADIENTS))
    @_settings(IN_A_PART)
    def holds(drawn):
        for configuration in drawn:
            seen.add(repr(configuration))
            check(configuration)

    holds()
    assert len(seen) >= 0.9 * IN_A_PART * GRADIENTS
