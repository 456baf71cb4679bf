"""Densities that change from step to step, as functions of a count."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._spec import Spec

DensitySchedule = Callable[[jax.Array], Any]

# Sparsities of 75, 93.75, 98.4375, 99.6 and 99.9 %.
_DGC_STAGES = (0.25, 0.0625, 0.015625, 0.004, 0.001)


def exponential_density(start: float, end: float, steps: int) -> DensitySchedule:
    r"""A density that falls or rises by the same factor at each step.

    .. math:: density(t) = start \cdot (end / start)^{\min(t / steps, 1)}

    Args:
      start: the density at step 0, in (0, 1].
      end: the density from ``steps`` on, in (0, 1].
      steps: the number of steps from ``start`` to ``end``.

    Returns:
      A function of the step count, for :func:`scheduled`.

    Raises:
      ValueError: a density is out of (0, 1], or ``steps`` is below 1.

    Example:
      >>> schedule = exponential_density(0.25, 0.01, 100)
      >>> [round(float(schedule(t)), 4) for t in (0, 50, 100, 500)]
      [0.25, 0.05, 0.01, 0.01]
    """
    start, end = _validation.check_density(start), _validation.check_density(end)
    steps = _validation.check_positive_int("steps", steps)

    def schedule(count):
        return jnp.float32(start) * jnp.float32(end / start) ** jnp.minimum(count / steps, 1.0)

    spec = Spec.of("exponential_density", start=start, end=end, steps=steps)
    return _Known(schedule, (start, end), spec)


def staged_density(
    steps_per_stage: int, densities: Sequence[float] = _DGC_STAGES
) -> DensitySchedule:
    """A density for each stage; by default the warm-up of DGC, from 25 % down to 0.1 %.

    Args:
      steps_per_stage: the number of steps of each stage except the last, which does
        not end. In the paper a stage is an epoch.
      densities: the densities of the stages, each in (0, 1].

    Returns:
      A function of the step count, for :func:`scheduled`.

    Raises:
      ValueError: there is no stage, a density is out of (0, 1], or ``steps_per_stage`` is below 1.

    Example:
      >>> schedule = staged_density(10)
      >>> [round(float(schedule(t)), 4) for t in (0, 9, 10, 35, 1000)]
      [0.25, 0.25, 0.0625, 0.004, 0.001]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
      ICLR 2018, section 3.3.
    """
    steps_per_stage = _validation.check_positive_int("steps_per_stage", steps_per_stage)
    if not len(densities):
        raise ValueError("densities is empty. Write for example densities=(0.25, 0.0625, 0.01).")
    stages = np.asarray([_validation.check_density(density) for density in densities], np.float32)

    def schedule(count):
        return jnp.asarray(stages)[jnp.minimum(count // steps_per_stage, len(stages) - 1)]

    known = tuple(map(float, densities))
    spec = Spec.of("staged_density", steps_per_stage=steps_per_stage, densities=known)
    return _Known(schedule, known, spec)


def strict_density(schedule: DensitySchedule, maximum: float) -> DensitySchedule:
    """Makes it an error if a schedule leaves (0, maximum].

    Otherwise such a density is clipped, and ``clipped`` in the selector's state counts it. The
    densities of :func:`staged_density` and :func:`exponential_density` are known in advance, so
    they are checked here, at no cost in the program. For any other function, the program compares
    the value of each step, and a host callback raises. JAX reports this as a runtime error when
    you wait for a result or for ``jax.effects_barrier()``.

    Args:
      schedule: ``schedule(count) -> density``.
      maximum: the density of the selector, in (0, 1].

    Returns:
      A function of the step count, for :func:`scheduled`.

    Raises:
      ValueError: a density that is known now, or a constant that is known when the schedule is
        traced, is out of range.
      ValueError: ``maximum`` is out of (0, 1].
      TypeError: ``schedule`` is not a function.

    Example:
      >>> schedule = strict_density(staged_density(10, (0.1, 0.01)), 0.1)
      >>> strict_density(schedule, 0.05)
      Traceback (most recent call last):
        ...
      ValueError: schedule reaches 0.1, above maximum=0.05. Give the selector a density \
of at least 0.1, or lower the schedule.
    """
    maximum = _validation.check_density(maximum)
    if not callable(schedule):
        raise TypeError(
            f"schedule must be a function of the step count, got {schedule!r}. A constant is "
            "checked without strict_density."
        )
    if isinstance(schedule, _Known):
        for density in schedule.densities:
            _check_at_most(density, maximum)
        return schedule

    def strict(count):
        density = schedule(count)
        if isinstance(density, (float, int, np.number)):
            _check_at_most(_validation.check_density(float(density)), maximum)
            return density
        value = jnp.asarray(density, jnp.float32)
        # The count is the same on every worker, so all workers take the same branch.
        lax.cond(
            (value > 0) & (value <= jnp.float32(maximum)),
            lambda count, value: None,
            lambda count, value: jax.debug.callback(_raise, count, value, np.float32(maximum)),
            count,
            value,
        )
        return density

    return strict


@dataclasses.dataclass(frozen=True)
class _Known:
    """A schedule between densities that are known before any step.

    Attributes:
      function: the schedule, a function of the step count.
      densities: known densities, each in (0, 1]; the largest one is among them.
      spec: the call that made it.
    """

    function: DensitySchedule
    densities: tuple[float, ...]
    spec: Spec | None

    def __call__(self, count: jax.Array) -> Any:
        return self.function(count)


def _check_at_most(density: float, maximum: float) -> None:
    if density > maximum:
        raise ValueError(
            f"schedule reaches {density}, above maximum={maximum}. Give the selector a "
            f"density of at least {density}, or lower the schedule."
        )


def _raise(count: Any, density: Any, maximum: Any) -> None:
    # Under vmap both branches of a conditional run, so the condition is checked again.
    if not 0 < density <= maximum:
        raise ValueError(
            f"step {int(count)}: schedule is {float(density):.6g}, which is out of "
            f"(0, {float(maximum):.6g}]. Give the selector a larger density, or lower the schedule."
        )
