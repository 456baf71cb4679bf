"""A selector whose density changes from step to step, up to the density of its slots."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import _validation
from sparse_collectives._data import Layout, PaddedCOO
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector, State
from sparse_collectives.select._density import DensitySchedule


class ScheduledState(NamedTuple):
    """State of :func:`scheduled`.

    Attributes:
      count: ``i32[]``, selections made.
      clipped: ``i32[]``, selections for which the schedule was out of range.
      inner: the state of the selector.
    """

    count: jax.Array
    clipped: jax.Array
    inner: State


def scheduled(selector: Selector, schedule: float | DensitySchedule) -> Selector:
    """Selects the ``round(density(count) * n)`` largest of the entries of ``selector``.

    The other entries are not sent. The slots of the selector are the maximum: shapes are
    static, so an allreduce sends the words of the maximum at every step, and a schedule
    does not reduce the traffic. It is meant for the warm-up of DGC, which begins with a
    density for which an allreduce of the final density has no room. Give the selector and
    the allreduce the largest density of the schedule.

    Args:
      selector: any selector.
      schedule: a density in (0, 1], or a function of the number of selections made, such as
        :func:`exponential_density` and :func:`staged_density`. A density that needs more slots than
        there are is clipped, and ``clipped`` counts it; :func:`strict_density` makes it an error.

    Returns:
      A :class:`Selector`.

    Raises:
      TypeError: ``schedule`` is neither a number nor a function.
      ValueError: a density that is known at trace time is out of (0, 1] or needs more
        slots than the selector has.

    Cost: a bisection over the selected magnitudes, in addition to the cost of ``selector``.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> from sparse_collectives.select import staged_density
      >>> selector = scheduled(sc.select.topk(density=0.75), staged_density(1, (0.75, 0.25)))
      >>> acc, state = jnp.array([1.0, 4.0, -3.0, 2.0]), selector.init(4)
      >>> for _ in range(2):
      ...     coo, state, info = selector.select(acc, state)
      ...     print(coo.to_dense().tolist())
      [0.0, 4.0, -3.0, 2.0]
      [0.0, 4.0, 0.0, 0.0]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
      ICLR 2018, section 3.3.
    """
    if not callable(schedule):
        constant = _validation.check_density(schedule)
        schedule_of, described = (lambda count: constant), constant
    else:
        # A function has no description that is the same in every program; ours have a spec.
        spec = getattr(schedule, "spec", None)
        schedule_of, described = schedule, str(spec) if spec else "function"

    def init(size: int | Layout) -> ScheduledState:
        count, clipped = (jnp.zeros((), jnp.int32) for _ in range(2))
        return ScheduledState(count, clipped, selector.init(size))

    def select(acc: jax.Array, state: ScheduledState):
        coo, inner, info = selector.select(acc, state.inner)
        coo, threshold, clipped = _largest(coo, schedule_of, state.count)
        info = SelectInfo(coo.count(), info.overflow, jnp.maximum(info.threshold, threshold))
        return coo, ScheduledState(state.count + 1, state.clipped + clipped, inner), info

    def fork(state: ScheduledState, number: jax.Array) -> ScheduledState:
        return state._replace(inner=selector.fork(state.inner, number))

    spec = Spec.of("scheduled", selector=selector, schedule=described)
    return Selector(init, select, spec=spec, fork=fork)


def _largest(
    coo: PaddedCOO, schedule: DensitySchedule, count: jax.Array
) -> tuple[PaddedCOO, jax.Array, jax.Array]:
    """The ``k(t) = max(1, round(density(t) * n))`` largest entries of a selection.

    The result is exact: bisection over the selected magnitudes, ties broken by index.
    k(t) is at most the number of slots.

    Args:
      coo: the selection at the static maximum.
      schedule: ``schedule(count) -> density``.
      count: ``i32[]``.

    Returns:
      The entries that are sent, in as many slots; the smallest magnitude among them,
      ``f32[]``, or 0 if all are sent; and ``i32[]``, 1 if the density was clipped. A
      density that is not a positive number is clipped to one entry.

    Raises:
      ValueError: a density that is known at trace time is out of (0, 1] or needs more
        slots than the selection has.
    """
    density: Any = schedule(count)
    if isinstance(density, (float, int, np.number)):
        wanted = _constant_count(float(density), coo)
        k, clipped = jnp.asarray(wanted, jnp.int32), jnp.zeros((), jnp.int32)
    else:
        value = jnp.asarray(density, jnp.float32)
        exact, positive = jnp.round(value * coo.size), value > 0
        # In float32 the density of the selector may be rounded up.
        rounding = float(jnp.finfo(jnp.float32).eps) * coo.size
        in_range = positive & (exact <= coo.capacity + rounding)
        k = jnp.where(positive, jnp.clip(exact, 1, coo.capacity), 1).astype(jnp.int32)
        clipped = jnp.asarray(~in_range, jnp.int32)
    bits = _bits.magnitude_bits(coo.values)
    chosen, pattern = _kth_magnitude.largest_mask(bits, k)
    kept, _ = _compaction.compact_mask(coo, chosen, capacity=coo.capacity)
    return kept, _bits.magnitude_from_bits(pattern), clipped


def _constant_count(density: float, coo: PaddedCOO) -> int:
    count = _validation.count_from_density(_validation.check_density(density), coo.size)
    if count > coo.capacity:
        raise ValueError(
            f"schedule is {density} at every step, {count} of {coo.size} entries, but the "
            f"selector has {coo.capacity} slots. Give the selector a density of at least "
            f"{density}: it is the maximum of the schedule."
        )
    return count
