"""Parameters that other axes of the mesh shard: each device takes the step of its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import shards
from tests.optax_ext.helpers import flat, mesh, normal, on_mesh, refused, slow, slow_but, train

NAMES = ("data", "model")
MESH = mesh((2, 4), NAMES)
TOPK = sc.select.topk(density=0.1)
topk_a = functools.partial(optax_ext.topk_a, 0.1, axis="data")
# Labels by whole leaves; their parts are smaller.
FEW = ("odd", "scalar", "vector")
LABELS = {leaf: "dense" if leaf in FEW else "sparse" for leaf in shards.SHAPES}
ADTOPK = sc.select.published.adtopk(density=0.1)
FULL_SUMS = sc.allreduce.full_sums(sc.allreduce.ok_topk(density=0.1))
TRANSFORMATIONS = {
    "ok_topk": optax_ext.ok_topk(0.1, axis="data"),
    "topk_a": topk_a(),
    "full_sums": optax_ext.sparse_allreduce(TOPK, FULL_SUMS, axis="data"),
    "momentum": topk_a(correction=optax_ext.momentum_correction(0.9)),
    "dense leaves": topk_a(dense_leaves=LABELS),
    "dense steps": topk_a(dense_steps=2),
    "rows": topk_a(selector=ADTOPK),
    "row_topk": optax_ext.sparse_allreduce(ADTOPK, sc.allreduce.row_topk(density=0.1), axis="data"),
    "powersgd": optax_ext.powersgd(rank=1, axis="data"),
    "quantized": optax_ext.quantized(axis="data"),
}
MANUAL = ("momentum", "dense leaves", "dense steps", "powersgd")
# Both ways for the simplest exchange and Ok-Topk; one way for the others.
WAYS = [
    (name, manual)
    for name in TRANSFORMATIONS
    for manual in (False, True)
    if name in ("topk_a", "ok_topk") or manual == (name in MANUAL)
]
QUICK = [("topk_a", False), ("powersgd", True), ("quantized", False)]


def has_the_bits_of_its_parts(tx, mesh, gradients, conserves=True, **options):
    updates, state = shards.run(tx, mesh, gradients, **options)
    expected, residuals = shards.by_parts(tx, gradients, state.layout)
    for made, wanted in zip(updates, expected, strict=True):
        for leaf, value in wanted.items():
            np.testing.assert_array_equal(made[leaf], value, leaf)
    found = np.asarray(state.residual).reshape(residuals.shape)
    np.testing.assert_array_equal(found, residuals)
    # No device drifts, and the residual is found again outside.
    shards.same_on_devices(state)
    params = jax.tree.map(lambda g: g[0, 0], gradients)
    waiting, empty = optax_ext.consolidate(params, state)
    assert not np.asarray(empty.residual).any()
    workers = optax_ext.get_state(state).workers
    total = workers * (flat(waiting) + sum(map(flat, updates)))
    if conserves:
        given = flat(gradients, next(iter(gradients.values())).shape[:2])
        np.testing.assert_allclose(total, given.sum((0, 1)), atol=4e-5)


@pytest.mark.parametrize(("name", "manual"), [x if x in QUICK else slow(*x) for x in WAYS])
@pytest.mark.one_in(4)
def test_it_has_the_bits_of_unsharded_runs_of_the_same_parts(name, manual):
    # With a correction, velocities are accumulated.
    tx, plain = TRANSFORMATIONS[name], name != "momentum"
    has_the_bits_of_its_parts(tx, MESH, shards.gradients_of(2, steps=4), plain, manual=manual)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("data", "fsdp", "tensor"), ("fsdp", "data", "tensor")])
def test_three_axes_with_leaves_over_each_of_them(names):
    """The mesh may have the axis of the workers anywhere."""
    shapes = {
        "none": ((8, 3), PartitionSpec()),
        "fsdp": ((8, 4), PartitionSpec("fsdp")),
        "tensor": ((4, 6), PartitionSpec(None, "tensor")),
        "both": ((4, 4), PartitionSpec("tensor", "fsdp")),
        "joint": ((8, 2), PartitionSpec(("tensor", "fsdp"))),
    }
    specs = {name: spec for name, (_, spec) in shapes.items()}
    tx, given = optax_ext.ok_topk(0.2, axis="data"), shards.gradients_of(2, 3, shapes=shapes)
    options = {"params": shards.params_of(shapes=shapes), "specs": specs, "manual": False}
    has_the_bits_of_its_parts(tx, mesh((2, 2, 2), names), given, **options)


def test_the_info_is_that_of_all_devices_and_they_skip_a_step_together():
    tx, gradients = topk_a(), shards.gradients_of(2, steps=2)
    # One entry of one device of one worker.
    gradients["columns"][1, 0, 0, 0] = np.nan
    updates, state = shards.run(tx, MESH, gradients, manual=False)
    assert (int(state.count), int(state.skipped)) == (1, 1)
    assert not any(np.asarray(leaf).any() for leaf in updates[1].values())
    shards.same_on_devices(state)
    size, info = 4 * round(0.1 * state.residual.shape[1]), state.info
    assert info.selected.tolist() == info.arrived.tolist() == [size] * 2
    assert float(info.words) == 2 * size  # Pairs of one other worker.
    metrics = optax_ext.metrics(state)
    norm = np.sqrt((np.asarray(state.residual, np.float64) ** 2).sum() / 2)
    np.testing.assert_allclose(metrics["residual_norm"], norm, rtol=1e-6)
    assert float(metrics["effective_density"]) == pytest.approx(0.1, abs=0.01)


@pytest.mark.slow
def test_a_worker_looks_ahead_with_all_of_its_devices():
    tx = optax_ext.sparse_adamw(0.1, density=0.1, axis="data", weight_decay=0.0)
    _, state = shards.run(tx, MESH, shards.gradients_of(2, steps=2), manual=False)
    params = shards.placed(shards.params_of(), MESH)

    def look(params, state):
        return jax.tree.map(lambda x: x[None], optax_ext.ahead(params, state))

    given = PartitionSpec(), optax_ext.state_specs(state, manual="data")
    mapped = on_mesh(look, MESH, given, PartitionSpec("data"), axis_names={"data"})
    seen = mapped(params, state)
    for worker in range(2):
        # Its residual alone, as the residual of both workers.
        rows = np.asarray(state.residual).reshape(2, 4, -1)[[worker] * 2].reshape(8, -1)
        alone = state._replace(residual=jnp.asarray(rows))
        waiting, _ = optax_ext.consolidate(params, alone)
        for name, leaf in shards.params_of().items():
            expected = leaf + np.asarray(waiting[name]) / 2
            np.testing.assert_allclose(np.asarray(seen[name])[worker], expected, rtol=1e-6)


def test_a_local_transformation_sees_whole_leaves():
    """It uses the norm of all entries, which no device holds."""
    tx = topk_a(local=optax.clip_by_global_norm(1.0))
    gradients = shards.gradients_of(2, steps=1)
    updates, state = shards.run(tx, MESH, gradients, manual=False)
    waiting, _ = optax_ext.consolidate(shards.params_of(), state)
    norms = np.sqrt(
        sum((g[0].reshape(2, -1).astype(np.float64) ** 2).sum(axis=1) for g in gradients.values())
    )
    for leaf, given in gradients.items():
        clipped = given[0] / norms.reshape(2, *(1,) * (given.ndim - 2))
        found = updates[0][leaf] + np.asarray(waiting[leaf])
        np.testing.assert_allclose(found, clipped.mean(axis=0), atol=1e-6)


def loss_fn(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def trained(tx, on, specs, steps=6, **options):
    """``(params, state, loss)`` before the first step and after each."""
    params = {"up": normal((6, 16)) / 2, "bias": np.zeros(16, "f4"), "down": normal((16, 3)) / 4}
    params = shards.placed(params, on, dict.fromkeys(params, PartitionSpec()) | specs)
    x = normal((8, 6), 1)
    return train(tx, loss_fn, params, [(x, np.sin(x[:, :3]))] * steps, on, **options)


def losses(results):
    return [float(loss) for _, _, loss in results[1:]]


TENSOR = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")}
FSDP = {"up": PartitionSpec("model"), "down": PartitionSpec("model"), "bias": PartitionSpec()}


@pytest.mark.parametrize("specs", [slow(TENSOR), {**TENSOR, "bias": PartitionSpec("model")}])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.one_in(2)
def test_at_density_one_it_trains_like_the_dense_one_and_stays_where_it_was(specs, check_vma):
    every = optax_ext.topk_a(1.0, axis="data")
    # A norm of all entries after the exchange, and moments of each entry.
    tail = (optax.clip_by_global_norm(0.5), optax.adam(0.05))
    found = trained(optax.chain(every, *tail), MESH, specs, check_vma=check_vma)
    dense = trained(optax.chain(optax_ext.dense(axis="data"), *tail), MESH, specs)
    np.testing.assert_allclose(losses(found), losses(dense), rtol=1e-5)
    params, state, _ = found[-1]
    for name, leaf in params.items():
        assert leaf.sharding == NamedSharding(MESH, specs.get(name, PartitionSpec()))
        np.testing.assert_allclose(leaf, dense[-1][0][name], atol=1e-5)
    for moment in (state[2][0].mu, state[2][0].nu):
        assert moment["up"].sharding.spec == specs["up"]
    assert state[0].residual.sharding.spec == PartitionSpec(("data", "model"))
    shards.same_on_devices((params, state))


BUCKETED, ADAM = optax_ext.bucketed(optax_ext.topk_a(0.2, axis="data"), 2), optax.adam(0.05)
# multi_steps is tested in test_works_with.py.
TRAINED = {
    "sparse_adamw": optax_ext.sparse_adamw(0.05, density=0.2, axis="data"),
    "factors": optax_ext.sparse_adamw(0.05, density=0.2, axis="data", moments="factors"),
    "bucketed": optax.chain(BUCKETED, ADAM),
    "powersgd": optax.chain(optax_ext.powersgd(rank=1, axis="data"), ADAM),
    "quantized": optax.chain(optax_ext.quantized(axis="data"), ADAM),
}


@pytest.mark.parametrize("name", slow_but(["powersgd"], TRAINED))
def test_optimizers_and_wrappers_train(name):
    results = trained(TRAINED[name], mesh((2, 2), NAMES), TENSOR, steps=30)
    params, state, _ = results[-1]
    assert losses(results)[-1] < 0.5 * losses(results)[0]
    assert params["up"].sharding.spec == TENSOR["up"]
    shards.same_on_devices((params, state))


@pytest.mark.slow
def test_axes_that_are_explicit():
    """The default of jax.make_mesh."""
    tx = optax.chain(topk_a(), optax.sgd(0.1))
    for sizes, specs in (((2, 2), TENSOR), ((2, 1), {})):
        kinds = AxisType.Explicit, AxisType.Auto
        runs = [losses(trained(tx, mesh(sizes, NAMES, kind), specs)) for kind in kinds]
        np.testing.assert_array_equal(*runs)


def test_with_fsdp_the_devices_of_a_worker_share_its_examples():
    on, spec = mesh((2, 2), NAMES), PartitionSpec(NAMES)
    tx = optax.chain(topk_a(), optax.sgd(0.1))
    apart, together = trained(tx, on, FSDP, batch_spec=spec), trained(tx, on, FSDP)
    np.testing.assert_allclose(losses(apart), losses(together), rtol=1e-5)
    message = r"batch_spec=.*workers first.*'data', \.\.\."
    refused(message, trained, tx, on, FSDP, batch_spec=PartitionSpec("model"))


def test_parameters_that_all_devices_of_a_worker_hold():
    """HiTopKComm: a worker is a node, whose devices have examples of their own."""
    on, spec = mesh((2, 2), NAMES), PartitionSpec(NAMES)
    tx = optax.chain(topk_a(), optax.sgd(0.1))
    params = {"up": normal((6, 16)), "bias": np.zeros(16, "f4"), "down": np.ones((16, 3), "f4")}
    x = normal((8, 6), 1)
    batch = (x, np.sin(x[:, :3]))
    step = optax_ext.make_train_step(loss_fn, tx, on, batch_spec=spec, donate=False)
    state = optax_ext.init_state(tx, params, on)
    refused(r"init_state\(tx, params, mesh, specs=jax", step, params, state, batch)
    state = optax_ext.init_state(tx, params, on, specs=PartitionSpec())
    n = sum(leaf.size for leaf in params.values())
    assert state[0].residual.shape == (4, n // 2)
    gradients = [jax.grad(loss_fn)(params, (x[i : i + 4], batch[1][i : i + 4])) for i in (0, 4)]
    new, state, _ = step(params, state, batch)
    waiting, _ = optax_ext.consolidate(params, state)
    for name, leaf in params.items():
        mean = sum(np.asarray(g[name]) for g in gradients) / 2
        moved = (leaf - np.asarray(new[name])) / np.float32(0.1)
        np.testing.assert_allclose(moved + np.asarray(waiting[name]), mean, atol=1e-5)
    shards.same_on_devices((new, state))
