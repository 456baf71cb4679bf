"""Threshold reuse: an exact threshold at some steps, which follows the count in between.

Ok-Topk, section 3.1.3. The statistics of the accumulator change slowly, so the paper computes the
exact k-th magnitude every tau' steps and selects by plain comparison with it in between.

Deviation: if a threshold is only reused, the residual keeps growing below it, and the count grows
with the residual. A feedback controller (``servo``) moves the threshold according to the count:
near the k-th magnitude the count falls as a power of the threshold, count ~ threshold^-s, so t <- t
(count / k)^(1/s). The exponent starts at its value for an exponential tail, log(n / k), and is then
measured from pairs of thresholds and counts. A step whose count is off is counted again before
anything is selected.

The program that the paper links to also has a feedback controller, with fixed
factors: see :mod:`sparse_collectives.select._thresholds`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation, _varying
from sparse_collectives._data import Layout, as_layout
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._sparse_ops._kth_magnitude import kth_magnitude_bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.select import _thresholds

_MAX_RECOUNTS = 4
_STEEPEST = 100.0


class ThresholdReuseState(NamedTuple):
    """State of :func:`threshold_reuse`.

    Attributes:
      count: ``i32[]``, steps taken.
      threshold: ``f32[]``, the magnitude for the next step; 0 if it is not known
        and the next step has to evaluate it exactly.
      steepness: ``f32[]``, the exponent s of the tail; 0 before the first step.
    """

    count: jax.Array
    threshold: jax.Array
    steepness: jax.Array


class _Trial(NamedTuple):
    """A threshold with the mask and the count that it gives."""

    threshold: jax.Array
    words: jax.Array
    count: jax.Array


class _Bracket(NamedTuple):
    """Two thresholds, one that more than k entries reach and one that fewer reach.

    Attributes:
      low, high: logarithms of the thresholds.
      excess, lack: logarithms of count / k at the thresholds, above and below 0; 0 if
        the end is not known.
    """

    low: jax.Array
    excess: jax.Array
    high: jax.Array
    lack: jax.Array


def threshold_reuse(
    density: float,
    *,
    period: int = 32,
    servo: bool | str = True,
    tolerance: float = 0.03,
    headroom: float = 0.25,
) -> Selector:
    """Selects by a threshold that is evaluated exactly every ``period`` steps.

    Args:
      density: the target for k / n, in (0, 1].
      period: tau', steps between two exact evaluations (32 for VGG-16 and LSTM,
        128 for BERT in the paper).
      servo: whether a feedback controller moves the threshold with the count in between.
        ``False`` does not move it, as in the text of the paper. ``'fixed'`` moves it by fixed
        factors, as in the program that the paper links to. While more than 4k/3 entries pass, a
        step multiplies the threshold by 1.03, up to five times. For the next step it is divided
        by 1.012 if fewer than 2k/3 entries passed, and multiplied by 1.012 if more than 5k/4
        passed. An exact threshold is not raised.
      tolerance: with ``servo=True``, a step whose count differs from k by more than this share is
        counted again with a corrected threshold, up to four times. ``math.inf`` disables recounts.
      headroom: slots beyond k, as a share of k. Entries that pass the threshold
        but find no slot stay with the caller. Which entries these are changes
        from step to step, so each of them is sent eventually.

    Returns:
      A :class:`Selector` whose buffers have ``ceil((1 + headroom) k)`` slots.

    Raises:
      ValueError: an argument is out of its range.

    Cost: one pass over n entries, and one more every ``period`` steps and for each recount.

    References:
      Li and Hoefler, Ok-Topk, PPoPP 2022, section 3.1.3 and Algorithm 1, lines 2 to 4.
    """
    density = _validation.check_density(density)
    period = _validation.check_positive_int("period", period)
    servo = _validation.check_choice("servo", servo, (True, False, "fixed"))
    tolerance = _validation.check_number("tolerance", tolerance, 0.0, math.inf)
    headroom = _validation.check_number("headroom", headroom, 0.0, math.inf)

    def init(size: int | Layout) -> ThresholdReuseState:
        as_layout(size)
        zero = jnp.zeros((), jnp.float32)
        return ThresholdReuseState(jnp.zeros((), jnp.int32), zero, zero)

    def select(acc: jax.Array, state: ThresholdReuseState):
        acc = _validation.as_vector("acc", acc)
        # The state varies over the workers; one made in the mapped function lacks that type.
        state = _varying.varying_like(state, acc)
        size = acc.shape[0]
        k = _validation.count_from_density(density, size)
        capacity = _thresholds.slots_for(k, size, headroom)
        if k == size:
            return _select_all(acc, state)

        def exact():
            return _bits.magnitude_from_bits(kth_magnitude_bits(acc, k))

        due = (state.count % period == 0) | (state.threshold <= 0)
        trial = _try(acc, lax.cond(due, exact, lambda: state.threshold))
        steepness = jnp.where(state.steepness > 0, state.steepness, max(math.log(size / k), 1.0))
        following = trial.threshold
        if servo == "fixed":
            trial = _raise(acc, trial, k, due)
            following = _thresholds.next_local(trial.threshold, trial.count, k)
        elif servo:
            trial, steepness = _recount(acc, trial, steepness, k, tolerance, due)
            # Still off by a factor of two: evaluate exactly at the next step.
            lost = (trial.count > 2 * k) | (2 * trial.count < k)
            following = jnp.where(lost, 0.0, _follow(trial, steepness, k))
        coo, _ = _compaction.entries_at(acc, trial.words, capacity, state.count)
        selected = jnp.minimum(trial.count, capacity)
        info = SelectInfo(selected, trial.count - selected, trial.threshold)
        return coo, ThresholdReuseState(state.count + 1, following, steepness), info

    options = {"period": period, "servo": servo, "tolerance": tolerance, "headroom": headroom}
    return Selector(init, select, spec=Spec.of("threshold_reuse", density=density, **options))


def _select_all(acc: jax.Array, state: ThresholdReuseState):
    """Selects every nonzero entry, for density 1."""
    none = jnp.zeros_like(state.count)
    coo, info = _thresholds.select_reaching(acc, none, capacity=acc.shape[0], turn=state.count)
    return coo, state._replace(count=state.count + 1), info


def _try(acc: jax.Array, threshold: jax.Array) -> _Trial:
    """The entries that reach ``threshold``; zeros never reach it."""
    bits = jnp.maximum(_bits.magnitude_bits(threshold), 1)
    words = _bits.mask_by_magnitude(acc, lambda magnitude: magnitude >= bits)
    return _Trial(threshold, words, jnp.sum(_bits.popcount(words), dtype=jnp.int32))


def _raise(acc: jax.Array, trial: _Trial, k: int, exact: jax.Array) -> _Trial:
    """Tries higher thresholds while too many entries pass, unless the threshold is exact."""

    def off(carry):
        turn, trial = carry
        return (turn < _thresholds.MOST_RAISES) & _thresholds.too_many(trial.count, k) & ~exact

    def again(carry):
        turn, trial = carry
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, threshold = lax.optimization_barrier((acc, _thresholds.raised(trial.threshold)))
        return turn + 1, _try(here, threshold)

    return lax.while_loop(off, again, (jnp.zeros_like(trial.count), trial))[1]


def _ratio(count: jax.Array, k: int) -> jax.Array:
    # Bounded, because an empty or a flooded step gives a direction but not a distance.
    return jnp.clip(count.astype(jnp.float32) / k, 1 / 16, 16.0)


def _follow(trial: _Trial, steepness: jax.Array, k: int) -> jax.Array:
    """The threshold that k entries reach, to first order."""
    return trial.threshold * _ratio(trial.count, k) ** (1 / steepness)


def _recount(
    acc: jax.Array,
    trial: _Trial,
    steepness: jax.Array,
    k: int,
    tolerance: float,
    exact: jax.Array,
) -> tuple[_Trial, jax.Array]:
    """Corrects the threshold until the count is within ``tolerance`` of k.

    The tail is modeled as a power until one count is above k and one below; then
    the search goes on between the two. The trial whose count is nearer to k, as a
    ratio, is kept: with ties there may be no threshold that exactly k entries
    reach, and to select nothing is worst. An exact threshold is not corrected.
    """

    def distance(count):
        return jnp.abs(jnp.log(count.astype(jnp.float32) / k))

    def off(carry):
        turn, trial, _, _ = carry
        off_by = jnp.abs(trial.count - k).astype(jnp.float32)
        return (turn < _MAX_RECOUNTS) & (off_by > tolerance * k) & ~exact

    def correct(carry):
        turn, old, steepness, bracket = carry
        closed = (bracket.excess > 0) & (bracket.lack < 0)
        following = jnp.where(closed, _inside(bracket), _follow(old, steepness, k))
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, threshold = lax.optimization_barrier((acc, following))
        new = _try(here, threshold)
        # The secant through both trials, if they differ enough to define one.
        rise = jnp.log(jnp.maximum(old.count, 1) / jnp.maximum(new.count, 1))
        run = jnp.log(new.threshold / old.threshold)
        usable = (jnp.abs(run) > 1e-6) & (rise * run > 0)
        measured = jnp.clip(rise / jnp.where(usable, run, 1.0), 0.5, _STEEPEST)
        better = distance(new.count) < distance(old.count)
        kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, old)
        steepness = jnp.where(usable, measured, steepness)
        return turn + 1, kept, steepness, _narrowed(bracket, new, k)

    none = jnp.zeros_like(trial.threshold)
    bracket = _narrowed(_Bracket(none, none, none, none), trial, k)
    start = (jnp.zeros_like(trial.count), trial, steepness, bracket)
    _, trial, steepness, _ = lax.while_loop(off, correct, start)
    return trial, steepness


def _narrowed(bracket: _Bracket, trial: _Trial, k: int) -> _Bracket:
    """The bracket with one end moved to ``trial``.

    An end that stays while the other one moves counts half the next time (the
    Illinois rule). Otherwise, if the tail has an edge, as it has with error feedback,
    the thresholds would approach k from one side only, in small steps.
    """
    low, excess, high, lack = bracket
    at, ratio = jnp.log(trial.threshold), jnp.log(_ratio(trial.count, k))
    over = ratio > 0
    return _Bracket(
        jnp.where(over, at, low),
        jnp.where(over, ratio, jnp.where(lack < 0, excess / 2, excess)),
        jnp.where(over, high, at),
        jnp.where(over, jnp.where(excess > 0, lack / 2, lack), ratio),
    )


def _inside(bracket: _Bracket) -> jax.Array:
    """The threshold for k entries, on the line through both ends of a closed bracket."""
    low, excess, high, lack = bracket
    span = jnp.where(excess > lack, excess - lack, 1.0)
    return jnp.exp((high * excess - low * lack) / span)
