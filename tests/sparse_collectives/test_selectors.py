"""MSTopK, bucketed, fixed-threshold and random selection against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.select import _scheduled
from tests.reference import selection
from tests.sparse_collectives.helpers import slow_rows
from tests.sparse_collectives.selecting import (
    DTYPES,
    LARGE,
    as_dtype,
    bits_of,
    check,
    check_passing,
    hard_vectors,
    jitted,
    k_of,
)
from tests.sparse_collectives.selecting import SMALL as SIZE

# Magnitudes that a CPU flushes to zero; MSTopK's search does not see them.
SUBNORMAL = ("subnormal", "smallest subnormals")


def selected_at_once(name, acc, capacity, **options):
    selector, select = jitted(name, **options)
    out = select(acc, selector.init(acc.size))
    assert out[2].overflow == 0
    return check(out, acc, capacity)


# MSTopK.


@pytest.mark.parametrize(
    ("size", "density", "samplings", "dtype", "steps"),
    [
        (SIZE, 1e-9, 30, "float32", 3),
        (SIZE, 1e-9, 30, "bfloat16", 3),
        *slow_rows(
            (SIZE, 1e-9, 30, "float16", 3),
            *((SIZE, 0.1, 4, dtype, 3) for dtype in DTYPES),
            *((LARGE, 0.01, samplings, "float32", 2) for samplings in (1, 5, 30)),
        ),
    ],
)
def test_mstopk_is_the_algorithm_of_the_paper(size, density, samplings, dtype, steps):
    selector, select = jitted("mstopk", density=density, samplings=samplings)
    k = k_of(density, size)
    for name, x in hard_vectors(size).items():
        acc, state = as_dtype(x, dtype), selector.init(size)
        for step in range(steps):
            out = select(acc, state)
            state, indices = out[1], check(out, acc, k)
            assert len(indices) == min(k, np.count_nonzero(acc)), name
            # If neighbors are one rounding apart, the rounding of the threshold decides.
            if name not in SUBNORMAL and (samplings == 30 or name != "neighbors"):
                expected = selection.mstopk(acc, k, samplings, step)
                np.testing.assert_array_equal(indices, expected, err_msg=f"{name} {step}")


@pytest.mark.parametrize(
    ("case", "size"), [("normal", SIZE), ("heavy tail", SIZE), *slow_rows(("period", LARGE))]
)
def test_thirty_samplings_of_mstopk_find_the_exact_selection(case, size):
    """This includes a period that a strided sample sees only in part, and extreme scales."""
    k = k_of(0.01, size)
    for seed in range(3):
        acc = selection.hard_vector("normal" if case == "period" else case, size, seed)
        if case == "period":
            acc = np.where(np.arange(size) % 3 == seed, acc, acc * 1e-3).astype(np.float32)
        for scale in (1, 1e-37, 1e34) if case == "normal" else (1,):
            scaled = (acc * scale).astype(np.float32)
            indices = selected_at_once("mstopk", scaled, k, density=0.01)
            np.testing.assert_array_equal(indices, selection.topk(scaled, k))


# Bucketed.


@pytest.mark.parametrize(
    ("size", "density", "bucket", "dtype"),
    [
        (SIZE, 0.5, 97, "bfloat16"),
        # One entry of each bucket, and a bucket larger than n.
        (640, 1e-6, 64, "float32"),
        (SIZE, 0.1, 2**20, "float32"),
        *slow_rows(
            *((SIZE, 0.5, 97, dtype) for dtype in ("float32", "float16")),
            *((SIZE, 0.01, 512, dtype) for dtype in DTYPES),
            *((LARGE, 0.01, bucket, "float32") for bucket in (512, 2**17)),
        ),
    ],
)
def test_bucketed_is_exact_in_every_bucket(size, density, bucket, dtype):
    capacity = size // bucket * k_of(density, bucket)
    capacity += k_of(density, size % bucket) if size % bucket else 0
    for name, x in hard_vectors(size).items():
        acc = as_dtype(x, dtype)
        indices = selected_at_once("bucketed", acc, capacity, density=density, bucket=bucket)
        expected = selection.bucketed(acc, density, bucket)
        np.testing.assert_array_equal(indices, expected, err_msg=name)


@pytest.mark.parametrize("crowd", ["one column", "ties in one bucket", "one group"])
def test_large_entries_that_crowd_one_group(crowd):
    acc = selection.hard_vector("normal", 4096)
    if crowd == "one group":
        acc[512::32] *= 100
    elif crowd == "one column":
        acc[16:1024:32] = 7
    else:
        acc[512:1024] = -1
    indices = selected_at_once("bucketed", acc, 40, density=0.01)
    np.testing.assert_array_equal(indices, selection.bucketed(acc, 0.01, 512))


# A fixed threshold.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [0, 1e-45, 1.0, 1e300])
@pytest.mark.one_in(3)
def test_threshold_gives_slots_in_turn_to_all_that_reach_it(dtype, magnitude):
    k = k_of(0.25, SIZE)
    selector, select = jitted("threshold", magnitude=magnitude, density=0.25)
    with np.errstate(over="ignore"):
        magnitude = np.float32(magnitude)
    for x in hard_vectors(SIZE).values():
        acc, state = as_dtype(x, dtype), selector.init(SIZE)
        for step in range(3):
            out = select(acc, state)
            check_passing(out, acc, k, step)
            state, info = out[1:]
            assert bits_of(info.threshold) == bits_of(magnitude)


# Random.


def draws(size, density, steps, **options):
    """``i32[steps, k]``: the indices of consecutive steps on a vector of ones."""
    selector = sc.select.random_k(density=density, **options)

    def step(state, _):
        coo, state, _ = selector.select(jnp.ones(size), state)
        return state, coo.indices

    return np.asarray(jax.jit(lambda: jax.lax.scan(step, selector.init(size), length=steps)[1])())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [1e-9, 0.9])
def test_zeros_are_drawn_and_not_sent(dtype, density):
    selector, select = jitted("random_k", density=density)
    k = k_of(density, SIZE)
    for x in hard_vectors(SIZE).values():
        acc, state = as_dtype(x, dtype), selector.init(SIZE)
        for _ in range(3):
            drawn = check(select(np.ones_like(acc), state), np.ones_like(acc), k)
            assert len(drawn) == k
            out = select(acc, state)
            state = out[1]
            np.testing.assert_array_equal(check(out, acc, k), drawn[acc[drawn] != 0])


@pytest.mark.parametrize(
    ("size", "density"),
    [(2, 0.5), (3, 0.3), (7, 0.3), (64, 0.02), (65, 0.95), (1000, 0.3), (4096, 0.02)],
)
def test_draws_are_distinct_and_uniform(size, density):
    steps, k = 1500, k_of(density, size)
    indices = draws(size, density, steps)
    assert indices.shape == (steps, k)
    assert (np.diff(indices) > 0).all()
    assert (indices[:, 0] >= 0).all()
    assert (indices[:, -1] < size).all()
    if k < size:
        counts = np.bincount(indices.ravel(), minlength=size)
        # Without replacement the counts vary less, by 1 - k / n.
        spread = (counts - counts.mean()) / math.sqrt(1 - k / size)
        assert selection.chi_square(spread + counts.mean()) < 4


def test_pairs_of_indices_are_uniform_and_gaps_those_of_chance():
    indices = draws(64, 2 / 64, 40_000)
    counts = np.zeros((64, 64))
    np.add.at(counts, (indices[:, 0], indices[:, 1]), 1)
    assert abs(selection.chi_square(counts[np.triu_indices(64, 1)])) < 5
    # Gaps of a random subset are geometric: their deviation is their mean.
    gaps = np.diff(draws(LARGE, 0.01, 20)).ravel()
    assert abs(gaps.std() / gaps.mean() - 1) < 0.03


def test_steps_and_seeds_differ():
    first, second = draws(SIZE, 0.1, 2)
    other = draws(SIZE, 0.1, 1, seed=1)[0]
    for left, right in ((first, second), (first, other), (second, other)):
        assert len(np.intersect1d(left, right)) < 40
    np.testing.assert_array_equal(draws(SIZE, 0.1, 2), [first, second])


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_workers_agree_or_differ_by_option(same):
    axis = None if same else "workers"
    selector = sc.select.random_k(density=0.1, axis=axis)
    select = sc.simulate(selector.select, axis_size=4, in_axes=(0, None))
    indices = np.asarray(select(jnp.ones((4, SIZE)), selector.init(SIZE))[0].indices)
    for left in range(4):
        for right in range(left):
            shared = len(np.intersect1d(indices[left], indices[right]))
            assert shared == 100 if same else shared < 40


@pytest.mark.slow
def test_a_schedule_at_the_density_of_the_selector_is_not_clipped():
    """In float32 the density is above it, by more than half an entry of so many."""
    size, slots = 50_000_000, 15_000_000
    coo = sc.PaddedCOO(jnp.zeros(slots), jnp.full(slots, size), size)
    for density, expected in ((0.3, 0), (0.3001, 1), (0.0, 1)):
        clipped = _scheduled._largest(coo, lambda _, d=density: jnp.float32(d), jnp.int32(0))[2]
        assert clipped == expected, density
