"""The programs of the manual's pages run as they stand there, one after the other."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils, linen
from flax.training import train_state
from jax.sharding import PartitionSpec

import optax_ext
import sparse_collectives as sc
from benchmarks._common.processes import ROOT
from sparse_collectives import traffic
from tests.optax_ext import combinations
from tests.optax_ext.helpers import DOCS, mesh, normal, programs_of

pytestmark = pytest.mark.usefixtures("default_promotion")
WORKERS, STEPS = 8, 4
# Modules for programs that continue earlier programs of their page.
MODULES = {"jax": jax, "optax": optax, "optax_ext": optax_ext}
# Two are run by test_clients.py. Here: dropout, a TrainState on a mesh, BatchNorm by hand.
_, DROPOUT, _, ON_MESH, BATCH_NORM = programs_of("clients")
LORA, FLOAT16 = programs_of("works_with")
RECIPES = [BATCH_NORM, FLOAT16]


def mean_square(params, batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse_sgd", "ok_topk before adam"])
def test_loops_of_other_libraries_train_alike(name):
    tx = {
        "sparse_sgd": optax_ext.sparse_sgd(0.1, axis="data", allreduce=sc.allreduce.topk_a()),
        "ok_topk before adam": optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.adam(0.01)),
    }[name]
    batches = [tuple(normal((4 * WORKERS, m), 2 * i + m) for m in (6, 2)) for i in range(STEPS)]
    start, loss_fn = combinations.model("linen")
    given = MODULES | {"jnp": jnp, "tx": tx, "mesh": mesh(WORKERS), "model": linen.Dense(1)}
    given |= {"loss_fn": loss_fn, "batches": batches}

    def fresh():
        params = jax.tree.map(jnp.copy, start)
        state = optax_ext.init_state(tx, params, mesh(WORKERS))
        return given | {"params": params, "opt_state": state}

    masked, trained = fresh(), fresh()
    exec(DROPOUT, masked)
    assert np.isfinite(masked["loss"])
    exec(ON_MESH, trained)
    state = trained["state"]
    assert int(state.step) == STEPS
    mapped = in_pmap(tx, loss_fn, start, batches)
    assert mapped.step.tolist() == [STEPS] * WORKERS
    for a, b in zip(*map(jax.tree.leaves, (state.params, mapped.params)), strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(b, np.stack([b[0]] * WORKERS))


def in_pmap(tx, loss_fn, params, batches):
    """A TrainState of all workers that was made under pmap, after these batches."""

    def create(params):
        return train_state.TrainState.create(apply_fn=loss_fn, params=params, tx=tx)

    def step(state, batch):
        here = optax_ext.ahead(state.params, state.opt_state)
        return state.apply_gradients(grads=jax.grad(loss_fn)(here, batch))

    state = jax.pmap(create, axis_name="data")(jax_utils.replicate(params))
    mapped = jax.pmap(step, axis_name="data")
    for batch in batches:
        state = mapped(state, jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch))
    return state


def names_after(programs, **names):
    """The variables after the programs have run with these names."""
    for program in programs:
        exec(program, names)
    return names


@pytest.fixture(scope="module")
def names():
    """The variables of the other programs after 30 batches of a linear problem."""
    target = normal((6, 2), 30)
    inputs = [normal((64, 6), seed) for seed in range(30)]
    found = {"mesh": mesh(WORKERS), "batches": [(x, x @ target) for x in inputs]}
    for program in RECIPES:
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
    # The mean of the workers' statistics is the statistics of all examples.
    hidden = trained.hidden(x)
    np.testing.assert_allclose(trained.norm.mean[...], hidden.mean(0), atol=0.3)
    assert float(jnp.abs(trained.norm.mean[...]).max()) > 0
    # Evaluation uses neither dropout nor batch statistics: rows are independent of one another.
    np.testing.assert_allclose(trained(x)[:3], trained(x[:3]), rtol=1e-4, atol=1e-5)


def test_nnx_drops_out_otherwise_on_each_worker(names):
    """The residual is 0 in a first step, so its loss is the mean of the losses with eight masks."""
    nnx, tx = names["nnx"], names["nnx_tx"]
    _, params, stats = nnx.split(names["Model"](nnx.Rngs(1)), nnx.Param, nnx.BatchStat)
    x, y = (part[:8] for part in names["batches"][0])
    key = jax.random.key(3)
    loss = jax.jit(lambda *args: names["loss_fn"](*args)[0])
    keys = [jax.random.fold_in(key, worker) for worker in range(WORKERS)]
    alone = [float(loss(params, stats, (x, y), mine)) for mine in keys]
    assert len(set(alone)) == WORKERS
    batch = tuple(np.tile(part, (WORKERS, 1)) for part in (x, y))
    opt_state = optax_ext.init_state(tx, params, names["mesh"])
    *_, together = names["step"](params, stats, opt_state, batch, key)
    assert float(together) == pytest.approx(np.mean(alone), rel=1e-5)


def test_lora_trains_and_exchanges_the_adapters_alone():
    start = names_after([LORA.partition("for _ in")[0]])
    before = float(start["loss_fn"](start["params"], start["batch"]))
    names = names_after([LORA])
    np.testing.assert_array_equal(names["params"]["base"]["w"], start["params"]["base"]["w"])
    assert float(names["loss"]) < 0.2 * before
    lora = sum(x.size for x in names["params"]["lora"].values())
    # A dense allreduce of the adapters would take 1.75 for each entry, and the base has 13 times
    # as many.
    assert 0 < float(optax_ext.get_info(names["opt_state"]).words) < 0.2 * lora


def test_float16_takes_half_the_words(names):
    params, batch = {"w": jnp.ones((64, 32))}, jnp.ones((8, 64))

    def step(tx):
        state = optax_ext.init_state(tx, params, mesh(WORKERS))
        train = optax_ext.make_train_step(mean_square, tx, mesh(WORKERS), donate=False)
        words = traffic.of_traced(train.trace(params, state, batch)).words
        return words, train(params, state, batch)[0]["w"]

    half, ours = step(names["tx"])
    whole, theirs = step(optax.chain(optax_ext.dense(axis="data"), optax.adamw(1e-3)))
    assert 0.49 < half / whole < 0.51
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow
def test_sharded_parameters():
    names = names_after(programs_of("sharded"))
    assert int(names["opt_state"][0].count) == 3
    assert names["params"]["up"].sharding.spec == PartitionSpec(None, "fsdp")


@pytest.mark.slow
def test_checkpoints(tmp_path):
    given = {"params": {"w": np.ones((10, 7), np.float32)}, "loss_fn": mean_square}
    given |= {"mesh": mesh(WORKERS), "batches": [normal((16, 10), seed) for seed in range(3)]}
    names = names_after(programs_of("checkpoints"), folder=tmp_path, **given)
    assert int(optax_ext.get_state(names["opt_state"]).count) == 6
    assert optax_ext.get_state(names["opt_state"]).residual.shape[0] == 3
    assert not np.asarray(optax_ext.get_state(names["consolidated"]).residual).any()


@pytest.mark.slow
def test_checkpoints_of_several_processes(tmp_path, monkeypatch, capsys):
    """A checkpoint of eight workers, a damaged one after it, and three workers that go on."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    stepping, saving = programs_of("faults")
    *_, restoring = re.findall(r"```py\n(.*?)```", (DOCS / "faults.md").read_text(), re.DOTALL)
    *_, onto_hosts = programs_of("multihost")
    params, tx = {"w": jnp.ones((10, 7))}, optax_ext.sparse_sgd(0.1, axis="data", density=0.1)
    eight, three = mesh(WORKERS), mesh(3)
    names = MODULES | {"folder": tmp_path / "steps", "params": params, "tx": tx, "mesh": eight}
    names["opt_state"] = optax_ext.init_state(tx, params, eight)
    names["step"] = optax_ext.make_train_step(mean_square, tx, eight)
    names["batches"] = [normal((24, 10), seed) for seed in range(3)]
    names = names_after([stepping, saving], **names)
    kept = np.asarray(optax_ext.get_state(names["opt_state"]).residual).sum(0)
    shutil.copytree(names["folder"] / "10", names["folder"] / "20")
    (names["folder"] / "20" / "default" / "manifest.ocdbt").unlink()
    with ocp.StandardCheckpointer() as checkpointer:
        tree = names["params"], names["opt_state"]
        checkpointer.save(tmp_path / "one", tree, custom_metadata=names["saved"])
        checkpointer.wait_until_finished()
        names |= {"checkpointer": checkpointer, "path": tmp_path / "one", "mesh": three}
        for program in (restoring, onto_hosts):
            found = names_after([program], **names)
            residual = np.asarray(optax_ext.get_state(found["opt_state"]).residual)
            np.testing.assert_allclose(residual.sum(0), kept, rtol=1e-5, atol=1e-6)
            step = optax_ext.make_train_step(mean_square, tx, three)
            step(found["params"], found["opt_state"], names["batches"][0])
    assert kept.any()
    assert "checkpoint 20 is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("exchange", ["quantized", "acp_sgd"])
def test_exchanges_without_a_selection(exchange):
    given = MODULES | {"params": {"w": jnp.ones((16, 12))}, "batches": [normal((32, 16))] * 3}
    (program,) = (text for text in programs_of("allreduces") if f"optax_ext.{exchange}(" in text)
    names = names_after([program], loss_fn=mean_square, **given)
    assert int(optax_ext.get_state(names["opt_state"]).count) == 3


@pytest.mark.slow
def test_troubleshooting():
    *programs, strict, counting = programs_of("troubleshooting")
    dense, sparse = 2 * 100_000 * 7 / 8, 6 * 1000 * 7 / 8
    words = names_after([counting])["counted"].words
    assert 0.01 * dense + 0.99 * sparse < words < 0.01 * dense + 0.99 * 1.5 * sparse
    names = names_after(programs)
    assert names["state"].skipped == 0
    assert int(names["state"].count) == 2
    names = names_after([strict], **names)
    params, on = {"w": jnp.ones((16, 4))}, mesh(WORKERS)
    state = optax_ext.init_state(names["tx"], params, on)
    step = optax_ext.make_train_step(mean_square, names["tx"], on)
    for _ in range(2):
        params, state, _ = step(params, state, names["batch"])
    jax.effects_barrier()
    assert int(optax_ext.get_state(state).count) == 2
