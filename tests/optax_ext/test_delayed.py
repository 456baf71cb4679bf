"""The exchange of one step beside the computation of the next."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc

WORKERS, SIZE = 4, 60


def chain(name):
    reduce = {
        "ok_topk": optax_ext.ok_topk(0.1, axis="w"),
        "dense": optax_ext.dense(axis="w"),
    }[name]
    return optax.chain(reduce, optax.adam(0.1))


def trained(tx, given):
    """Parameters after each step, of one worker, and the last state."""

    def train(gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        params = jnp.ones(SIZE)
        (_, state), seen = jax.lax.scan(step, (params, tx.init(params)), gradients)
        return seen, state

    return sc.simulate(train, axis="w", axis_size=WORKERS)(given)


@pytest.mark.parametrize("name", [pytest.param("ok_topk", marks=pytest.mark.slow), "dense"])
def test_it_is_the_training_on_gradients_of_the_step_before(name):
    given = np.random.default_rng(0).standard_normal((WORKERS, 5, SIZE)).astype(np.float32)
    late, state = trained(optax_ext.delayed(chain(name)), given)
    shifted = np.concatenate([np.zeros_like(given[:, :1]), given[:, :-1]], axis=1)
    expected, _ = trained(chain(name), shifted)
    # To rounding: of two programs, in which Adam's step may be put together in other ways.
    np.testing.assert_allclose(late, expected, atol=1e-6)
    # The last gradient waits; a step with zeros delivers it.
    np.testing.assert_array_equal(np.asarray(state.acc_grads).reshape(WORKERS, SIZE), given[:, -1])
    assert state.gradient_step.tolist() == [5] * WORKERS


@pytest.mark.slow
def test_an_update_does_not_depend_on_the_gradient_of_its_step():
    tx = optax_ext.delayed(chain("ok_topk"))
    given = np.zeros((WORKERS, 2, SIZE), np.float32)
    given[:, 1] = np.nan
    late, _ = trained(tx, given)
    assert np.isfinite(late).all()


def test_in_the_training_loop_and_a_checkpoint(tmp_path):
    mesh = jax.make_mesh((WORKERS,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax_ext.delayed(optax.chain(optax_ext.ok_topk(0.2, axis="w"), optax.sgd(0.05)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 6)).astype(np.float32)
    batch = (x, x @ rng.standard_normal((6, 3)).astype(np.float32))

    def loss_fn(params, batch):
        return jnp.mean((batch[0] @ params["w"] + params["b"][None] - batch[1]) ** 2)

    params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
    state = optax_ext.init_state(tx, params, mesh)
    assert jax.tree.map(jnp.shape, state.acc_grads) == {"w": (WORKERS, 6, 3), "b": (WORKERS, 3)}
    step = optax_ext.make_train_step(loss_fn, tx, mesh, donate=False)
    losses = []
    for _ in range(60):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    # Of zeros first.
    assert losses[1] == losses[0]
    assert losses[-1] < 0.2 * losses[0]
    again = optax_ext.reshard(state, optax_ext.init_state(tx, params, {"w": 2}))
    assert again.acc_grads["w"].shape == (2, 6, 3)
    assert isinstance(again, optax_ext.DelayedState)


def test_a_state_made_without_the_delay_is_refused():
    tx = chain("ok_topk")

    def step(gradient):
        return optax_ext.delayed(tx).update(gradient, tx.init(gradient))

    with pytest.raises(TypeError, match=r"made without the delay of one step.*init_state"):
        sc.simulate(step, axis="w", axis_size=2)(jnp.zeros((2, SIZE)))
    multi = optax_ext.multi_steps(tx, 2)
    with pytest.raises(TypeError, match="MultiStepsState, made without the delay"):
        sc.simulate(
            lambda g: optax_ext.delayed(tx).update(g, multi.init(g)), axis="w", axis_size=2
        )(jnp.zeros((2, SIZE)))


def test_without_a_reduction_it_is_refused():
    with pytest.raises(ValueError, match=r"tx of optax_ext\.delayed has no sparse allreduce"):
        optax_ext.delayed(optax.adam(0.1)).init(jnp.zeros(3))
