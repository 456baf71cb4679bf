"""Agreed and shared indices: against the reference, over steps, in words, and at their edges.

tests/optax_ext/test_waits.py checks that few bits starve no entry next to a far larger one, and
tests/optax_ext/test_largest_gradients.py that sums of large numbers stay finite.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _hash
from sparse_collectives.allreduce import _partitioned_topk
from sparse_collectives.allreduce._parts import _partitions, _sums
from sparse_collectives.cost_model import Workload, predict
from tests.reference import partitioned_topk as reference
from tests.sparse_collectives.helpers import completed, run_once, slow, slow_rows


def partitioned_topk_steps(size, workers, density, bits=32, limit=None):
    allreduce = sc.allreduce.partitioned_topk(bits=bits, density=limit)
    return completed(sc.select.topk(density=density), allreduce, size, workers)


def gradients(steps, workers, size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((steps, workers, size)).astype(np.float32)


SIZES = [(403, 8), *slow_rows((1, 3), (5, 8), (403, 2), (403, 3), (403, 7), (40_000, 3))]


@pytest.mark.parametrize(("size", "workers"), SIZES)
def test_equals_the_reference_over_steps(size, workers):
    """This includes entries that only one worker has, in the part of another one."""
    density = 0.05
    (run, states), residual = partitioned_topk_steps(size, workers, density), 0.0
    parts = _partitions.make_partitions(size, workers)
    owner = reference.part_of_each_index(size, workers, parts.block, parts.rounds)
    k_each = max(1, round(density * parts.width))
    given = gradients(2 * workers, workers, size)
    given[:, 1:, ::3] = 0
    for count, gradient in enumerate(given):
        acc = np.asarray(residual + gradient, np.float32)
        out, states = run(acc, states)
        total, expected = reference.step(acc, count, k_each, owner)
        np.testing.assert_allclose(out["total"][0], total, rtol=0, atol=1e-5)
        # Sent entries are 0 to the last bit on every worker; the rest is untouched.
        np.testing.assert_array_equal(np.asarray(out["kept"]), expected.astype(np.float32))
        residual = np.asarray(out["kept"])
        assert out["info"].delivered[0] == np.sum(total != 0)


@pytest.mark.parametrize("bits", [32, *slow(16, 8)])
@pytest.mark.parametrize("workers", [16, *slow(2, 5)])
def test_partitioned_topk_keeps_a_rounding_of_an_entry_that_went(bits, workers):
    size = 2_000
    (run, states), residual = partitioned_topk_steps(size, workers, 0.02, bits), 0.0
    for gradient in gradients(workers + 2, workers, size, seed=1):
        acc = residual + gradient
        out, states = run(acc, states)
        residual, total = np.asarray(out["kept"]), np.asarray(out["total"])
        missing = acc.sum(0, dtype=np.float64) - total[0] - residual.sum(0, dtype=np.float64)
        # Additions of P float32.
        assert (np.abs(missing) <= workers * 2.0**-24 * np.abs(acc).sum(0)).all()
        if bits < 32:
            # 1/4 of a step; 2**(bits - 1) / P steps, or half as many, make the largest magnitude of
            # a bucket. (A few entries that are larger than all selected ones are cut.)
            sent = total[0] != 0
            share = np.median(np.abs(residual[:, sent])) / np.abs(acc[:, sent]).max()
            assert share < workers / 2**bits


@pytest.mark.parametrize("bits", [32, *slow(16)])
def test_entries_of_other_parts_wait(bits):
    """A selection may be made from the whole accumulator; a worker then sends its own part."""
    size, workers, selector = 403, 4, sc.select.topk(density=0.2)
    acc = gradients(1, workers, size)[0]
    out = run_once(selector, sc.allreduce.partitioned_topk(bits=bits), acc)
    parts = _partitions.make_partitions(size, workers)
    owner = reference.part_of_each_index(size, workers, parts.block, parts.rounds)
    others = (np.asarray(out["sent"]) != 0) & (owner != np.arange(workers)[:, None])
    np.testing.assert_array_equal(out["info"].overflow, others.sum(axis=1))
    assert others.any(axis=1).all()
    # Except for entries that their owner sends, with the values of all workers.
    waits = others & (np.asarray(out["total"]) == 0)
    np.testing.assert_array_equal(out["kept"][waits], acc[waits])


@pytest.mark.slow
def test_partitioned_topk_lets_more_than_the_density_wait_in_turn():
    size, workers, steps = 800, 2, 60
    run, states = partitioned_topk_steps(size, workers, 0.2, limit=0.05)
    acc, seen = np.ones((workers, size), np.float32), np.zeros(size, bool)
    for _ in range(steps):
        out, states = run(acc, states)
        delivered = np.asarray(out["total"][0]) != 0
        assert delivered.sum() == 40
        assert (np.asarray(out["info"].overflow) == 60).all()
        seen |= delivered
    # The same entries are the first of equal ones at each step, and it is these that take turns.
    assert seen.sum() > 150


@pytest.mark.parametrize("bits", [32, (1, 3), *slow(16, (2, 4))])
@pytest.mark.parametrize("value", [np.nan, *slow(np.inf)])
def test_partitioned_topk_sends_what_is_not_finite_to_everyone_and_keeps_none_of_it(bits, value):
    size, workers = 403, 3
    run, states = partitioned_topk_steps(size, workers, 0.05, bits)
    acc = gradients(1, workers, size)[0]
    acc[1, 17] = value
    reached = False
    for _ in range(workers):
        out, states = run(acc, states)
        acc = np.asarray(out["kept"])
        reached = reached or not np.isfinite(np.asarray(out["total"])[:, 17]).any()
    assert reached
    assert np.isfinite(acc).all()


def test_without_a_choice_the_bits_fit_any_number_of_workers():
    for workers, bits in ((2**15 - 1, 16), (2**15, 32), (10**6, 32)):
        assert _partitioned_topk.make_plan(10**6, 1000, workers, None, None).bits == bits
    with pytest.raises(ValueError, match="bits=16 is too few for the sum of 32768 workers"):
        _partitioned_topk.make_plan(10**6, 1000, 2**15, None, 16)


@pytest.mark.parametrize(("workers", "bits"), [(2, 8), (8, 8), (9, 10), (34, 10), (35, 16)])
def test_few_bits_are_enough_for_fifteen_steps(workers, bits):
    """The words for 1 % are as in the docstring; test_cost_model_programs.py counts them."""
    assert _partitioned_topk.make_plan(10**6, 1000, workers, None, None).bits == bits
    assert _sums.half(bits, workers) >= 15
    load = Workload(10**6, 10**4, workers)
    share = load.selected * (workers - 1) / workers
    exact, few = (
        predict(name, load).upper.words for name in ("partitioned_topk", "partitioned_topk(few)")
    )
    assert exact == pytest.approx(3 * share, rel=0.01)
    assert few <= (2 / (32 // bits) + 0.4) * share


@pytest.mark.parametrize(
    ("workers", "bits"), [(1, 16), (2, 16), (7, 16), (7, 10), (127, 8), *slow_rows((1024, 16))]
)
def test_integers_of_few_bits_add_up_exactly(workers, bits):
    rng = np.random.default_rng(0)
    largest = _sums.half(bits, workers)
    integers = rng.integers(-largest, largest + 1, (workers, 33))
    integers[:, 0], integers[:, 1] = largest, -largest
    words = [np.asarray(_sums.pack(jnp.asarray(row), largest, bits)) for row in integers]
    total = functools.reduce(lambda a, b: jnp.asarray(a) + jnp.asarray(b), words)
    sums = _sums.unpack(jnp.asarray(total), 33, largest, bits, workers)
    np.testing.assert_array_equal(sums, integers.sum(0))


# Magnitudes of a bucket, as powers of two, and the least share of turns for an entry of each: at
# half of the turns a magnitude is drawn from the range of those that round to 0.
MIXES = {
    "one far above": ([(255, 0), (1, 100)], 1 / 2),
    "all but one far above": ([(1, -60), (255, 60)], 1 / 2),
    "three scales": ([(200, -20), (50, 0), (6, 20)], 1 / 4),
    "a ladder": ([(2, 2 * octave) for octave in range(-60, 60)], 1 / 128),
    "tiny": ([(255, -120), (1, 100)], 1 / 2),
}


@pytest.mark.parametrize("largest", [15, 127])
@pytest.mark.parametrize("mix", MIXES)
def test_partitioned_topk_rounds_no_value_of_a_bucket_to_zero_for_long(mix, largest):
    groups, share = MIXES[mix]
    exponents = np.concatenate([np.full(count, octave) for count, octave in groups])
    values = jnp.asarray(np.exp2(exponents).astype(np.float32))
    turns = 4_000

    def sent(turn):
        step = _sums.steps(values, largest, turn)
        return _sums.rounded(values, _sums.of_slots(step, len(values)), largest) != 0

    served = np.asarray(jax.vmap(sent)(_hash.turn(jnp.arange(turns), 0)))
    # Four deviations below the expected share.
    least = share - 4 * math.sqrt(share / turns)
    assert (served.mean(0) >= least).all()
    # The largest is sent in full at half of the turns or more.
    assert served[:, exponents == exponents.max()].all()


def shared_steps(acc, steps, *options, **named):
    """Totals and residuals of ``acc f[P, n]``, to which each step adds the same again."""
    workers, size = acc.shape
    allreduce, left = sc.allreduce.shared_random(*options, **named), acc
    run, states = completed(sc.select.topk(density=0.5), allreduce, size, workers)
    for _ in range(steps):
        out, states = run(left, states)
        yield np.asarray(out["total"]), np.asarray(out["kept"]), out["info"]
        left = out["kept"] + acc


def whole_numbers(workers, size):
    return jnp.asarray(np.random.default_rng(0).integers(1, 99, (workers, size)), jnp.float32)


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
@pytest.mark.parametrize(("size", "density"), [(97, 0.1), (12, 0.25), (7, 1.0), (1, 1.0)])
@pytest.mark.one_in(3)
def test_shared_random_permutation_delivers_every_index_once_and_all_of_it(workers, size, density):
    acc = whole_numbers(workers, size)
    k = max(1, round(density * size))
    turns, delivered = -(-size // k), []
    had = np.asarray(acc)
    for total, kept, info in shared_steps(acc, 2 * turns, density):
        drawn = np.flatnonzero(total[0])
        # All workers' values at the drawn indices are sent, and nothing else.
        np.testing.assert_array_equal(total, np.tile(total[0], (workers, 1)))
        np.testing.assert_array_equal(total[0, drawn], had.sum(0)[drawn])
        assert not kept[:, drawn].any()
        np.testing.assert_array_equal(np.delete(kept, drawn, 1), np.delete(had, drawn, 1))
        assert set(np.asarray(info.delivered)) == {len(drawn)}
        np.testing.assert_allclose(info.words, 2 * k * (workers - 1) / workers, rtol=1e-6)
        delivered.append(drawn)
        had = kept + np.asarray(acc)
    for part in (delivered[:turns], delivered[turns:]):
        assert sorted(np.concatenate(part)) == list(range(size))
    if size > 20:
        assert any(set(a) != set(b) for a, b in zip(delivered, delivered[turns:], strict=False))


def test_shared_random_draws_others_with_another_seed():
    acc = whole_numbers(2, 97)
    first, second = (next(shared_steps(acc, 1, 0.1, seed=seed))[0] for seed in (0, 1))
    assert set(np.flatnonzero(first[0])) != set(np.flatnonzero(second[0]))


@pytest.mark.parametrize("selected", [40, 0])
def test_shared_random_gives_what_was_selected_and_nothing_for_nothing(selected):
    """Skipping a step relies on this: the workers keep all of their values."""
    allreduce, acc = sc.allreduce.shared_random(0.2), whole_numbers(3, 40)

    def step(acc):
        indices = jnp.where(jnp.arange(40) < selected, jnp.arange(40), 40)
        coo = sc.PaddedCOO(jnp.where(indices < 40, acc, 0), indices.astype(jnp.int32), 40)
        given = {} if selected else {"acc": acc}
        total, undelivered, *_ = allreduce.reduce(coo, allreduce.init(40, 3), axis="w", **given)
        return total.to_dense(), undelivered.residual(acc, coo)

    total, kept = map(np.asarray, sc.simulate(step, axis="w", axis_size=3)(acc))
    np.testing.assert_array_equal(total[0] + kept.sum(0), np.asarray(acc).sum(0))
    assert np.count_nonzero(total[0]) == (8 if selected else 0)
