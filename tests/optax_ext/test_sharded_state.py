"""The state of sharded parameters from outside: saved, moved to other meshes, inspected."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import optax_ext
from optax_ext._state import _shards
from tests.optax_ext import shards
from tests.optax_ext.helpers import bits, flat, mesh, on_mesh, refused, same, slow

MESH, SIZES = mesh((2, 4), ("data", "model")), {"data": 2, "model": 4}
LABELS = {name: "dense" if name == "odd" else "sparse" for name in shards.SHAPES}
CORRECTION, ADAM = optax_ext.momentum_correction(0.9), optax.adam(0.1)
topk_a = functools.partial(optax_ext.topk_a, 0.1, axis="data")
OPTIMIZERS = {
    "ok_topk, adam": optax.chain(optax_ext.ok_topk(0.1, axis="data"), ADAM),
    "sparse_adamw": optax_ext.sparse_adamw(0.1, density=0.1, axis="data"),
    "momentum, dense leaves": topk_a(correction=CORRECTION, dense_leaves=LABELS),
    "all leaves dense": topk_a(
        correction=CORRECTION, dense_leaves=dict.fromkeys(shards.SHAPES, "dense")
    ),
    "multi_steps": optax_ext.multi_steps(optax.chain(topk_a(), ADAM), 3),
    "local adam": topk_a(local=ADAM),
}


def state_on(tx, sizes):
    on = shards.mesh_of(sizes)
    return on, optax_ext.init_state(tx, shards.placed(shards.params_of(), on), on)


def after_steps(tx):
    """The state after two steps of two workers of four devices."""
    return shards.run(tx, MESH, shards.gradients_of(2, 2), manual=False)[1]


def waiting(state):
    """The sum of the residuals over the workers, flat."""
    mean, _ = optax_ext.consolidate(shards.params_of(), state)
    return optax_ext.get_state(state).workers * flat(mean)


# One optimizer on each mesh, and each on a mesh of more, as many or fewer workers.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("sparse_adamw", (1, 4)),
        slow("ok_topk, adam", (4, 2)),
        slow("momentum, dense leaves", (8, 1)),
        slow("multi_steps", (1, 4)),
        slow("local adam", (2, 2)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_on_another_mesh_nothing_of_the_residuals_is_lost(name, sizes):
    tx = OPTIMIZERS[name]
    old = after_steps(tx)
    on, fresh = state_on(tx, sizes)
    new = optax_ext.reshard(old, fresh)
    np.testing.assert_allclose(waiting(new), waiting(old), rtol=1e-6, atol=1e-6)
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, fresh)
    # The training continues.
    step = shards.stepper(tx, on, new, manual=False)
    gradients = {k: g[0] for k, g in shards.gradients_of(sizes[0], 1).items()}
    _, new = step(shards.placed(shards.params_of(), on), new, gradients)
    assert int(optax_ext.get_state(new).count) >= int(optax_ext.get_state(old).count)


@pytest.mark.parametrize("name", ["momentum, dense leaves", "all leaves dense", slow("local adam")])
def test_there_and_back_it_is_the_same(name):
    tx = OPTIMIZERS[name]
    old = after_steps(tx)
    away = optax_ext.reshard(old, state_on(tx, (2, 2))[1])
    back = optax_ext.reshard(away, state_on(tx, (2, 4))[1])
    for field in ("residual", "velocity", "dense_velocity", "local", "count"):
        assert bits(getattr(back, field)) == bits(getattr(old, field))


def test_parameters_that_are_no_longer_sharded():
    tx = OPTIMIZERS["sparse_adamw"]
    old = after_steps(tx)
    whole = optax_ext.init_state(tx, shards.params_of(), mesh(2))
    there = optax_ext.reshard(old, whole)
    np.testing.assert_array_equal(waiting(there), waiting(old))
    back = optax_ext.reshard(there, state_on(tx, (2, 4))[1])
    np.testing.assert_array_equal(back.residual, old.residual)
    same(back.local, old.local)


@pytest.mark.slow
def test_in_a_hierarchy_of_nodes():
    """A worker of several devices, in a node of several workers."""
    names = ("node", "worker", "model")
    tx = optax_ext.published.hitopk(0.2, axis=("node", "worker"), inner_axis="worker")
    on = mesh((2, 2, 2), names)
    gradients = shards.gradients_of(4, 3)
    updates, state = shards.run(tx, on, gradients, manual=False, axis=("node", "worker"))
    summed = waiting(state)
    total = flat(gradients, (3, 4)).sum((0, 1))
    applied = 4 * sum(map(flat, updates))
    np.testing.assert_allclose(applied + summed, total, atol=5e-5)
    where = mesh((2, 2), names[:2])
    moved = optax_ext.reshard(state, optax_ext.init_state(tx, shards.params_of(), where))
    np.testing.assert_allclose(waiting(moved), summed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [slow("ok_topk, adam"), "sparse_adamw"])
def test_a_checkpoint_continues_with_the_same_bits_and_on_other_meshes(name, tmp_path):
    tx = OPTIMIZERS[name]
    old = after_steps(tx)
    metadata = json.loads(json.dumps(optax_ext.checkpoint_metadata(old)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shards.params_of())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", old)
        checkpointer.wait_until_finished()
        like = optax_ext.abstract_state(tx, shapes, MESH, specs=shards.SPECS)
        optax_ext.check_metadata(metadata, like)
        restored = checkpointer.restore(tmp_path / "state", like)
        same(restored, old)
        where = jax.tree.map(lambda x: x.sharding, restored)
        assert where == jax.tree.map(lambda x: x.sharding, state_on(tx, (2, 4))[1])
        # The workers that wrote it are absent here.
        was = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = optax_ext.abstract_state(tx, shapes, was, specs=shards.SPECS, sharding=one)
        read = checkpointer.restore(tmp_path / "state", like)
    for sizes in ((4, 2), (2, 2)):
        moved = optax_ext.reshard(read, state_on(tx, sizes)[1])
        np.testing.assert_allclose(waiting(moved), waiting(old), rtol=1e-6, atol=1e-6)
    other = optax_ext.abstract_state(tx, shapes, shards.mesh_of((2, 2)), specs=shards.SPECS)
    message = r"sharding\.devices\.model: 4 in the checkpoint, 2 here"
    refused(message, optax_ext.check_metadata, metadata, other)


def test_on_one_device_it_has_the_same_rows():
    """The sizes of the axes are given instead of a mesh."""
    tx = OPTIMIZERS["ok_topk, adam"]
    _, expected = state_on(tx, (2, 4))
    alone = optax_ext.init_state(tx, shards.params_of(), SIZES, specs=shards.SPECS)
    assert jax.tree.structure(alone) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.shape, alone) == jax.tree.map(jnp.shape, expected)


def test_what_waits_is_flushed_into_sharded_parameters():
    tx = OPTIMIZERS["sparse_adamw"]
    state = after_steps(tx)
    params = shards.placed(shards.params_of(), shards.mesh_of((2, 4)))
    new, rest = optax_ext.flush(params, state)
    # The mean of two workers, and of it the half by which each of them looks ahead.
    np.testing.assert_allclose(flat(new), flat(params) + waiting(state) / 4, atol=1e-6)
    np.testing.assert_allclose(waiting(rest), waiting(state) / 2, atol=1e-6)
    assert rest.residual.sharding == state.residual.sharding
    # Otherwise the next step would refuse them.
    for tree in (new, optax_ext.consolidate(params, state)[0]):
        assert jax.tree.map(lambda x: x.sharding, tree) == jax.tree.map(
            lambda x: x.sharding, params
        )


def test_what_sharded_parameters_of_16_bits_do_not_take_stays():
    tx, on = OPTIMIZERS["sparse_adamw"], shards.mesh_of((2, 4))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shards.params_of())
    params = shards.placed(narrow, on)
    state = optax_ext.init_state(tx, params, on)
    # Padding of the parts of a leaf has no residual.
    size = (2, sum(x.size for x in jax.tree.leaves(narrow)))
    held = 0.01 * np.random.default_rng(0).standard_normal(size, np.float32)
    held = jax.device_put(_shards.unrows(state, held), state.residual.sharding)
    state = state._replace(residual=held)
    new, rest = optax_ext.flush(params, state)
    change = flat(jax.tree.map(lambda a, b: a.astype("f4") - b.astype("f4"), new, params))
    before, after = (_shards.rows(x, np.asarray(x.residual)).sum(0) for x in (state, rest))
    np.testing.assert_allclose(2 * change + after, before, rtol=1e-6, atol=1e-8)
    assert np.abs(after - before / 2).max() > 1e-4
    assert rest.residual.sharding == state.residual.sharding


ODD = {**shards.SPECS, "odd": PartitionSpec("model")}
MISSING = {**shards.SPECS, "odd": PartitionSpec("modle")}


def placed(specs, sizes=(2, 4)):
    return shards.placed(shards.params_of(), shards.mesh_of(sizes), {**shards.SPECS, **specs})


def test_a_placement_that_can_not_be():
    whole, over_workers = shards.params_of(), placed({"rows": PartitionSpec("data")})
    for params, on, specs, message in (
        (over_workers, MESH, None, r"params\['rows'\] is sharded over axis 'data', wh"),
        (whole, SIZES, ODD, r"params\['odd'\] has dimension 0 of 3, which the 4"),
        (whole, MESH, MISSING, r"axis 'modle' is not an axis of the mesh"),
        (placed({}, (4, 2)), MESH, None, r"is sharded over another mesh, .*jax\.device_put"),
    ):
        tx = OPTIMIZERS["sparse_adamw"]
        refused(message, optax_ext.init_state, tx, params, on, specs=specs)


def test_parameters_that_are_not_placed_as_the_state_was_made():
    tx, params, whole = OPTIMIZERS["sparse_adamw"], placed({}), shards.params_of()
    of_whole, of_parts = (optax_ext.init_state(tx, p, MESH) for p in (whole, params))
    step = optax_ext.make_train_step(lambda p, x: jnp.sum(p["rows"]) * jnp.mean(x), tx, MESH)
    moved = placed({"rows": PartitionSpec()})
    for state, wrong, message in (
        (of_parts, moved, r"params\['rows'\] is sharded as P.*was sharded as P"),
        (of_parts, whole, r"params\['columns'\] is sharded as .*reshard"),
        (of_whole, params, r"params\['columns'\] is sharded as .*make another"),
    ):
        refused(message, step, wrong, state, jnp.ones(2))
    by_hand = shards.stepper(tx, MESH, of_whole, manual=True)
    gradients = {name: g[0] for name, g in shards.gradients_of(2, 1).items()}
    message = r"updates\['columns'\].*axes that shard the param"
    refused(message, by_hand, params, of_whole, gradients)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_a_replicated_leaf_whose_gradient_differs(check_vma):
    tx = optax_ext.assert_replicated_gradients(OPTIMIZERS["ok_topk, adam"])
    params = placed({})
    state = optax_ext.init_state(tx, params, MESH)

    def step(params, state, scale):
        place = jax.lax.axis_index("model").astype(jnp.float32)
        gradients = jax.tree.map(lambda p: p * scale[0], params)
        gradients["odd"] = gradients["odd"] * (1 + place * scale[0])
        return tx.update(gradients, state, params)

    specs = shards.SPECS, optax_ext.state_specs(state)
    mapped = on_mesh(step, MESH, (*specs, PartitionSpec("data")), specs, check_vma)

    def run(scale):
        jax.block_until_ready(mapped(params, state, scale))
        jax.effects_barrier()

    if check_vma:
        refused(r"updates\['odd'\] may differ .*along 'model'", run, jnp.ones(2))
        return
    refused(r"updates\['odd'\] differ", run, jnp.ones(2), error=jax.errors.JaxRuntimeError)
    run(jnp.zeros(2))  # It is silent if they are the same.
