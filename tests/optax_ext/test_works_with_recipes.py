"""The programs of docs/works_with.md run as they stand, one after the other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import optax_ext
from sparse_collectives import traffic
from tools import combination_matrix

pytestmark = pytest.mark.usefixtures("default_promotion")

# Those of the first sections are run by test_works_with.
PROGRAMS = re.findall(r"```python\n(.*?)```", combination_matrix.page(), re.DOTALL)[4:]


@pytest.fixture(scope="module")
def names():
    """What the programs leave behind, after 30 batches of a linear problem."""
    rng = np.random.default_rng(0)
    target = rng.standard_normal((6, 2)).astype(np.float32)
    inputs = [rng.standard_normal((64, 6)).astype(np.float32) for _ in range(30)]
    found = {
        "mesh": jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
        "batches": [(x, x @ target) for x in inputs],
    }
    assert len(PROGRAMS) == 2
    for program in PROGRAMS:
        exec(program, found)
        found.setdefault("nnx_tx", found["tx"])
    return found


def test_nnx_trains_and_keeps_the_statistics(names):
    nnx, batches = names["nnx"], names["batches"]
    trained, fresh = names["model"], names["Model"](nnx.Rngs(0))
    fresh.eval()
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    before, after = (float(jnp.mean((model(x) - y) ** 2)) for model in (fresh, trained))
    assert after < 0.8 * before
    # The mean over the workers of what each saw of its examples is what one would see of all.
    hidden = trained.hidden(x)
    np.testing.assert_allclose(trained.norm.mean[...], hidden.mean(0), atol=0.3)
    assert float(jnp.abs(trained.norm.mean[...]).max()) > 0
    # Evaluation has neither dropout nor statistics of the batch: rows do not depend on one another.
    np.testing.assert_allclose(trained(x)[:3], trained(x[:3]), rtol=1e-4, atol=1e-5)


def test_nnx_drops_out_otherwise_on_each_worker(names):
    """In a first step nothing waits, so its loss is the mean of the losses with eight masks."""
    nnx, tx, mesh = names["nnx"], names["nnx_tx"], names["mesh"]
    _, params, stats = nnx.split(names["Model"](nnx.Rngs(1)), nnx.Param, nnx.BatchStat)
    x, y = (part[:8] for part in names["batches"][0])
    key = jax.random.key(3)
    loss = jax.jit(lambda *args: names["loss_fn"](*args)[0])
    alone = [
        float(loss(params, stats, (x, y), jax.random.fold_in(key, worker))) for worker in range(8)
    ]
    assert len(set(alone)) == 8
    batch = tuple(np.tile(part, (8, 1)) for part in (x, y))
    opt_state = optax_ext.init_state(tx, params, mesh)
    *_, together = names["step"](params, stats, opt_state, batch, key)
    assert float(together) == pytest.approx(np.mean(alone), rel=1e-5)


def test_float16_takes_half_the_words(names):
    params = {"w": jnp.ones((64, 32))}

    def step(tx):
        state = optax_ext.init_state(tx, params, names["mesh"])
        train = optax_ext.make_train_step(
            lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), tx, names["mesh"], donate=False
        )
        batch = jnp.ones((8, 64))
        words = traffic.of_traced(train.trace(params, state, batch)).words
        return words, train(params, state, batch)[0]["w"]

    optax = names["optax"]
    half, ours = step(names["tx"])
    whole, theirs = step(optax.chain(optax_ext.dense(axis="data"), optax.adamw(1e-3)))
    assert 0.49 < half / whole < 0.51
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
