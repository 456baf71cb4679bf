"""States inside ``nnx.Optimizer``, whose arrays are in variables: the same as without them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import optax_ext
from tests.optax_ext.helpers import DOCS, mesh, normal, refused, same

pytestmark = pytest.mark.usefixtures("default_promotion")
BATCH = normal((16, 6))


def loss_fn(model, x):
    return jnp.mean((model(x) - x[:, :3]) ** 2)


@optax_ext.data_parallel
def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_fn)(optax_ext.ahead(model, optimizer), x)
    optimizer.update(model, gradients)
    return loss


def made(workers=8, steps=3, density=0.1, averaged=True):
    after = [optax.ema(0.9, debias=False)] if averaged else []
    tx = optax.chain(optax_ext.sparse_adamw(1e-2, density=density, axis="data"), *after)
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax_ext.with_mesh(tx, mesh(workers)), wrt=nnx.Param)
    for _ in range(steps):
        train_step(model, optimizer, BATCH)
    return tx, model, optimizer


def test_what_is_read_is_the_same():
    _, _, optimizer = made()
    bare, written = nnx.as_pure(optimizer.opt_state), []
    expected = optax_ext.metrics(bare)
    assert float(expected["steps"]) == 3
    monitor = optax_ext.Monitor(lambda step, values: written.append(values))
    for state in (optimizer, optimizer.opt_state):
        same(optax_ext.metrics(state), expected)
        same(optax_ext.get_info(state), optax_ext.get_info(bare))
        same(optax_ext.get_state(state), optax_ext.get_state(bare))
        monitor(state)
    assert written == [{f"sparse/{name}": float(x) for name, x in expected.items()}] * 2


@pytest.mark.parametrize("call", [optax_ext.flush, optax_ext.consolidate])
def test_a_changed_state_can_be_put_back(call):
    # flush takes no state with a transformation after the optimizer.
    _, model, optimizer = made(averaged=call is not optax_ext.flush)
    params, kept = nnx.state(model, nnx.Param), jax.tree.structure(optimizer.opt_state)
    expected = call(params, nnx.as_pure(optimizer.opt_state))
    found, opt_state = call(params, optimizer.opt_state)
    same((found, nnx.as_pure(opt_state)), expected)
    assert jax.tree.structure(opt_state) == kept
    optimizer.opt_state = opt_state
    before = float(optax_ext.metrics(optimizer)["residual_norm"])
    assert np.isfinite(train_step(model, optimizer, BATCH))
    assert float(optax_ext.metrics(optimizer)["residual_norm"]) != before
    refused("params is a model of flax nnx", call, model, optimizer, error=TypeError)


MASKING = {
    "muon": optax.contrib.muon(1e-2),
    "masked": optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}


@pytest.mark.parametrize("name", MASKING)
def test_an_optimizer_that_leaves_out_leaves_and_keeps_moments(name):
    tx = optax.chain(optax_ext.quantized(axis="data"), MASKING[name])
    models, optimizers = [nnx.Linear(6, 3, rngs=nnx.Rngs(0)) for _ in "ab"], []
    for model, workers in zip(models, (2, 3), strict=True):
        with_mesh = optax_ext.with_mesh(tx, mesh(workers))
        optimizers.append(nnx.Optimizer(model, with_mesh, wrt=nnx.Param))
    train_step(models[0], optimizers[0], BATCH)
    assert float(optax_ext.metrics(optimizers[0])["steps"]) == 1
    optimizers[1].opt_state = optax_ext.reshard(*optimizers)
    params = nnx.state(models[0], nnx.Param)
    found, opt_state = optax_ext.consolidate(params, optimizers[0])
    assert any(x.any() for x in jax.tree.leaves(found))
    structures = [jax.tree.structure(x) for x in (opt_state, optimizers[0].opt_state)]
    assert structures[0] == structures[1]
    batch = np.concatenate([BATCH, BATCH, BATCH])
    nnx.update(models[1], jax.device_get(nnx.state(models[0])))
    assert np.isfinite(train_step(models[1], optimizers[1], batch))
    assert float(optax_ext.metrics(optimizers[1])["steps"]) == 2


@pytest.mark.parametrize("workers", [4, 8])
def test_resharded_states_train_on(workers):
    _, model, optimizer = made()
    _, _, other = made(workers, steps=0)
    expected = optax_ext.reshard(*map(nnx.as_pure, (optimizer.opt_state, other.opt_state)))
    opt_state = optax_ext.reshard(optimizer, other)
    same(nnx.as_pure(opt_state), expected)
    other.opt_state = opt_state
    nnx.update(model, jax.device_get(nnx.state(model)))
    assert np.isfinite(train_step(model, other, BATCH))
    assert int(optax_ext.get_state(other).count) == 4


def test_metadata_is_that_of_the_state_alone():
    tx, model, optimizer = made()
    expected = optax_ext.abstract_state(tx, nnx.state(model, nnx.Param), mesh(8))
    saved = optax_ext.checkpoint_metadata(optimizer)
    assert saved == optax_ext.checkpoint_metadata(expected)
    optax_ext.check_metadata(saved, optimizer.opt_state)
    _, _, other = made(density=0.5, steps=0)
    message = r"(?s)selector.*density=0\.1.*optax_ext\.reshard"
    refused(message, optax_ext.check_metadata, saved, other)


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path):
    """The program of the page, around two trainings with the same batches."""
    page = (DOCS / "checkpoints.md").read_text()
    program = page.partition("## flax nnx")[2].partition("```py\n")[2].partition("```")[0]
    _, model, optimizer = made()
    names = {"folder": tmp_path, "model": model, "optimizer": optimizer, "ocp": ocp}
    names |= {"jax": jax, "optax_ext": optax_ext, "nnx": nnx}
    names["checkpointer"] = ocp.StandardCheckpointer()
    save, restore = program.split("\n\n")
    exec(save, names)
    _, names["model"], names["optimizer"] = made(steps=0)
    exec(restore, names)
    losses = [
        np.asarray(train_step(m, o, BATCH))
        for m, o in ((model, optimizer), (names["model"], names["optimizer"]))
    ]
    np.testing.assert_array_equal(*losses)
    same(*(nnx.as_pure(x.opt_state) for x in (names["optimizer"], optimizer)))


def test_groups_by_labels_for_whole_variables_are_groups_by_labels_for_their_arrays():
    """``nnx.map_state`` replaces a variable by a label, and masks stand there also."""
    dense = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1e-2))
    groups = {"t": optax_ext.sparse_adamw(1e-2, density=0.5, axis="data"), "f": dense}
    results = []
    for labels in (
        lambda p: nnx.map_state(lambda path, _: "f" if "bias" in path else "t", p),
        lambda p: jax.tree_util.tree_map_with_path(
            lambda path, _: "f" if "bias" in str(path) else "t", p
        ),
    ):
        model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        tx = optax_ext.with_mesh(optax.multi_transform(groups, labels), mesh(2))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = [float(train_step(model, optimizer, BATCH)) for _ in range(3)]
        assert losses[-1] < losses[0]
        results.append(nnx.as_pure(nnx.state(model, nnx.Param)))
    same(*results)
