"""One array in two places of what a step is given: it is copied, and not donated twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
from optax_ext._loop import _arrays
from tests.optax_ext.helpers import mesh, normal, same

WORKERS = 4
START = normal((6, 4))
TX = optax.chain(optax_ext.topk_a(0.5, axis="data"), optax.sgd(0.1, momentum=0.9))


def everywhere(x):
    return jax.device_put(x, NamedSharding(mesh(), PartitionSpec()))


def loss_fn(params, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    return jnp.mean((jnp.tanh(x @ params["a"]) + x @ params["b"] - 1) ** 2)


def begin(a, b, loss=loss_fn, **options):
    params = {"a": a, "b": b, "none": jnp.zeros((0, 3))}
    step = optax_ext.make_train_step(loss, TX, mesh(), **options)
    return step, params, optax_ext.init_state(TX, params, mesh())


def trained(a, b, later=None):
    """The parameters; ``later`` changes parameters and state before the second step."""
    step, params, state = begin(a, b)
    for i in range(3):
        if i == 1 and later is not None:
            params, state = later(params, state)
        params, state, _ = step(params, state, normal((8, 6), 1 + i))
    return jax.device_get(params)


def one(place, other=None):
    w = jnp.asarray(START)
    return place(w), (other or place)(w)


TIED = {
    "one array": lambda: one(lambda x: x),
    "one on the mesh": lambda: (everywhere(START),) * 2,
    "put twice": lambda: one(everywhere),
    "one and its copy on the mesh": lambda: one(lambda x: x, everywhere),
    "one of the host": lambda: (START, START),
}


@pytest.mark.parametrize("tied", TIED)
def test_it_trains_as_two_arrays_of_the_same_values(tied):
    w, other = TIED[tied]()
    same(trained(w, other), trained(START.copy(), START.copy()))


def tied(params, state, copy):
    return {**params, "b": copy(params["a"])}, state


def shared_with_the_state(params, state, copy):
    # The velocity of sgd, whose state is behind that of the allreduce.
    trace, *rest = state[1]
    return params, (state[0], (trace._replace(trace=jax.tree.map(copy, params)), *rest))


@pytest.mark.parametrize("later", [tied, shared_with_the_state])
def test_what_is_one_buffer_between_two_steps(later):
    ends = [
        trained(START.copy(), START.copy(), lambda p, s, copy=copy: later(p, s, copy))
        for copy in (lambda x: x, jnp.copy)
    ]
    same(*ends)


def test_parameters_in_the_batch():
    def distance(params, batch):
        return loss_fn(params, batch) + jnp.mean((params["a"] - jnp.mean(batch["w"], 0)) ** 2)

    ends = []
    for copy in (np.array, lambda x: x):
        step, params, state = begin(everywhere(START), everywhere(START.copy()), distance)
        stacked = everywhere(jnp.stack([START] * WORKERS))
        params["w"] = stacked
        state = optax_ext.init_state(TX, params, mesh())
        for _ in range(2):
            batch = {"x": np.ones((8, 6), np.float32), "w": copy(params["w"])}
            params, state, _ = step(params, state, batch)
        ends.append(jax.device_get(params))
    same(*ends)
    with pytest.raises(ValueError, match=r"batch\['w'\] has been deleted: an earlier step"):
        step(params, state, {**batch, "w": stacked})


def test_nothing_is_copied_that_occurs_once_and_without_donation_nothing_is_looked_at(monkeypatch):
    asked, batch = [], np.ones((8, 6), np.float32)
    monkeypatch.setattr(_arrays, "_buffers", lambda leaf: asked.append(1) or {id(leaf)})
    step, params, state = begin(everywhere(START), everywhere(START.copy()), donate=False)
    step(params, state, batch)
    assert not asked
    assert not params["a"].is_deleted()
    step, begun, state = begin(params["a"], params["b"])
    params = begun
    for i in range(3):
        params, state, _ = step(params, state, batch)
        # All leaves of the first step, and of those later none.
        assert bool(asked) == (i == 0)
        asked.clear()
    assert all(begun[name].is_deleted() for name in "ab")
