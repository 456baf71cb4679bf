"""How many steps wait to be computed: none is queued without end where that can be fatal."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
from optax_ext._loop import _in_flight


class Result:
    """What a step returns, as far as jax.block_until_ready asks for it."""

    def __init__(self, waited, number):
        self.waited, self.number = waited, number

    def block_until_ready(self):
        self.waited.append(self.number)
        return self


def waited_for(size, steps):
    """After each step, what has been waited for."""
    waited, found = [], []
    queue = _in_flight.Queue(size)
    for number in range(steps):
        queue.add(Result(waited, number))
        found.append(list(waited))
    return found


def test_it_waits_for_the_oldest_beyond_the_limit():
    assert waited_for(2, 4) == [[], [], [0], [0, 1]]
    assert waited_for(1, 3) == [[], [0], [0, 1]]


def test_without_a_limit_it_waits_for_nothing():
    assert waited_for(None, 100)[-1] == []


def on(platform):
    devices = np.array([SimpleNamespace(platform=platform)])
    return SimpleNamespace(devices=devices)


def test_the_limit_is_for_cpu():
    assert _in_flight.limit(None, on("cpu")) == 2
    assert _in_flight.limit(None, on("gpu")) is None
    assert _in_flight.limit(None, on("tpu")) is None
    assert _in_flight.limit(5, on("gpu")) == _in_flight.limit(5, on("cpu")) == 5
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="steps_in_flight must be an integer of at least 1"):
            _in_flight.limit(wrong, on("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "expected"), [(None, [0, 1, 2]), (4, [0])])
def test_a_train_step_waits_for_the_losses_of_older_steps(monkeypatch, limit, expected):
    mesh = jax.make_mesh((2,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = optax.chain(optax_ext.topk_a(0.5, axis="w"), optax.sgd(0.1))
    params = jnp.ones(4)
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(
        lambda p, x: jnp.mean((x @ p) ** 2), tx, mesh, steps_in_flight=limit
    )
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waited.append(x), wait(x))[1])
    losses = []
    for _ in range(5):
        params, state, loss = step(params, state, jnp.eye(4))
        losses.append(loss)
    assert [next(i for i, x in enumerate(losses) if x is y) for y in waited] == expected


@pytest.mark.slow
def test_a_train_step_inside_another_program():
    """There is nothing to wait for while it is traced."""
    mesh = jax.make_mesh((2,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = optax.chain(optax_ext.topk_a(0.5, axis="w"), optax.sgd(0.1))
    params = jnp.ones(4)
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p) ** 2), tx, mesh, donate=False)

    @jax.jit
    def three(params, state):
        for _ in range(3):
            params, state, loss = step(params, state, jnp.eye(4))
        return params, loss

    inside, loss = three(params, state)
    for _ in range(3):
        params, state, expected = step(params, state, jnp.eye(4))
    np.testing.assert_allclose(inside, params, rtol=1e-6)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
