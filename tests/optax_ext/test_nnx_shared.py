"""Modules of flax nnx as one graph, of shared variables also: as ``nnx.jit`` with one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_ext
from tests.optax_ext.helpers import mesh, normal

pytestmark = pytest.mark.usefixtures("default_promotion")
BATCH = normal((4, 4))
TX = optax.chain(optax_ext.dense(axis="data"), optax.adam(0.05))
SPARSE = optax.chain(optax_ext.topk_a(1.0, axis="data"), optax.adam(0.05))


class Tied(nnx.Module):
    """Two layers with the same kernel, and with the same stream of random numbers."""

    def __init__(self, rngs):
        self.inner, self.outer = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.outer.kernel = self.inner.kernel
        self.drops = nnx.List([nnx.Dropout(0.0, rngs=rngs) for _ in range(2)])
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.drops[1](self.outer(nnx.tanh(self.drops[0](self.inner(x)))))


def loss_fn(model, x):
    return jnp.mean((model(x) - 3 * x) ** 2)


def near(found, expected):
    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)

    jax.tree.map(compare, found, expected)


def of_both(optimizer, model, x):
    loss, gradients = nnx.value_and_grad(loss_fn)(optax_ext.ahead(model, optimizer), x)
    optimizer.update(gradients)
    return loss


def of_groups(both, x):
    return of_both(both["optimizer"], both["models"][0], x)


def of_optimizer(optimizer, x):
    return of_both(optimizer, optimizer.model, x)


STEPS = {
    "the model last": (of_both, lambda model, optimizer: (optimizer, model)),
    "the model first": (lambda m, o, x: of_both(o, m, x), lambda m, o: (m, o)),
    "in containers": (of_groups, lambda m, o: ({"optimizer": o, "models": [m]},)),
    "in the optimizer": (of_optimizer, lambda _, optimizer: (optimizer,)),
}


@pytest.mark.parametrize("tx", [TX, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", STEPS)
def test_a_model_inside_and_beside_its_optimizer(name, tx, monkeypatch):
    step, arguments = STEPS[name]

    def trained(jit, tx):
        model = Tied(nnx.Rngs(0))
        optimizer = nnx.ModelAndOptimizer(model, tx, wrt=nnx.Param)
        jitted = jit(step)
        losses = [float(jitted(*arguments(model, optimizer), BATCH)) for _ in range(3)]
        assert model.outer.kernel is model.inner.kernel is optimizer.model.inner.kernel
        return losses, nnx.as_pure(nnx.state(model, (nnx.Param, nnx.BatchStat)))

    found = trained(optax_ext.data_parallel, optax_ext.with_mesh(tx, mesh(4)))
    monkeypatch.setattr(optax_ext, "ahead", lambda params, _: params)
    expected = trained(nnx.jit, optax.adam(0.05))
    assert float(found[1]["calls"]) == 3
    near(found, expected)


def test_layers_draw_from_one_stream_and_bare_variables_are_updated():
    """Each draw counts, also if the stream is an argument of its own as well."""
    model = Tied(nnx.Rngs(0))
    streams = nnx.Rngs(dropout=1)
    for drop in model.drops:
        drop.rngs = streams.dropout
    optimizer = nnx.Optimizer(model, optax_ext.with_mesh(TX, mesh(4)), wrt=nnx.Param)

    @optax_ext.data_parallel
    def step(model, optimizer, streams, steps, x):
        draws = [jax.random.uniform(drop.rngs()) for drop in model.drops]
        draws.append(jax.random.uniform(streams.dropout()))
        steps[...] += 1
        gradients = nnx.grad(loss_fn)(optax_ext.ahead(model, optimizer), x)
        optimizer.update(model, gradients)
        return [jax.lax.all_gather(x, "data") for x in draws]

    steps, seen = nnx.Variable(jnp.zeros(())), []
    for _ in range(3):
        seen += step(model, optimizer, streams, steps, BATCH)
    assert len({float(x) for each in seen for x in each}) == 3 * 3 * 4
    assert int(streams.dropout.count[...]) == 9
    assert float(steps[...]) == 3


def untie(model):
    model.outer.kernel = nnx.Param(model.inner.kernel[...] * 2)


def replace(model):
    model.outer = nnx.Linear(4, 2, rngs=nnx.Rngs(3))


def tie(model):
    model.outer = model.inner


def remove(model):
    del model.drops


def evaluate(model):
    model.eval()
    model.seen = 3


@pytest.mark.parametrize("change", [untie, replace, tie, remove, evaluate])
def test_a_step_changes_the_structure_of_a_model(change, monkeypatch):
    def trained(jit, tx):
        model = Tied(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @jit
        def step(both, x):
            model, optimizer = both["model"], both["optimizer"]
            gradients = nnx.grad(loss_fn)(optax_ext.ahead(model, optimizer), x)
            optimizer.update(model, gradients)
            change(model)
            # What a container holds is not given back.
            both["model"] = None
            return {"inner": model.inner, "kernel": model.inner.kernel, "model": model}

        given = {"model": model, "optimizer": optimizer}
        found = step(given, BATCH)
        assert found["model"] is given["model"] is model
        assert found["inner"] is model.inner
        assert found["kernel"] is model.inner.kernel
        return nnx.graphdef(model), nnx.as_pure(nnx.state(model, nnx.Param))

    found = trained(optax_ext.data_parallel, optax_ext.with_mesh(TX, mesh(4)))
    monkeypatch.setattr(optax_ext, "ahead", lambda params, _: params)
    expected = trained(nnx.jit, optax.adam(0.05))
    assert found[0] == expected[0]
    near(found[1], expected[1])


@pytest.mark.parametrize("cached", [False, True])
def test_returned_modules_train_on_and_donated_keys_may_be_shared(cached):
    model = Tied(nnx.Rngs(0))
    average = nnx.clone(model)
    optimizer = nnx.Optimizer(model, optax_ext.with_mesh(TX, mesh(4)), wrt=nnx.Param)

    @optax_ext.data_parallel(donate=True)
    def step(model, optimizer, average, x):
        loss, gradients = nnx.value_and_grad(loss_fn)(optax_ext.ahead(model, optimizer), x)
        optimizer.update(model, gradients)
        return (model, optimizer), loss, jax.random.uniform(model.drops[0].rngs())

    losses, draws = [], []
    call = nnx.cached_partial(step, model, optimizer, average) if cached else None
    for _ in range(3):
        if cached:
            _, loss, drawn = call(BATCH)
        else:
            (model, optimizer), loss, drawn = step(model, optimizer, average, BATCH)
        losses.append(float(loss))
        draws.append(float(drawn))
    assert losses[2] < losses[1] < losses[0]
    assert len(set(draws)) == 3
    assert model.outer.kernel is model.inner.kernel
