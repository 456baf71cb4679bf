"""Ok-Topk against the oracle, and its phases one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import (
    _global_selection,
    _regions,
    _split_reduce,
)
from tests.reference import ok_topk as oracle
from tests.sparse_collectives import helpers


def reduced(acc, density, **options):
    """One step with room for everything, unless ``options`` say otherwise."""
    options = {"slack": float(2 * len(acc)), **options}
    return helpers.run_once(*_algorithm(density, tuple(options.items())), acc)


@functools.cache
def _algorithm(density, options):
    return sc.select.topk(density=density), sc.allreduce.ok_topk(density=density, **dict(options))


@pytest.mark.parametrize(
    ("workers", "density"),
    [
        pytest.param(
            workers,
            density,
            marks=() if density == 0.05 or workers in (3, 8) else pytest.mark.slow,
        )
        for density in (1 / 300, 0.05, 1.0)
        for workers in helpers.WORKERS
    ],
)
def test_equals_topk_of_the_sum_of_topk(workers, density):
    size = 300
    k = max(1, round(density * size))
    for name, acc in helpers.hard_accumulators(workers, size).items():
        if name == "subnormal":
            continue  # has its own test
        out = reduced(acc, density)
        total, residuals = oracle.training_step(acc, k)
        assert (np.asarray(out["info"].overflow) == 0).all(), name
        got = np.asarray(out["total"], np.float64)[0]
        # Sums of equal magnitude tie in exact arithmetic and not always in
        # float32, and then another of them is taken: compare the magnitudes.
        scale = np.abs(acc).max() * 1e-6 * workers
        np.testing.assert_allclose(
            np.sort(np.abs(got)), np.sort(np.abs(total)), rtol=1e-5, atol=scale, err_msg=name
        )
        if name in ("normal", "one worker", "one region", "heavy tail", "disjoint"):
            np.testing.assert_allclose(got, total, rtol=1e-5, atol=scale, err_msg=name)
            kept = acc - np.asarray(out["sent"]) + np.asarray(out["kept"])
            np.testing.assert_array_equal(kept, residuals, name)


@pytest.mark.parametrize("workers", [2, 6])
def test_equals_the_composition_of_lax_primitives(workers):
    """top_k, a dense psum, top_k."""
    acc = helpers.hard_accumulators(workers, 300)["normal"]
    k = 15

    def compose(acc):
        values = jnp.zeros(300).at[jax.lax.top_k(jnp.abs(acc), k)[1]].set(1.0) * acc
        total = jax.lax.psum(values, "workers")
        return jnp.zeros(300).at[jax.lax.top_k(jnp.abs(total), k)[1]].set(1.0) * total

    expected = sc.simulate(compose, axis_size=workers)(acc)
    np.testing.assert_allclose(reduced(acc, 0.05)["total"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", helpers.WORKERS)
def test_delivers_exactly_k_or_all_nonzeros(workers):
    size, density = 300, 0.05
    for name, acc in helpers.hard_accumulators(workers, size).items():
        out = reduced(acc, density)
        nonzeros = np.count_nonzero(np.asarray(out["sent"]).sum(axis=0))
        delivered = np.count_nonzero(np.asarray(out["total"])[0])
        assert delivered == out["info"].delivered[0], name
        if name == "subnormal":
            assert delivered == 0
            np.testing.assert_array_equal(out["kept"], out["sent"])
        elif name not in ("cancelling", "ties"):  # where a float32 sum may miss zero
            assert delivered == min(15, nonzeros), name


def test_schedules_and_bucket_sizes_give_the_same_bits():
    workers = 5
    acc = helpers.hard_accumulators(workers, 403)["normal"]
    reference = reduced(acc, 0.05, schedule="all_to_all")
    for bucket_size in (1, 2, 100):
        out = reduced(acc, 0.05, schedule="rotation", bucket_size=bucket_size)
        for name in ("total", "kept"):
            np.testing.assert_array_equal(out[name], reference[name])


def test_unlimited_slack_has_room_for_everything():
    acc = helpers.hard_accumulators(4, 300)["one region"]
    out = reduced(acc, 0.05, slack=float("inf"))
    assert (np.asarray(out["info"].overflow) == 0).all()
    total, _ = oracle.training_step(acc, 15)
    np.testing.assert_allclose(np.asarray(out["total"])[0], total, rtol=1e-5)


def test_a_buffer_of_two_thousand_million_entries_lowers():
    """Sums over workers pass 2**31 where the entries of one do not."""
    words = sc.traffic.of_allreduce(
        sc.allreduce.ok_topk(density=0.01), size=2**31 - 1, capacity=21_474_836, axis_size=1024
    ).words
    assert words < 7.5 * 21_474_836


def test_a_reused_global_threshold_delivers_k_at_most_and_follows_the_count():
    size, density, workers = 2000, 0.05, 4
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(density=density, global_period=8)
    rng = np.random.default_rng(0)
    state = allreduce.init(size, workers)
    counts = []
    for step in range(32):
        acc = rng.standard_normal((workers, size)).astype(np.float32) * 1.02**step
        out = helpers.run_once(selector, allreduce, acc, state)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        counts.append(int(out["info"].delivered[0]))
    assert max(counts) <= 100
    assert counts[::8] == [100] * 4
    assert np.mean(counts) > 85


def test_in_a_full_block_other_entries_wait_at_each_step():
    """Everything of all workers in one region of fixed boundaries: still none starves."""
    workers, size, density = 4, 400, 0.1
    acc = np.zeros((workers, size), np.float32)
    acc[:, :40] = 1.0 + np.arange(40) / 100
    selector = sc.select.topk(density=density)
    allreduce = sc.allreduce.ok_topk(density=density, slack=1.0, repartition_period=1000)
    state = allreduce.init(size, workers)
    delivered = np.zeros(size, bool)
    for _ in range(8):
        frozen = state._replace(
            boundaries=jnp.asarray([0, 100, 200, 300, 400], jnp.int32), crowded=jnp.bool_(False)
        )
        frozen = frozen._replace(count=jnp.maximum(state.count, 1))
        out = helpers.run_once(selector, allreduce, acc, frozen)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        delivered |= np.asarray(out["total"])[0] != 0
    assert delivered[:40].all()


def test_crowded_regions_are_cut_anew_before_their_period():
    workers, size = 8, 4000
    acc = helpers.hard_accumulators(workers, size)["one region"]
    selector, allreduce = sc.select.topk(density=0.02), sc.allreduce.ok_topk(density=0.02)
    even = allreduce.init(size, workers)
    # As in the middle of a period, with the mass moved away from the regions.
    state = even._replace(count=jnp.int32(5), crowded=jnp.bool_(False))
    first = helpers.run_once(selector, allreduce, acc, state)
    assert first["allreduce_state"].crowded.all()
    state = jax.tree.map(lambda x: x[0], first["allreduce_state"])
    second = helpers.run_once(selector, allreduce, acc, state)
    assert 4 * np.sum(second["info"].overflow) < np.sum(first["info"].overflow)
    assert not second["allreduce_state"].crowded.any()


# Regions.


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_local_boundaries_split_the_selection_evenly(workers):
    rng = np.random.default_rng(1)
    indices = np.sort(rng.choice(5000, 500, replace=False)).astype(np.int32)
    padded = np.concatenate([indices, np.full(77, 5000, np.int32)])
    coo = sc.PaddedCOO(jnp.zeros(577), jnp.asarray(padded), 5000)
    boundaries = np.asarray(_regions.local_boundaries(coo, workers))
    counts = np.histogram(indices, boundaries)[0]
    assert boundaries[0] == 0
    assert boundaries[-1] == 5000
    assert counts.sum() == 500
    assert counts.max() - counts.min() <= 1


def test_consensus_is_the_mean_of_the_local_boundaries():
    workers, size = 3, 900
    rng = np.random.default_rng(2)
    indices = np.sort(
        np.stack([rng.choice(size, 90, replace=False) for _ in range(workers)]), axis=1
    ).astype(np.int32)

    def agree(indices):
        coo = sc.PaddedCOO(jnp.zeros(90), indices, size)
        return _regions.consensus(coo, workers, "workers"), _regions.local_boundaries(coo, workers)

    agreed, local = sc.simulate(agree, axis_size=workers)(indices)
    assert (np.asarray(agreed) == np.asarray(agreed)[0]).all()
    assert np.abs(np.asarray(agreed)[0] - np.asarray(local).mean(axis=0)).max() <= workers


def test_an_empty_selection_has_regions_of_equal_width():
    coo = sc.PaddedCOO(jnp.zeros(4), jnp.full(4, 100, jnp.int32), 100)
    assert _regions.local_boundaries(coo, 4).tolist() == [0, 25, 50, 75, 100]


# Split and reduce.


def test_rotation_has_each_worker_receive_from_one_other_at_a_time():
    jaxpr = str(
        jax.make_jaxpr(
            lambda x: jnp.concatenate(
                list(_split_reduce.exchange(x, "w", schedule="rotation", bucket_size=2))
            ),
            axis_env=[("w", 4)],
        )(jnp.zeros((4, 6), jnp.int32))
    )
    for distance in (1, 2, 3):
        pairs = tuple((i, (i + distance) % 4) for i in range(4))
        assert str(pairs).replace(" ", "") in jaxpr.replace(" ", "")


def test_reduce_blocks_adds_common_indices():
    size = 70
    rng = np.random.default_rng(3)
    expected = np.zeros(size)
    blocks = []
    for rows in (1, 3):
        indices = np.full((rows, 12), size, np.int32)
        values = np.zeros((rows, 12), np.float32)
        for row in range(rows):
            count = rng.integers(0, 12)
            chosen = np.sort(rng.choice(size, count, replace=False))
            indices[row, :count] = chosen
            values[row, :count] = rng.standard_normal(count)
            expected[chosen] += values[row, :count]
        blocks.append(sc.PaddedCOO(jnp.asarray(values), jnp.asarray(indices), size))
    out = _split_reduce.reduce_blocks(blocks, size, jnp.float32)
    np.testing.assert_allclose(out.to_dense(), expected, atol=1e-6)
    used = np.asarray(out.indices)[: int(out.count())]
    assert (np.diff(used) > 0).all()


# Global selection.


@pytest.mark.parametrize("k", [1, 37, 2000, 70_000])
def test_digits_cover_all_bits_within_their_share(k):
    digits = _global_selection.digits(k)
    top = 31
    for shift, width in digits:
        assert shift + width == top
        top = shift
    assert top == 0
    if k >= 2000:
        assert sum(2 << width for _, width in digits) <= k / 5


@pytest.mark.parametrize("k", [1, 40, 3000, 70_000])
def test_global_threshold_is_the_kth_of_the_union(k):
    workers, slots = 3, 40_000
    rng = np.random.default_rng(4)
    values = rng.standard_cauchy((workers, slots)).astype(np.float32)
    values[:, ::7] = 0
    bits = np.abs(values).view(np.int32)
    find = sc.simulate(
        lambda b: _global_selection.global_threshold(b, k, "workers"), axis_size=workers
    )
    expected = np.sort(bits.reshape(-1))[-k]
    assert np.asarray(find(bits)).tolist() == [expected] * workers


def test_global_threshold_with_fewer_than_k_nonzeros_is_the_smallest():
    bits = np.zeros((2, 50), np.int32)
    bits[0, :3] = [9, 77, 5]
    bits[1, 4] = 12345678
    for wanted, values in ((5, bits), (0, np.zeros_like(bits))):
        find = sc.simulate(
            lambda b: _global_selection.global_threshold(b, 10, "workers"), axis_size=2
        )
        assert find(values).tolist() == [wanted] * 2


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in"),
        ({"density": 1.5}, "density must be in"),
        ({"density": "0.1"}, "density must be a number"),
        ({"density": 0.1, "slack": 0.5}, "slack must be a number"),
        ({"density": 0.1, "repartition_period": 0}, "repartition_period must be an integer"),
        ({"density": 0.1, "global_period": 1.5}, "global_period must be an integer"),
        ({"density": 0.1, "schedule": "ring"}, "'rotation', 'all_to_all'"),
        ({"density": 0.1, "bucket_size": 0}, "bucket_size must be an integer"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sc.allreduce.ok_topk(**options)


def test_an_unbound_axis_is_named_with_what_to_write():
    allreduce = sc.allreduce.ok_topk(density=0.5)
    coo = sc.PaddedCOO(jnp.ones(2), jnp.arange(2), 4)
    with pytest.raises(ValueError, match=r"axis='nodes' is not bound.*shard_map.*axis_name"):
        allreduce.reduce(coo, allreduce.init(4, 2), axis="nodes")


def test_a_state_for_other_workers_is_rejected():
    allreduce = sc.allreduce.ok_topk(density=0.5)
    acc = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="made for 3 workers, but the axis has 4"):
        helpers.run_once(sc.select.topk(density=0.5), allreduce, acc, allreduce.init(8, 3))
