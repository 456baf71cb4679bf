"""The exchange of one step beside the computation of the next."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._transforms._delayed import DelayedState
from tests.optax_ext.helpers import mesh, normal, run, slow, train

WORKERS, SIZE = 4, 60


def chain(name):
    reduce = {
        "ok_topk": optax_ext.ok_topk(0.1, axis="w"),
        "dense": optax_ext.dense(axis="w"),
    }[name]
    return optax.chain(reduce, optax.adam(0.1))


def trained(tx, given):
    """Parameters after each step, of one worker, and the last state."""
    found = run(tx, given)
    return 1 + found.updates[:, 0].cumsum(0), jax.tree.map(lambda x: x[-1], found.states)


@pytest.mark.parametrize("name", [slow("ok_topk"), "dense"])
def test_it_is_the_training_on_gradients_of_the_step_before(name):
    given = normal((5, WORKERS, SIZE))
    late, state = trained(optax_ext.delayed(chain(name)), given)
    shifted = np.concatenate([np.zeros_like(given[:1]), given[:-1]])
    expected, _ = trained(chain(name), shifted)
    # To rounding: of two programs, in which Adam's step may be put together in other ways.
    np.testing.assert_allclose(late, expected, atol=1e-6)
    # The last gradient waits; a step with zeros delivers it.
    np.testing.assert_array_equal(np.asarray(state.acc_grads).reshape(WORKERS, SIZE), given[-1])
    assert state.gradient_step.tolist() == [5] * WORKERS


@pytest.mark.slow
def test_an_update_does_not_depend_on_the_gradient_of_its_step():
    tx = optax_ext.delayed(chain("ok_topk"))
    given = np.zeros((2, WORKERS, SIZE), np.float32)
    given[1] = np.nan
    late, _ = trained(tx, given)
    assert np.isfinite(late).all()


def test_in_the_training_loop_and_for_other_workers():
    tx = optax_ext.delayed(optax.chain(optax_ext.ok_topk(0.2, axis="data"), optax.sgd(0.05)))
    x = normal((32, 6))
    batch = (x, x @ normal((6, 3), 1))

    def loss_fn(params, batch):
        return jnp.mean((batch[0] @ params["w"] + params["b"][None] - batch[1]) ** 2)

    params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
    results = train(tx, loss_fn, params, [batch] * 60, mesh())
    state, losses = results[-1][1], [float(loss) for _, _, loss in results[1:]]
    assert jax.tree.map(jnp.shape, state.acc_grads) == {"w": (WORKERS, 6, 3), "b": (WORKERS, 3)}
    # Of zeros first.
    assert losses[1] == losses[0]
    assert losses[-1] < 0.2 * losses[0]
    again = optax_ext.reshard(state, optax_ext.init_state(tx, params, {"data": 2}))
    assert again.acc_grads["w"].shape == (2, 6, 3)
    assert isinstance(again, DelayedState)


def test_a_state_made_without_the_delay_is_refused():
    tx = chain("ok_topk")
    multi = optax_ext.multi_steps(tx, 2)
    for made, message in (
        (tx, r"made without the delay of one step.*init_state"),
        (multi, "MultiStepsState, made without the delay"),
    ):
        wrong = optax.GradientTransformation(made.init, optax_ext.delayed(tx).update)
        with pytest.raises(TypeError, match=message):
            run(wrong, np.zeros((1, 2, SIZE), np.float32))


def test_without_a_reduction_it_is_refused():
    with pytest.raises(ValueError, match=r"tx of optax_ext\.delayed has no sparse allreduce"):
        optax_ext.delayed(optax.adam(0.1)).init(jnp.zeros(3))
