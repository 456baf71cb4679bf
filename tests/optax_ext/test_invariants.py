"""200 steps of error feedback: nothing is lost, and the workers never drift apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import normal, slow
from tests.optax_ext.helpers import run as steps_of
from tests.reference import ok_topk as oracle

STEPS = 200
SIZE = 2003


def gradient(seed, step, worker, dtype):
    """Noise around a common direction, with a region of large entries that moves."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    common = jax.random.normal(key, (SIZE,))
    own = jax.random.normal(jax.random.fold_in(key, worker + 1), (SIZE,))
    place = jnp.arange(SIZE) // 100 == (step // 20) % 20
    return ((common + 2 * own) * jnp.where(place, 10.0, 1.0)).astype(dtype)


def run(tx, workers, dtype, steps=STEPS):
    """The largest errors of conservation and agreement over the steps."""

    # Not in the program of the steps, where a fusion may compute a gradient once more with
    # other roundings than those of the one that the transformation gets.
    given = jax.jit(
        jax.vmap(
            lambda worker: jax.vmap(lambda i: gradient(0, i, worker, dtype))(jnp.arange(steps))
        )
    )(jnp.arange(workers))

    def train(gradients):
        params = jnp.zeros((SIZE,), dtype)

        def step(state, g):
            residual = optax_ext.get_state(state).residual[0]
            acc = residual + g.astype(jnp.float32)
            updates, state = tx.update(g, state, params)
            kept = optax_ext.get_state(state).residual[0]
            before, after = lax.psum((acc, kept), "w")
            delivered = workers * updates.astype(jnp.float32)
            # Rounding is in proportion to the summands, which may nearly cancel.
            scale = lax.psum(jnp.abs(residual) + jnp.abs(g.astype(jnp.float32)), "w") + 1e-30
            lost = jnp.max(jnp.abs(before - after - delivered) / scale)
            everyone = lax.all_gather(updates, "w")
            agree = jnp.all(everyone == everyone[:1])
            nonzeros = jnp.sum(before != 0, dtype=jnp.int32)
            return state, (lost, agree, optax_ext.get_info(state), nonzeros)

        return lax.scan(step, tx.init(params), gradients)

    return sc.simulate(train, axis="w", axis_size=workers)(given)


# Each compiles for seconds: every value of each parameter, and the ends together.
GRID = [
    (1, 0.01, "float32"),
    slow(2, 0.01, "float32"),
    slow(3, 0.001, "bfloat16"),
    slow(3, 1.0, "float32"),
    slow(5, 1.0, "bfloat16"),
    slow(7, 0.01, "float32"),
    slow(8, 0.1, "bfloat16"),
    slow(8, 0.001, "float32"),
]


@pytest.mark.parametrize(("workers", "density", "dtype"), GRID)
def test_nothing_is_lost_and_all_workers_agree(workers, density, dtype):
    tx = optax_ext.ok_topk(density=density, axis="w")
    state, (lost, agree, info, nonzeros) = run(tx, workers, dtype)
    # Rounding of sums of P terms in float32; what bfloat16 rounds off an update is kept.
    assert lost.max() < 2e-6
    assert agree.all()
    k = max(1, round(density * SIZE))
    # At density 1 a few sums of bfloat16 gradients are exactly zero.
    assert (np.asarray(info.delivered) == np.minimum(k, nonzeros)).all()
    if density < 1:
        assert (np.asarray(info.delivered) == k).all()
        assert (np.asarray(info.selected) == k).all()
    assert (np.asarray(state.count) == STEPS).all()
    assert (np.asarray(state.skipped) == 0).all()


@pytest.mark.slow
def test_with_threshold_reuse_as_in_the_paper():
    selector = sc.select.threshold_reuse(density=0.02, period=32)
    tx = optax_ext.ok_topk(density=0.02, axis="w", selector=selector, global_period=32)
    _, (lost, agree, info, _) = run(tx, 4, "float32")
    assert lost.max() < 2e-6
    assert agree.all()
    k = round(0.02 * SIZE)
    deviation = np.abs(np.asarray(info.selected)[..., 0] - k) / k
    assert deviation.mean() < 0.05
    assert (np.asarray(info.delivered) <= k).all()


@pytest.mark.parametrize(
    ("workers", "dtype", "bits"),
    [
        (1, "float32", None),
        slow(3, "float32", 32),
        slow(3, "float32", None),
        slow(8, "bfloat16", None),
    ],
)
def test_agreed_indices(workers, dtype, bits):
    density = 0.02
    exchange = sc.allreduce.agreed(bits=bits)
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=density), exchange, axis="w")
    _, (lost, agree, info, _) = run(tx, workers, dtype)
    assert lost.max() < 2e-6
    assert agree.all()
    delivered = np.asarray(info.delivered)
    assert (np.abs(delivered - density * SIZE) <= workers).all()
    assert (np.asarray(info.overflow) == 0).all()
    # All that a worker selected is delivered; in few bits the smallest may round to nothing.
    arrived, selected = np.asarray(info.arrived).sum(), np.asarray(info.selected).sum()
    assert arrived == selected if bits == 32 else arrived > 0.9 * selected


@pytest.mark.slow
def test_dense_allreduce_keeps_nothing():
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=1.0), sc.allreduce.dense(), axis="w")
    state, (lost, agree, _, _) = run(tx, 3, "float32", steps=5)
    assert lost.max() < 2e-6
    assert agree.all()
    assert (np.asarray(state.residual) == 0).all()


@pytest.mark.slow
def test_a_lost_entry_would_be_noticed():
    """The check itself: an allreduce that drops what it does not deliver fails it."""
    honest = sc.allreduce.ok_topk(density=0.01)

    def forgetful(coo, state, **options):
        total, undelivered, state, info = honest.reduce(coo, state, **options)
        nothing = jax.tree.map(jnp.zeros_like, undelivered.slots)
        others = undelivered.others
        others = sc.PaddedCOO(jnp.zeros_like(others.values), others.indices, coo.size)
        return total, sc.Undelivered(nothing, others), state, info

    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.01), honest._replace(reduce=forgetful), axis="w"
    )
    _, (lost, _, _, _) = run(tx, 3, "float32", steps=5)
    assert lost.max() > 1e-2


@pytest.mark.slow
def test_ok_topk_sgd_is_algorithm_2_with_a_schedule():
    """The learning rate of a gradient is that of its own step, also in the residual."""
    workers, size, density = 3, 200, 0.05
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.1})
    # ok_topk_sgd written out, for a slack with which no entry waits for a slot.
    tx = optax.chain(
        optax_ext.ok_topk(
            density, axis="w", local=optax.scale_by_schedule(schedule), slack=float(workers)
        ),
        optax.scale(-1.0),
    )
    gradients = normal((5, workers, size))
    found = steps_of(tx, gradients)
    params, residual = found.updates[:, 0].sum(0), found.residuals[-1]
    expected = np.zeros(size)
    kept = np.zeros((workers, size), np.float32)
    for i, g in enumerate(gradients):
        total, kept = oracle.training_step(kept + np.float32(schedule(i)) * g, 10)
        expected -= total / workers
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(residual, kept, rtol=1e-5, atol=1e-6)
