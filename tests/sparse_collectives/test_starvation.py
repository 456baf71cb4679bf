"""No index waits for ever, also in data with a period.

A window over the ranks of too many entries that moves on by its own length is in phase
with data of some period: entries that stay are never in it, and those that it serves
come back in time. Such data are made here for periods 1 to 8 and run through every place
in which entries wait for a slot.

A window that starts at a hash of the step has an entry with probability c / C, with c
slots for C entries, whatever happened before. Of T waits, one of m steps or more then
occurs with probability T (1 - c/C)^m at most, and the bounds below have 1e-6 for that.
The hash is fixed, so that a run of these tests is like any other.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives._coo import compaction
from sparse_collectives.allreduce._parts import _merge, _step
from sparse_collectives.allreduce.ok_topk import _global_selection
from sparse_collectives.wire import _gaps
from tests.reference.windows import longest_wait

PERIODS = range(1, 9)
SLOW = pytest.mark.slow
EVERY_PERIOD, SOME_PERIODS = (PERIODS, 300), ((2, 3, 5), 100)


class Crowd(NamedTuple):
    """Entries in a line, too many for the slots.

    Attributes:
      present: ``bool[period, length]``, who is there at each step.
      watched: one who is there at every step.
      count: how many there are at each step.
    """

    present: np.ndarray
    watched: int
    count: int


def crowd(capacity, period, most):
    """Those whom the window ``[turn c, (turn + 1) c)``, modulo the count, never serves.

    Some stay, and at each step as many as there are slots come: with the very ranks of
    the window, between those who stay. None if no count up to ``most`` has the period.
    """
    for count in range(most, capacity, -1):
        if count // math.gcd(count, capacity) == period:
            break
    else:
        if period > 1:
            return None
        # Always the same: no window that moves starves anyone.
        return Crowd(np.ones((1, most), bool), most // 2, most)
    staying = count - capacity
    in_gap = np.zeros((period, staying + 1), int)
    for turn in range(period):
        ranks = np.sort((turn * capacity + np.arange(capacity)) % count)
        np.add.at(in_gap[turn], ranks - np.arange(capacity), 1)
    columns = []
    for gap, length in enumerate(in_gap.max(0)):
        columns += [in_gap[:, gap] > place for place in range(length)]
        columns += [np.ones(period, bool)] * (gap < staying)
    present = np.stack(columns, axis=1)
    assert (present.sum(1) == count).all()
    stays = np.flatnonzero(present.all(0))
    return Crowd(present, int(stays[len(stays) // 2]), count)


def crowds(capacity, most):
    found = {period: crowd(capacity, period, most) for period in PERIODS}
    return {period: who for period, who in found.items() if who is not None}


def longest_run(waits):
    """The longest run of true values."""
    longest = now = 0
    for waiting in np.asarray(waits):
        now = now + 1 if waiting else 0
        longest = max(longest, now)
    return longest


@pytest.mark.parametrize(("capacity", "most"), [(10, 20), (10, 27), (60, 120), (60, 100)])
def test_a_window_that_moves_on_by_its_length_starves_the_watched(capacity, most):
    """So the data below are what they are meant to be."""
    found = crowds(capacity, most)
    assert len(found) > 3
    for period, who in found.items():
        served = []
        for turn in range(40 * period):
            ranks = (turn * capacity + np.arange(capacity)) % who.count
            served.append(who.watched in np.flatnonzero(who.present[turn % period])[ranks])
        assert any(served) == (period == 1)


# Places by themselves: each says at which steps the watched entry has a slot.


def _positions(present, watched, capacity):
    def served(mask, turn):
        words = compaction.mask_words(lambda start, stop: mask[start:stop], mask.shape[0])
        return jnp.any(compaction.set_positions(words, capacity, mask.shape[0], turn)[0] == watched)

    return jax.vmap(served)(present, jnp.arange(len(present)))


def _entries(mask):
    """A PaddedCOO of the entries that are there, among others in front and behind."""
    slot = jnp.arange(mask.shape[0])
    order = jnp.argsort(jnp.where(mask, slot, mask.shape[0]))
    indices = jnp.where(slot < jnp.sum(mask), 100 + order, mask.shape[0] + 200)
    return sc.PaddedCOO(jnp.ones(mask.shape), indices.astype(jnp.int32), mask.shape[0] + 200)


def _of_split(present, watched, capacity):
    def served(mask, count):
        coo = _entries(mask)
        boundaries = jnp.asarray([0, 50, coo.size, coo.size], jnp.int32)
        blocks = _merge.split(coo, boundaries, capacity, _step.turn(count, 0))
        return jnp.any(blocks.coo.indices[1] == 100 + watched)

    return jax.vmap(served)(present, jnp.arange(len(present)))


def _of_bounded(present, watched, capacity):
    def served(mask, count):
        kept, _ = _merge.bounded(_entries(mask), capacity, _step.turn(count, 3))
        return jnp.any(kept.indices == 100 + watched)

    return jax.vmap(served)(present, jnp.arange(len(present)))


def _one_place_after_the_other(present, watched, capacity):
    """A window over what another one has left: together they have c slots for C entries."""

    def served(mask, count):
        coo = _entries(mask)
        for stage, slots in enumerate((math.ceil(1.1 * capacity), capacity)):
            coo, _ = _merge.bounded(coo, slots, _step.turn(count, stage))
        return jnp.any(coo.indices == 100 + watched)

    return jax.vmap(served)(present, jnp.arange(len(present)))


def _of_gaps(present, watched, capacity):
    """A codec of gaps; each entry takes one slot, and none is an escape."""
    form = _gaps.GapFormat(base=255, digit_bits=8, digits=1)

    def served(mask, count):
        coo = _gaps.as_rows(_entries(mask))
        # One slot more: where a window is joined there may be an escape.
        slots = _gaps.lay_out(coo, capacity + 1, form, _step.turn(count, 0))
        place = jnp.where(coo.indices[0] == 100 + watched, slots.place[0], capacity + 1)
        return jnp.any(place <= capacity)

    return jax.vmap(served)(present, jnp.arange(len(present)))


def _of_global_selection(present, watched, capacity):
    """Two workers with too many above the threshold: each delivers half of the k entries."""

    def served(mask, count):
        def worker(bits):
            selection = _global_selection.select_global(
                bits, jnp.int32(1), 2 * capacity, jnp.int32(0), "workers", _step.turn(count, 2)
            )
            return selection.mask

        crowded = jnp.stack([mask, jnp.ones_like(mask)])
        return sc.simulate(worker, axis_size=2)(2 * crowded.astype(jnp.int32))[0, watched]

    return jax.vmap(served)(present, jnp.arange(len(present)))


PLACES = {
    "positions in a bit mask": _positions,
    "split": _of_split,
    "bounded": _of_bounded,
    "two places": _one_place_after_the_other,
    "gaps": _of_gaps,
    "global selection": _of_global_selection,
}


@pytest.mark.parametrize(("capacity", "most"), [(10, 20), (60, 120), (60, 80)])
@pytest.mark.parametrize("place", PLACES)
def test_no_entry_starves_in_a_place(place, capacity, most):
    steps, found = 400, crowds(capacity, most)
    length = max(who.present.shape[1] for who in found.values())
    run = jax.jit(functools.partial(PLACES[place], capacity=capacity))
    for period, who in found.items():
        present = np.pad(who.present, ((0, 0), (0, length - who.present.shape[1])))
        served = run(present[np.arange(steps) % period], jnp.int32(who.watched))
        assert longest_run(~served) < longest_wait(steps, capacity, who.count), period


# The selectors: what is selected stays, and more reach the threshold than there are slots.

CAPACITY, MOST, LENGTH = 60, 120, 500
DENSITY = CAPACITY / LENGTH
SELECTORS = {
    "threshold": sc.select.threshold(magnitude=1.0, density=DENSITY),
    "threshold_reuse": sc.select.threshold_reuse(density=DENSITY, headroom=0.0, servo=False),
    "threshold_reuse, servo": sc.select.threshold_reuse(density=DENSITY, headroom=0.0),
    "gaussian_k": sc.select.gaussian_k(density=DENSITY, headroom=0.0),
    "redsync": sc.select.redsync(density=DENSITY, headroom=0.0),
    "sidco": sc.select.sidco(density=DENSITY, headroom=0.0),
    "mstopk": sc.select.mstopk(density=DENSITY),
    "adtopk_threshold": sc.select.adtopk_threshold(
        density=DENSITY, steps=10**6, warmup=3, period=10**6, headroom=0.0
    ),
}
# Every second selection is by row, without a threshold.
CALLS = {"adtopk_threshold": 2}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in SELECTORS if name not in CALLS),
        *(pytest.param(name, marks=SLOW) for name in CALLS),
    ],
)
def test_no_entry_starves_in_a_selector(name):
    selector, steps = SELECTORS[name], 300

    def select(now, state):
        for _ in range(CALLS.get(name, 1)):
            coo, state, info = selector.select(now, state)
        return coo, state, info

    @jax.jit
    def run(acc, period, watched):
        def step(state, t):
            # The first step was number 0.
            now = acc[(t + 1) % period]
            coo, state, info = select(now, state)
            # What ``mstopk`` leaves out it does not count.
            crowded = jnp.sum(now > 0) > info.selected
            return state, (jnp.any(coo.indices == watched), crowded)

        # A first step, of smaller values, from which a threshold is taken.
        _, state, _ = select(acc[0] / 2, selector.init(sc.Layout(((LENGTH, 1),))))
        return jax.lax.scan(step, state, jnp.arange(steps))[1]

    for period, who in crowds(CAPACITY, MOST).items():
        acc = np.zeros((max(PERIODS), LENGTH), np.float32)
        acc[:period, : who.present.shape[1]] = who.present
        served, crowded = run(acc, period, who.watched)
        assert np.mean(crowded) > 0.9
        assert longest_run(~served) < longest_wait(steps, CAPACITY, who.count), period


# The algorithms, with error feedback.


class Place(NamedTuple):
    """One place of an algorithm, and how to crowd it.

    Attributes:
      make: the allreduce, of P, the slots c of the place, and n.
      selected: entries that each worker selects at most, as a multiple of c.
      holders: the workers that have the crowd, of P.
      most: the crowd, as a multiple of c.
    """

    make: object
    selected: object
    holders: object
    most: object


def _share(workers):
    return workers


def _one(workers):
    del workers
    return 1


def _first(workers):
    del workers
    return [0]


def _split_place(make):
    """Blocks of c slots, of a worker that has up to P c entries for one owner."""
    return Place(make, _share, _first, lambda P: min(P, 2.5))


ALLREDUCES = {
    "ok_topk": _split_place(
        lambda P, c, n: sc.allreduce.ok_topk(density=P * c / n, slack=1.0, regions="equal")
    ),
    "ok_topk, what fits": Place(
        lambda P, c, n: sc.allreduce.ok_topk(
            density=P * c / n, slack=1.0, regions="equal", balance="never"
        ),
        _share,
        lambda P: list(range(P)),
        lambda P: min(P, 2.5),
    ),
    "ssar_split_allgather, split": _split_place(
        lambda P, c, n: sc.allreduce.ssar_split_allgather(slack=1.0, fill=math.inf)
    ),
    "ssar_split_allgather, allgather": Place(
        lambda P, c, n: sc.allreduce.ssar_split_allgather(slack=float(P), fill=1.0),
        _one,
        lambda P: list(range(P)),
        lambda P: 2,
    ),
    "dsar_split_allgather": _split_place(
        lambda P, c, n: sc.allreduce.dsar_split_allgather(slack=1.0)
    ),
    "ring_sparse, split": _split_place(
        lambda P, c, n: sc.allreduce.ring_sparse(slack=1.0, fill=math.inf)
    ),
    "ring_sparse, on the way": Place(
        lambda P, c, n: sc.allreduce.ring_sparse(slack=float(P), fill=1.0),
        _one,
        lambda P: [1, 2 % P],
        lambda P: 2,
    ),
    "ssar_recursive_double, first": Place(
        lambda P, c, n: sc.allreduce.ssar_recursive_double(capacity=c),
        lambda P: 2.5,
        _first,
        lambda P: 2.5,
    ),
    "ssar_recursive_double, on the way": Place(
        lambda P, c, n: sc.allreduce.ssar_recursive_double(capacity=c),
        _one,
        lambda P: [0, 1],
        lambda P: 2,
    ),
}


@functools.cache
def simulated(selector, allreduce, workers, steps):
    """Whether the watched index was in the total, at each step, and what overflowed."""

    def run(gradients, period, watched):
        def step(carry, t):
            residual, selector_state, state = carry
            acc = residual + gradients[t % period]
            # It grows from the start, and is the largest of all.
            acc = acc.at[watched].add(jnp.where((t == 0) & (acc[watched] > 0), 20.0, 0.0))
            coo, selector_state, _ = selector.select(acc, selector_state)
            total, kept, state, info = allreduce.reduce(coo, state, axis="workers")
            acc = kept.residual(acc, coo)
            total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
            overflow = jax.lax.psum(info.overflow, "workers")
            return (acc, selector_state, state), (total[watched] != 0, overflow)

        size = gradients.shape[1]
        start = jnp.zeros(size), selector.init(size), allreduce.init(size, workers)
        return jax.lax.scan(step, start, jnp.arange(steps))[1]

    return sc.simulate(run, axis_size=workers, in_axes=(0, None, None))


def feeding(who, holders, workers, size):
    """Gradients ``f32[P, 8, n]``: the crowd in the first region, dealt out to the holders."""
    gradients = np.zeros((workers, max(PERIODS), size), np.float32)
    index = np.arange(who.present.shape[1])
    stays = who.present.all(0)
    for phase, present in enumerate(who.present):
        holder = np.asarray(holders)[index % len(holders)]
        gradients[holder, phase, index] = np.where(stays, 1.0, 6.0) * present
    return gradients


def waits_in_an_algorithm(name, workers, capacity, periods, steps):
    """The longest wait of each period, and what is allowed."""
    place = ALLREDUCES[name]
    most = int(place.most(workers) * capacity)
    selected = int(place.selected(workers) * capacity)
    found = crowds(capacity, most)
    length = max(who.present.shape[1] for who in found.values())
    size = workers * (length + 3)
    allreduce = _made(name, workers, capacity, size)
    run = simulated(_selector(selected / size), allreduce, workers, steps)
    for period in set(periods) & set(found):
        who = found[period]
        gradients = feeding(who, place.holders(workers), workers, size)
        delivered, overflow = map(np.asarray, run(gradients, period, who.watched))
        assert (delivered == delivered[0]).all()
        # Some of the crowd waited at nearly every step: the place was crowded.
        assert np.mean(overflow[0] > 0) > 0.8, (name, period)
        # What waited is still there when others come.
        count = who.present.shape[1]
        yield period, longest_run(~delivered[0]), longest_wait(steps, capacity, count)


# All that is not zero.
_selector = functools.cache(lambda density: sc.select.threshold(magnitude=0, density=density))
_made = functools.cache(lambda name, *sizes: ALLREDUCES[name].make(*sizes))


# One with each place; the others differ in what is around it.
QUICK_ALLREDUCES = (
    "ok_topk",
    "ok_topk, what fits",
    "ssar_split_allgather, allgather",
    "dsar_split_allgather",
    "ring_sparse, on the way",
)


def algorithm_cases():
    for name in ALLREDUCES:
        if name in QUICK_ALLREDUCES:
            yield name, 3, 12, *SOME_PERIODS
        for workers, capacity in ((2, 12), (3, 60), (7, 12), (8, 12)):
            yield pytest.param(name, workers, capacity, *EVERY_PERIOD, marks=SLOW)


@pytest.mark.parametrize(
    ("name", "workers", "capacity", "periods", "steps"), list(algorithm_cases())
)
def test_no_index_starves_in_an_algorithm(name, workers, capacity, periods, steps):
    found = list(waits_in_an_algorithm(name, workers, capacity, periods, steps))
    assert found
    for period, longest, allowed in found:
        assert longest < allowed, f"period {period}"
