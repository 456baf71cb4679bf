"""Ok-Topk as it is published: Algorithm 1 over many steps, with tau and tau'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives.allreduce.ok_topk import _balance, _plan
from tests.reference.ok_topk import Published

WORKERS, SIZE, DENSITY, K, STEPS = 4, 300, 0.05, 15, 20
TAU, TAU_PRIME = 6, 4


def gradients(workers=WORKERS):
    """Multiples of 2**-10 that grow and shrink: their sums are exact in float32."""
    rng = np.random.default_rng(0)
    shape = (STEPS, workers, SIZE)
    x = rng.standard_t(3, shape) * (1 + np.sin(np.arange(STEPS)))[:, None, None]
    return (np.round(x * 2**10) / 2**10).astype(np.float32)


@functools.cache
def run(workers=WORKERS, **options):
    options = {"repartition_period": TAU, "global_period": TAU_PRIME, **options}
    tx = optax_ext.ok_topk(DENSITY, axis="w", paper=True, **options)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            found = state.residual[0], state.info, state.allreduce.boundaries
            return state, (updates, found)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    simulated = sc.simulate(train, axis="w", axis_size=workers, in_axes=1, out_axes=1)
    return jax.tree.map(np.asarray, simulated(jnp.asarray(gradients(workers))))


@pytest.mark.parametrize("workers", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_step_is_that_of_the_paper(workers):
    oracle = Published(workers, SIZE, K, TAU_PRIME)
    updates, (residuals, info, boundaries) = run(workers, slack=float("inf"))
    for t, given in enumerate(gradients(workers)):
        total = oracle.step(given)
        np.testing.assert_array_equal(workers * updates[t, 0].astype(np.float64), total)
        np.testing.assert_array_equal(residuals[t], oracle.residuals)
        selected, delivered = oracle.counts[-1]
        assert info.selected[t, :, 0].tolist() == selected
        assert (info.delivered[t] == delivered).all()
    assert not info.overflow.any()
    # Thresholds that are only reused: in between the counts are not k.
    locally, whole = zip(*oracle.counts, strict=True)
    assert set(np.ravel(locally[::TAU_PRIME])) == set(whole[::TAU_PRIME]) == {K}
    assert max(whole) > 1.5 * K
    assert min(whole) < 0.75 * K
    # The regions are cut anew every tau steps and at no other.
    boundaries = boundaries[:, 0]
    changes = [t for t in range(1, STEPS) if (boundaries[t] != boundaries[t - 1]).any()]
    assert changes == list(range(TAU, STEPS, TAU))


def test_there_is_room_for_four_times_k_and_what_finds_none_waits():
    updates, (residuals, info, _) = run(slack=1.5)
    assert info.overflow.any()
    given = np.cumsum(gradients().sum(1, dtype=np.float64), axis=0)
    applied = np.cumsum(WORKERS * updates[:, 0].astype(np.float64), axis=0)
    np.testing.assert_array_equal(applied + residuals.sum(1, dtype=np.float64), given)
    tx = optax_ext.ok_topk(DENSITY, axis="w", paper=True)
    settings = optax_ext.get_state(optax_ext.init_state(tx, jnp.zeros(SIZE), {"w": 4})).settings
    assert "headroom=3.0" in settings.selector
    assert "period=32" in settings.selector
    assert "global_period=32" in settings.allreduce
    assert "slack=4.0" in settings.allreduce


@pytest.mark.parametrize(
    ("counts", "balances"),
    [([9, 0, 0, 0, 0, 0, 0, 0], True), ([4, 1, 1, 1, 1, 0, 0, 0], False), ([1] * 8, False)],
)
def test_it_balances_where_one_worker_has_over_four_times_the_mean(counts, balances):
    plan = _plan.make_plan(SIZE, 4 * K, 8, regions="balanced", slack=float("inf"))

    def choose(counts):
        return _balance.choose_branch(counts, plan, "w", paper=True)

    everyone = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), (8, 8))
    branch = sc.simulate(choose, axis="w", axis_size=8)(everyone)
    assert branch.tolist() == [3 if balances else 0] * 8


def test_what_has_no_place_beside_it():
    for name, value in (("regions", "equal"), ("balance", "never")):
        with pytest.raises(ValueError, match=f"paper=True .*{name}='{value}'"):
            sc.allreduce.ok_topk(density=0.1, paper=True, **{name: value})
