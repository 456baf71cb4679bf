"""Momentum before the residual: that of dense SGD where all is sent, masked where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc

WORKERS, SIZE, STEPS = 3, 40, 6


def gradients(workers=WORKERS):
    return np.random.default_rng(0).standard_normal((STEPS, workers, SIZE)).astype(np.float32)


def run(tx, gradients, axis="w", axis_size=WORKERS):
    """Updates, residuals and velocities of each step, and the last state."""

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            found = optax_ext.get_state(state)
            rows = () if found is None else (found.residual[0], found.velocity, found.info)
            return state, (updates, rows)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)

    simulated = sc.simulate(train, axis=axis, axis_size=axis_size, in_axes=1, out_axes=(0, 1))
    return jax.tree.map(np.asarray, simulated(gradients))


def top(density, correction, **options):
    return optax_ext.topk_a(density, axis="w", correction=correction, **options)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_at_density_1_it_is_plain_momentum(nesterov):
    correction = optax_ext.momentum_correction(0.9, nesterov=nesterov, masking=False)
    _, (updates, _) = run(top(1.0, correction), gradients())
    dense = optax.chain(optax_ext.dense(axis="w"), optax.trace(0.9, nesterov))
    _, (expected, _) = run(dense, gradients())
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_masking_at_density_1_leaves_no_momentum():
    _, (updates, _) = run(top(1.0, optax_ext.momentum_correction(0.9)), gradients())
    np.testing.assert_allclose(updates[:, 0], gradients().mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("masking", [False, True])
def test_it_is_the_algorithm_of_dgc(masking):
    correction = optax_ext.momentum_correction(0.9, masking=masking)
    _, (updates, (residuals, velocities, _)) = run(top(0.1, correction), gradients())
    u, v = np.zeros((2, WORKERS, SIZE), np.float32)
    for step, gradient in enumerate(gradients()):
        u = np.float32(0.9) * u + gradient
        v = v + u
        order = np.argsort(-np.abs(v), axis=1)[:, :4]
        sent = np.zeros_like(v)
        np.put_along_axis(sent, order, np.take_along_axis(v, order, 1), 1)
        v = v - sent
        if masking:
            u[sent != 0] = 0
        np.testing.assert_allclose(updates[step, 0], sent.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(residuals[step], v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(velocities[step][:, 0], u, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_only_what_was_delivered_is_masked():
    """An allreduce that delivers the first slot of each worker only."""
    honest = sc.allreduce.topk_a()

    def reduce(coo, state, *, axis):
        first = jnp.arange(coo.capacity) < 1
        part = sc.PaddedCOO(
            jnp.where(first, coo.values, 0), jnp.where(first, coo.indices, coo.size), coo.size
        )
        total, _, state, info = honest.reduce(part, state, axis=axis)
        nothing = sc.PaddedCOO(coo.values[:0], coo.indices[:0], coo.size)
        kept = sc.Undelivered(jnp.where(first, 0, coo.values), nothing)
        return total, kept, state, info

    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.1),
        honest._replace(reduce=reduce),
        axis="w",
        correction=optax_ext.momentum_correction(0.9),
    )
    _, (_, (_, velocities, _)) = run(tx, gradients()[:1])
    assert (np.count_nonzero(velocities[0] == 0, axis=-1) == 1).all()


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(sc.allreduce.sparse_allgather(), marks=pytest.mark.slow),
        sc.allreduce.topk_a(),
    ],
)
def test_what_is_rounded_off_the_entries_of_others_is_no_delivery(exchange):
    """Each worker sends one of the three entries that all select; a third of it is rounded."""

    def reduce(coo, state, *, axis):
        mine = jnp.arange(coo.capacity) == jax.lax.axis_index(axis)
        part = sc.PaddedCOO(
            jnp.where(mine, coo.values, 0), jnp.where(mine, coo.indices, coo.size), coo.size
        )
        total, undelivered, _, info = exchange.reduce(part, state, axis=axis)
        kept = sc.Undelivered(jnp.where(mine, 0, coo.values), undelivered.others)
        return total, kept, state, info

    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.3),
        exchange._replace(reduce=reduce),
        axis="w",
        correction=optax_ext.momentum_correction(0.9),
    )
    given = np.zeros((1, WORKERS, 10), jnp.bfloat16)
    given[..., [2, 5, 7]] = [1.0, -2.0, 5.0]
    _, (updates, (residuals, velocities, info)) = run(tx, given)
    assert info.arrived[0].tolist() == [[1]] * WORKERS
    assert [np.flatnonzero(v).tolist() for v in velocities[0, :, 0]] == [[5, 7], [2, 7], [2, 5]]
    total = WORKERS * updates[0, 0].astype(np.float64) + residuals[0].astype(np.float64).sum(0)
    np.testing.assert_allclose(total, given[0].astype(np.float64).sum(0), rtol=1e-6)


@pytest.mark.slow
def test_on_the_shards_of_a_hierarchy():
    correction = optax_ext.momentum_correction(0.9, masking=False)
    tx = optax_ext.hitopk(1.0, axis=("node", "device"), inner_axis="device", correction=correction)

    def train(gradients):
        return jax.lax.scan(
            lambda state, g: tx.update(g, state)[::-1], tx.init(gradients[0]), gradients
        )[1]

    steps = gradients(4).reshape(STEPS, 2, 2, SIZE)
    simulated = sc.simulate(train, axis=("node", "device"), axis_size=(2, 2), in_axes=1, out_axes=1)
    velocity = np.zeros(SIZE)
    for updates, gradient in zip(simulated(steps), steps, strict=True):
        velocity = 0.9 * velocity + gradient.mean((0, 1))
        np.testing.assert_allclose(updates[0, 0], velocity, rtol=1e-4, atol=1e-5)


def test_clipping_is_by_the_bound_over_the_root_of_the_workers():
    tx = optax_ext.local_clip_by_global_norm(1.0, axis="w")

    def clip(gradient):
        return tx.update({"a": gradient[:10], "b": gradient[10:]}, tx.init(gradient))[0]

    gradient = gradients()[0] * np.array([[1.0], [1e-3], [1e30]], np.float32)
    out = sc.simulate(clip, axis="w", axis_size=WORKERS)(gradient)
    out = np.concatenate([out["a"], out["b"]], axis=1)
    norms = np.linalg.norm(out.astype(np.float64), axis=1)
    np.testing.assert_allclose(norms[[0, 2]], 1 / np.sqrt(WORKERS), rtol=1e-5)
    np.testing.assert_array_equal(out[1], gradient[1])
    gradient[0, 3] = np.nan
    out = sc.simulate(clip, axis="w", axis_size=WORKERS)(gradient)["a"]
    assert np.isnan(np.asarray(out)[0]).sum() == 1


def test_values_out_of_range():
    with pytest.raises(ValueError, match="momentum must be less than 1"):
        optax_ext.momentum_correction(1.0)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        optax_ext.local_clip_by_global_norm(0.0, axis="w")
