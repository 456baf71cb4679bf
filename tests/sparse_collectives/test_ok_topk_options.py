"""What Ok-Topk can leave out, for ablations: regions that follow the data, and balancing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.reference import windows
from tests.sparse_collectives import helpers

SIZE, WORKERS, DENSITY = 400, 4, 0.1
K = 40
SELECTOR = sc.select.topk(density=DENSITY)


@functools.cache
def allreduce(**options):
    return sc.allreduce.ok_topk(density=DENSITY, **options)


def run(acc, state=None, **options):
    out = helpers.run_once(SELECTOR, allreduce(**options), acc, state)
    sent, kept, total = (np.asarray(out[name], np.float64) for name in ("sent", "kept", "total"))
    np.testing.assert_allclose(sent.sum(axis=0) - kept.sum(axis=0), total[0], atol=1e-4)
    return out


@functools.cache
def scopes(balance="auto", regions="hashed", conditional="worst"):
    return sc.traffic.of_allreduce(
        allreduce(balance=balance, regions=regions),
        size=SIZE,
        capacity=K,
        axis_size=WORKERS,
        conditional=conditional,
    ).by_scope(depth=2)


def crowded():
    """All entries in one region of equal regions."""
    acc = helpers.hard_accumulators(WORKERS, SIZE)["one region"]
    return np.where(np.arange(SIZE) < SIZE // WORKERS, acc + np.sign(acc), 0).astype(np.float32)


@pytest.mark.slow
def test_equal_regions_stay_and_overflow_where_the_selection_is_uneven():
    options = {"regions": "equal", "balance": "always"}
    state = allreduce(**options).init(SIZE, WORKERS)
    for _ in range(3):
        out = run(crowded(), state, **options)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        assert state.boundaries.tolist() == [0, 100, 200, 300, 400]
        # A block has ceil(1.25 k / P) = 13 slots, and all 40 entries are for one owner.
        assert np.asarray(out["info"].overflow).tolist() == [K - 13] * WORKERS
    for others in ("balanced", "hashed"):
        overflow = np.asarray(run(crowded(), regions=others)["info"].overflow).sum()
        assert overflow < WORKERS * (K - 13) / 2
    assert not any("repartition" in scope for scope in scopes("always", "equal"))
    assert not any("repartition" in scope for scope in scopes())
    assert any("repartition" in scope for scope in scopes("auto", "balanced"))


@pytest.mark.slow
def test_always_balancing_moves_everything_and_delivers_the_same():
    rng = np.random.default_rng(0)
    acc = rng.standard_normal((WORKERS, SIZE)).astype(np.float32)
    options = {"regions": "equal", "balance": "always"}
    out = run(acc, **options)
    np.testing.assert_array_equal(out["total"], run(acc, regions="equal")["total"])
    words = scopes("always", "equal")
    # A block of ceil(k / P) pairs to each of the others.
    assert words["ok_topk/balance"] == 2 * 10 * (WORKERS - 1)
    assert round(float(out["info"].words[0])) == round(sum(words.values()))


def never_balanced(acc, step):
    options = {"regions": "equal", "balance": "never", "slack": 1.25}
    state = allreduce(**options).init(SIZE, WORKERS)._replace(count=jnp.int32(step))
    return run(acc, state, **options)


@pytest.mark.slow
def test_without_balancing_what_does_not_fit_waits_and_not_always_the_same():
    # The first worker's region has all 13 entries that blocks have room for, of each
    # worker other ones: 52 sums for 13 slots of the allgather.
    acc = np.zeros((WORKERS, SIZE), np.float32)
    for worker in range(WORKERS):
        acc[worker, 13 * worker : 13 * (worker + 1)] = 1 + np.arange(13)
    delivered = np.zeros(SIZE, bool)
    for step in range(windows.steps_for_all(13, K)):
        out = never_balanced(acc, step)
        assert int(out["info"].delivered[0]) == 13
        # 40 are selected, and their owner is the first worker.
        assert np.asarray(out["info"].overflow).tolist() == [K - 13, 0, 0, 0]
        arrived = np.asarray(out["total"])[0] != 0
        np.testing.assert_array_equal(np.asarray(out["kept"])[:, ~arrived], acc[:, ~arrived])
        delivered |= arrived
    assert delivered.sum() == K
    words = scopes("never", "equal")
    assert "ok_topk/balance" not in words
    assert round(float(out["info"].words[0])) == round(sum(words.values()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_without_balancing_even_selections_are_delivered_in_full(workers):
    acc = np.zeros((workers, SIZE), np.float32)
    acc[:, ::10] = 1 + np.arange(SIZE // 10)
    out = helpers.run_once(SELECTOR, allreduce(balance="never"), acc)
    np.testing.assert_array_equal(np.asarray(out["total"])[0], acc.sum(axis=0))
    assert (np.asarray(out["info"].overflow) == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": "even"}, "regions must be one of 'hashed', 'balanced', 'equal', got 'even'"),
        ({"balance": True}, "balance must be one of 'auto', 'always', 'never', got True"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sc.allreduce.ok_topk(density=DENSITY, **options)
