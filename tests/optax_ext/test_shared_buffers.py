"""One array in two places of what a step is given: it is copied, and not donated twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
from optax_ext._loop import _shared
from tests.optax_ext.helpers import mesh, normal, same

WORKERS = 4
START = normal((6, 4))


def everywhere(x):
    return jax.device_put(x, NamedSharding(mesh(), PartitionSpec()))


def put(*places):
    """One array in two places, where ``everywhere`` or nowhere in particular."""

    def tied():
        w = jnp.asarray(START)
        return tuple(place(w) for place in places)

    return tied


def one_on_the_mesh():
    w = everywhere(jnp.asarray(START))
    return w, w


def as_it_is(x):
    return x


TIED = {
    "one array": put(as_it_is, as_it_is),
    "one on the mesh": one_on_the_mesh,
    "put twice": put(everywhere, everywhere),
    "one and its copy on the mesh": put(as_it_is, everywhere),
    "one of the host": lambda: (START, START),
}
TX = optax.chain(optax_ext.topk_a(0.5, axis="data"), optax.sgd(0.1, momentum=0.9))


def loss_fn(params, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    return jnp.mean((jnp.tanh(x @ params["a"]) + x @ params["b"] - 1) ** 2)


def trained(tied, steps=3, later=None):
    """The parameters; ``later`` changes parameters and state before the second step."""
    a, b = tied()
    params = {"a": a, "b": b, "none": jnp.zeros((0, 3))}
    state = optax_ext.init_state(TX, params, mesh())
    step = optax_ext.make_train_step(loss_fn, TX, mesh())
    for i in range(steps):
        batch = normal((8, 6), 1 + i)
        if i == 1 and later is not None:
            params, state = later(params, state)
        params, state, _ = step(params, state, batch)
    return jax.device_get(params)


def apart():
    return START.copy(), START.copy()


@pytest.mark.parametrize("tied", TIED)
def test_it_trains_as_two_arrays_of_the_same_values(tied):
    same(trained(TIED[tied]), trained(apart))


def test_leaves_that_are_tied_between_two_steps():
    def tie(params, state):
        return {**params, "b": params["a"]}, state

    def tie_with_a_copy(params, state):
        return {**params, "b": jnp.copy(params["a"])}, state

    ends = [trained(apart, later=later) for later in (tie, tie_with_a_copy)]
    same(*ends)


def test_a_buffer_that_parameters_and_state_share():
    def share(params, state):
        # The velocity of sgd, whose state is behind that of the allreduce.
        trace, *rest = state[1]
        return params, (state[0], (trace._replace(trace=params), *rest))

    def share_a_copy(params, state):
        return share(params, state)[0], share(jax.tree.map(jnp.copy, params), state)[1]

    ends = [trained(apart, later=later) for later in (share, share_a_copy)]
    same(*ends)


def test_parameters_in_the_batch():
    def distance(params, batch):
        return loss_fn(params, batch) + jnp.mean((params["a"] - jnp.mean(batch["w"], 0)) ** 2)

    ends = []
    for copy in (lambda x: x, np.array):
        a, b = (everywhere(jnp.asarray(START)) for _ in range(2))
        stacked = everywhere(jnp.stack([START] * WORKERS))
        params = {"a": a, "b": b, "w": stacked}
        state = optax_ext.init_state(TX, params, mesh())
        step = optax_ext.make_train_step(distance, TX, mesh())
        for _ in range(2):
            batch = {"x": np.ones((8, 6), np.float32), "w": copy(params["w"])}
            params, state, _ = step(params, state, batch)
        ends.append(jax.device_get(params))
        if copy is not np.array:
            with pytest.raises(ValueError, match=r"batch\['w'\] has been deleted: an earlier step"):
                step(params, state, {**batch, "w": stacked})
    same(*ends)


def test_nothing_is_copied_that_occurs_once_and_a_steady_step_asks_for_no_buffer(monkeypatch):
    asked = []
    monkeypatch.setattr(_shared, "_buffers", lambda leaf: asked.append(1) or {id(leaf)})
    params = jax.tree.map(everywhere, {"a": START, "b": START.copy()})
    state = optax_ext.init_state(TX, params, mesh())
    step = optax_ext.make_train_step(loss_fn, TX, mesh())
    begun = params
    for i in range(3):
        params, state, _ = step(params, state, np.ones((8, 6), np.float32))
        # All leaves of the first step, and of those later none.
        assert bool(asked) == (i == 0)
        asked.clear()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(begun))


def test_without_donation_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(_shared, "_buffers", lambda leaf: pytest.fail("looked for"))
    w = everywhere(START)
    params = {"a": w, "b": w}
    state = optax_ext.init_state(TX, params, mesh())
    step = optax_ext.make_train_step(loss_fn, TX, mesh(), donate=False)
    step(params, state, np.ones((8, 6), np.float32))
    assert not w.is_deleted()
