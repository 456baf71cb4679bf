"""No index waits without end in an exchange, even in data with a period.

test_estimators.py and test_threshold_reuse.py check that selectors have the same windows.

A window over the ranks of too many entries that moves on by its own length is in phase
with data of some period: entries that stay are never in it, and served entries return
in time. ``crowds`` makes such data for periods 1 to 8, and they run through every
place in which entries wait for a slot.

A window that starts at a hash of the step has an entry with probability c / C, with c
slots for C entries, whatever happened before. A wait of m steps or more is among T waits
with probability T (1 - c/C)^m at most, and the bounds below set that to 1e-6.
The hash is fixed, so all runs of these tests are alike.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _hash
from sparse_collectives.allreduce._ok_topk import _global_selection
from sparse_collectives.wire import _gaps
from tests.reference.windows import PERIODS, crowds, longest_run, longest_wait
from tests.sparse_collectives import table
from tests.sparse_collectives.helpers import slow_rows

# Two single places, which return whether the watched entry has a slot; the other places are
# crowded in the selectors and in the algorithms below.


def _entries(mask):
    """A PaddedCOO of the entries that are there, with unused indices before and after them."""
    slot = jnp.arange(mask.shape[0])
    order = jnp.argsort(jnp.where(mask, slot, mask.shape[0]))
    indices = jnp.where(slot < jnp.sum(mask), 100 + order, mask.shape[0] + 200)
    return sc.PaddedCOO(jnp.ones(mask.shape), indices.astype(jnp.int32), mask.shape[0] + 200)


def _of_gaps(mask, count, watched, capacity):
    """A codec of gaps; each entry takes one slot, and none is an escape."""
    form = _gaps.GapFormat(base=255, digit_bits=8, digits=1)
    coo = _gaps.as_rows(_entries(mask))
    # One slot more, since there may be an escape at the joint of a window.
    slots = _gaps.lay_out(coo, capacity + 1, form, _hash.turn(count, 0))
    place = jnp.where(coo.indices[0] == 100 + watched, slots.place[0], capacity + 1)
    return jnp.any(place <= capacity)


def _of_global_selection(mask, count, watched, capacity):
    """Two workers with too many above the threshold: each delivers half of the k entries."""

    def worker(bits):
        selection = _global_selection.select_global(
            bits, jnp.int32(1), 2 * capacity, jnp.int32(0), "workers", _hash.turn(count, 2)
        )
        return selection.mask

    crowded = jnp.stack([mask, jnp.ones_like(mask)])
    return sc.simulate(worker, axis_size=2)(2 * crowded.astype(jnp.int32))[0, watched]


PLACES = {"gaps": _of_gaps, "global selection": _of_global_selection}


@pytest.mark.parametrize(("capacity", "most"), [(10, 20), (60, 120), (60, 80)])
@pytest.mark.parametrize("place", PLACES)
def test_starvation_of_an_entry_in_a_place(place, capacity, most):
    steps, found = 400, crowds(capacity, most)
    assert len(found) > 3
    length = max(who.present.shape[1] for who in found.values())
    served_in = jax.vmap(functools.partial(PLACES[place], capacity=capacity), (0, 0, None))
    run = jax.jit(lambda present, watched: served_in(present, jnp.arange(steps), watched))
    for period, who in found.items():
        present = np.pad(who.present, ((0, 0), (0, length - who.present.shape[1])))
        served = run(present[np.arange(steps) % period], jnp.int32(who.watched))
        assert longest_run(~served) < longest_wait(steps, capacity, who.count), period


class Place(NamedTuple):
    """One place of an algorithm with c slots, and how to crowd it."""

    # The options of the allreduce, from P and c.
    options: Callable[[int, int], dict[str, Any]]
    # Entries that each worker selects at most, as a multiple of c.
    selected: Callable[[int], float]
    # The workers that have the crowd, and how large it is, as a multiple of c.
    holders: Callable[[int], list[int]]
    most: Callable[[int], float]


def _split(**options):
    """Blocks of c slots, for a worker that has up to P c entries for one owner."""
    return Place(lambda P, c: options, lambda P: P, lambda P: [0], lambda P: min(P, 2.5))


def _later(holders, options):
    """A place where c entries of each of the holders come together."""
    return Place(options, lambda P: 1, holders, lambda P: 2)


def _roomy(P, c):
    return {"slack": float(P), "fill": 1.0}


def _everyone(P):
    return list(range(P))


EQUAL = {"slack": 1.0, "regions": "equal"}
CROWDED = {
    "ok_topk": _split(**EQUAL),
    "ok_topk, what fits": _split(**EQUAL, balance="never")._replace(holders=_everyone),
    "ssar_split_allgather, split": _split(slack=1.0, fill=math.inf),
    "ssar_split_allgather, allgather": _later(_everyone, _roomy),
    "dsar_split_allgather": _split(slack=1.0),
    "ring_sparse, split": _split(slack=1.0, fill=math.inf),
    "ring_sparse, on the way": _later(lambda P: [1, 2 % P], _roomy),
    "ssar_recursive_double, first": Place(
        lambda P, c: {"capacity": c}, lambda P: 2.5, lambda P: [0], lambda P: 2.5
    ),
    "ssar_recursive_double, on the way": _later(lambda P: [0, 1], lambda P, c: {"capacity": c}),
}


@functools.cache
def simulated(selector, allreduce, workers, steps):
    """Whether the watched index was in the total at each step, and the overflow."""

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


# It selects all nonzero entries.
_selector = functools.cache(lambda density: sc.select.threshold(magnitude=0, density=density))

# One case for each place; the others have the same place in another algorithm.
QUICK = ("ok_topk", "ok_topk, what fits", "ssar_split_allgather, allgather")
QUICK += ("dsar_split_allgather", "ring_sparse, on the way")
CASES = [(name, 3, 12, (2, 3, 5), 100) for name in QUICK]
CASES += slow_rows(
    *(
        (name, *size, PERIODS, 300)
        for name in CROWDED
        for size in ((2, 12), (3, 60), (7, 12), (8, 12))
    )
)


@pytest.mark.parametrize(("name", "workers", "capacity", "periods", "steps"), CASES)
@pytest.mark.one_in(2)
def test_starvation_of_an_index_in_an_algorithm(name, workers, capacity, periods, steps):
    place = CROWDED[name]
    most = int(place.most(workers) * capacity)
    selected = int(place.selected(workers) * capacity)
    found = crowds(capacity, most)
    length = max(who.present.shape[1] for who in found.values())
    size = workers * (length + 3)
    allreduce = table.make(
        name.partition(",")[0], workers * capacity / size, **place.options(workers, capacity)
    )
    run = simulated(_selector(selected / size), allreduce, workers, steps)
    assert set(periods) & set(found)
    for period in set(periods) & set(found):
        who = found[period]
        gradients = feeding(who, place.holders(workers), workers, size)
        delivered, overflow = map(np.asarray, run(gradients, period, who.watched))
        assert (delivered == delivered[0]).all()
        # Some of the crowd waited at nearly every step: the place was crowded.
        assert np.mean(overflow[0] > 0) > 0.8, period
        # Waiting entries are still there when others come.
        allowed = longest_wait(steps, capacity, who.present.shape[1])
        assert longest_run(~delivered[0]) < allowed, period
