"""SIDCo: a sparsity-inducing distribution fitted in stages.

Abdelmoniem et al. 2021 fit a one-sided distribution to the magnitudes. One fit to all of them
describes a far tail poorly, so the fit is made in stages. The first threshold passes 25 % of the
entries, the next fit is to the entries above it, and so on; the last stage aims at the rest of the
density. A controller adapts the number of stages to the measured count.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import gammaln

from sparse_collectives import _validation
from sparse_collectives._data import Layout, as_layout
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select import _statistics, _thresholds

_DISTRIBUTIONS = ("exponential", "gamma", "pareto")
_STAGE_DENSITY, _MOST_STAGES = 0.25, 8
# The share of k by which the average count may be off.
_TOLERANCE = 0.2


class SIDCoState(NamedTuple):
    """State of :func:`sidco`.

    Attributes:
      count: ``i32[]``, steps taken.
      stages: ``i32[]``, the number of stages of the next step.
      passed: ``f32[]``, entries that passed the threshold, summed over the period.
    """

    count: jax.Array
    stages: jax.Array
    passed: jax.Array


def sidco(
    density: float,
    *,
    distribution: str = "exponential",
    period: int = 5,
    headroom: float = 0.25,
) -> Selector:
    r"""Selects by the threshold of a distribution fitted in stages.

    The excess over the previous threshold has the mean :math:`\mu` and the variance
    :math:`\sigma^2`. With the exponential distribution a stage of density d raises the threshold
    by :math:`-\mu \log d`. With the generalized Pareto distribution it raises it by
    :math:`\beta (d^{-\xi} - 1) / \xi`, where :math:`\xi = (1 - \mu^2 / \sigma^2) / 2` and
    :math:`\beta = \mu (1 + \mu^2 / \sigma^2) / 2`. Zeros are never selected.

    NaN and infinity are left out of the fits, are always selected, and count for the
    controller. The threshold is never above the largest finite magnitude, so at least
    one entry is selected if any is nonzero. If all magnitudes are subnormal, the
    statistics may vanish; then every nonzero entry passes.

    Args:
      density: the target for k / n, in (0, 1]. At 1 every nonzero is selected.
      distribution: ``'exponential'``; ``'gamma'``, for the nonzeros in the first stage, with
        generalized Pareto in the later ones; or ``'pareto'``, generalized Pareto in all stages.
      period: steps over which the count is averaged before the number of stages
        may change (5 in the paper). If the average is off by more than 20 %, as in the paper, the
        next period has one stage fewer, or one more; there are eight at most.
      headroom: slots beyond k, as a share of k. Entries that pass the threshold
        but find no slot stay with the caller. Which entries these are changes
        from step to step, so each of them is sent eventually.

    Returns:
      A :class:`Selector` whose buffers have ``ceil((1 + headroom) k)`` slots and
      whose state is a :class:`SIDCoState`.

    Raises:
      TypeError: density is not a number.
      ValueError: an argument is out of its range.

    Cost: three passes over n entries (maximum, mean, selection); two more for each stage after the
    first (count and mean of the excess); one more for each Pareto stage (variance) and two for the
    gamma fit; three more if some entries are not finite, and the masked passes are then slower.

    References:
      Abdelmoniem et al. 2021, "An efficient statistical-based gradient
      compression technique for distributed training systems", algorithm 1.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = sidco(density=0.25)
      >>> acc = jnp.array([0.1, -3.0, 0.2, 0.0])
      >>> coo, _, info = selector.select(acc, selector.init(4))
      >>> coo.indices.tolist(), int(info.selected)
      ([1, 4], 1)
    """
    density = _validation.check_density(density)
    distribution = _validation.check_choice("distribution", distribution, _DISTRIBUTIONS)
    period = _validation.check_positive_int("period", period)
    headroom = _validation.check_number("headroom", headroom, 0.0, math.inf)

    def init(size: int | Layout) -> SIDCoState:
        as_layout(size)
        zero = jnp.zeros((), jnp.int32)
        return SIDCoState(zero, zero + 1, jnp.zeros((), jnp.float32))

    def select(acc: jax.Array, state: SIDCoState):
        acc = _validation.as_vector("acc", acc)
        k = _validation.count_from_density(density, acc.shape[0])
        find = functools.partial(_fitted_threshold, distribution=distribution, stages=state.stages)
        coo, info = _thresholds.select_about(acc, k, headroom, state.count, find)
        passed = info.selected + info.overflow
        return coo, _adapt(state, passed, k, period, _most_stages(k, acc.shape[0])), info

    options = {"distribution": distribution, "period": period, "headroom": headroom}
    return Selector(init, select, spec=Spec.of("sidco", density=density, **options))


def _most_stages(k: int, size: int) -> int:
    """The number of stages that still leaves the last one a density of at most 1."""
    wanted = math.ceil(math.log(k / size) / math.log(_STAGE_DENSITY))
    return min(_MOST_STAGES, max(1, wanted))


def _adapt(state: SIDCoState, count: jax.Array, k: int, period: int, most: int) -> SIDCoState:
    """One stage more or less if the average count of a period is off."""
    passed = state.passed + count.astype(jnp.float32)
    due = (state.count + 1) % period == 0
    ratio = passed / period / k
    one = jnp.ones_like(state.stages)
    change = jnp.where(ratio > 1 + _TOLERANCE, -one, jnp.where(ratio < 1 - _TOLERANCE, one, 0))
    stages = jnp.clip(state.stages + jnp.where(due, change, 0), 1, most)
    return SIDCoState(state.count + 1, stages, jnp.where(due, 0.0, passed))


def _fitted_threshold(acc: jax.Array, k: int, distribution: str, stages: jax.Array) -> jax.Array:
    """The threshold after all stages. Intermediate values are scaled down."""
    size = acc.shape[0]
    extent = _statistics.extent(acc)
    not_finite = size - extent.count

    def stage_density(stage):
        last = k / size / _STAGE_DENSITY ** (stages - 1).astype(jnp.float32)
        return jnp.where(stage + 1 == stages, last, _STAGE_DENSITY)

    def exceed(here, low, count, total, density):
        """The rise after which a share ``density`` of the entries above ``low`` still passes."""
        mean = total / count
        if distribution == "exponential":
            return -mean * jnp.log(density)
        square = _statistics.finite_sum(
            here, lambda x: jnp.maximum(jnp.abs(x) * extent.down - low, 0.0) ** 2, extent.clean
        )
        return _pareto(mean, square / count - mean**2, density)

    def refine(carry):
        stage, low = carry
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, low = lax.optimization_barrier((acc, low))
        bits = _bits.magnitude_bits(low * extent.up)
        passed = _statistics.count_reaching(here, bits).astype(jnp.float32)
        total = _statistics.finite_sum(
            here, lambda x: jnp.maximum(jnp.abs(x) * extent.down - low, 0.0), extent.clean
        )
        count = jnp.maximum(passed - not_finite, 1.0)
        return stage + 1, low + exceed(here, low, count, total, stage_density(stage))

    zero = jnp.zeros_like(stages)
    if distribution == "gamma":
        first = _gamma(acc, extent, stage_density(zero))
    else:
        low = jnp.zeros_like(extent.total)
        first = exceed(acc, low, extent.count, extent.total, stage_density(zero))
    _, threshold = lax.while_loop(lambda carry: carry[0] < stages, refine, (zero + 1, first))
    return jnp.minimum(threshold, extent.largest * extent.down) * extent.up


def _pareto(mean: jax.Array, variance: jax.Array, density: jax.Array) -> jax.Array:
    """The generalized Pareto quantile, by the method of moments."""
    # If all are equal, there is no variance, and the threshold rises by the mean.
    ratio = jnp.minimum(mean**2 / jnp.maximum(variance, 1e-30), 1e6)
    shape = (1 - ratio) / 2
    scale = mean * (ratio + 1) / 2
    flat = jnp.abs(shape) < 1e-4
    bent = jnp.expm1(-shape * jnp.log(density)) / jnp.where(flat, 1.0, shape)
    return scale * jnp.where(flat, -jnp.log(density), bent)


def _gamma(acc: jax.Array, extent: _statistics.Extent, density: jax.Array) -> jax.Array:
    """The gamma quantile of the nonzeros, closed form for a shape of at most 1."""
    not_finite = acc.shape[0] - extent.count
    nonzero = _statistics.count_reaching(acc, jnp.int32(1)).astype(jnp.float32) - not_finite
    nonzero = jnp.maximum(nonzero, 1.0)

    def log_magnitude(x):
        scaled = jnp.abs(x) * extent.down
        return jnp.where(scaled > 0, jnp.log(jnp.where(scaled > 0, scaled, 1.0)), 0.0)

    mean = extent.total / nonzero
    logs = _statistics.finite_sum(acc, log_magnitude, extent.clean) / nonzero
    # The share refers to all entries, but only the nonzeros are fitted.
    density = jnp.minimum(density * extent.count / nonzero, 1.0)
    s = jnp.maximum(jnp.log(jnp.maximum(mean, 1e-30)) - logs, 1e-6)
    shape = (3 - s + jnp.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return jnp.maximum(-(mean / shape) * (jnp.log(density) + gammaln(shape)), 0.0)
