"""The state of sharded parameters from outside: saved, moved to other meshes, looked at."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import optax_ext
from tests.optax_ext import shards

OPTIMIZERS = {
    "ok_topk, adam": lambda: optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.adam(0.1)),
    "sparse_adamw": lambda: optax_ext.sparse_adamw(0.1, density=0.1, axis="data"),
    "momentum, dense leaves": lambda: optax_ext.topk_a(
        0.1,
        axis="data",
        correction=optax_ext.momentum_correction(0.9),
        dense_leaves={name: "dense" if name == "odd" else "sparse" for name in shards.SHAPES},
    ),
    "multi_steps": lambda: optax_ext.multi_steps(
        optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.adam(0.1)), 3
    ),
    "local adam": lambda: optax_ext.topk_a(0.1, axis="data", local=optax.adam(0.1)),
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def state_on(tx, sizes):
    mesh = shards.mesh_of(sizes)
    return mesh, optax_ext.init_state(tx, shards.placed(shards.params_of(), mesh), mesh)


def after_steps(tx, sizes, steps=2):
    return shards.run(
        tx, shards.mesh_of(sizes), shards.gradients_of(sizes[0], steps), manual=False
    )[1]


def waiting(state):
    """What is in residuals, summed up over the workers, as leaves."""
    mean, _ = optax_ext.consolidate(shards.params_of(), state)
    workers = optax_ext.get_state(state).workers
    return {name: workers * np.asarray(leaf, np.float64) for name, leaf in mean.items()}


# One of them on each mesh, and each on a mesh of more, of as many or of fewer workers.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("sparse_adamw", (1, 4)),
        slow("sparse_adamw", (2, 2)),
        slow("sparse_adamw", (4, 2)),
        slow("sparse_adamw", (8, 1)),
        slow("ok_topk, adam", (4, 2)),
        slow("momentum, dense leaves", (2, 2)),
        slow("momentum, dense leaves", (8, 1)),
        slow("multi_steps", (1, 4)),
        slow("local adam", (1, 4)),
        slow("local adam", (4, 2)),
    ],
    ids=str,
)
def test_on_another_mesh_nothing_of_the_residuals_is_lost(name, sizes):
    tx = OPTIMIZERS[name]()
    old = after_steps(tx, (2, 4))
    mesh, fresh = state_on(tx, sizes)
    new = optax_ext.reshard(old, fresh)
    before, after = waiting(old), waiting(new)
    for leaf in before:
        np.testing.assert_allclose(after[leaf], before[leaf], rtol=1e-6, atol=1e-6)
    assert jax.tree.map(lambda x: x.sharding, new) == jax.tree.map(lambda x: x.sharding, fresh)
    # And it goes on.
    params = shards.placed(shards.params_of(), mesh)
    step = shards.stepper(tx, mesh, params, new, manual=False)
    gradients = shards.gradients_of(sizes[0], 1)
    _, new = step(params, new, {k: g[0] for k, g in gradients.items()})
    assert int(optax_ext.get_state(new).count) >= int(optax_ext.get_state(old).count)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sparse_adamw", marks=pytest.mark.slow),
        "momentum, dense leaves",
        pytest.param("local adam", marks=pytest.mark.slow),
    ],
)
def test_there_and_back_it_is_the_same(name):
    tx = OPTIMIZERS[name]()
    old = after_steps(tx, (2, 4))
    away = optax_ext.reshard(old, state_on(tx, (2, 2))[1])
    back = optax_ext.reshard(away, state_on(tx, (2, 4))[1])
    kept = ("residual", "velocity", "dense_velocity", "local", "count")
    for field in kept:
        jax.tree.map(np.testing.assert_array_equal, getattr(back, field), getattr(old, field))


def test_parameters_that_are_no_longer_sharded():
    tx = OPTIMIZERS["sparse_adamw"]()
    old = after_steps(tx, (2, 4))
    whole = optax_ext.init_state(tx, shards.params_of(), shards.mesh_of((2,), ("data",)))
    there = optax_ext.reshard(old, whole)
    for leaf, value in waiting(old).items():
        np.testing.assert_array_equal(waiting(there)[leaf], value)
    back = optax_ext.reshard(there, state_on(tx, (2, 4))[1])
    np.testing.assert_array_equal(back.residual, old.residual)
    jax.tree.map(np.testing.assert_array_equal, back.local, old.local)


@pytest.mark.slow
def test_in_a_hierarchy_of_nodes():
    """A worker of several devices, in a node of several workers."""
    names = ("node", "worker", "model")
    tx = optax_ext.hitopk(0.2, axis=("node", "worker"), inner_axis="worker")
    mesh = shards.mesh_of((2, 2, 2), names)
    gradients = shards.gradients_of(4, 3)
    updates, state = shards.run(tx, mesh, gradients, manual=False, axis=("node", "worker"))
    summed = waiting(state)
    for leaf, given in gradients.items():
        total = given.astype(np.float64).sum(axis=(0, 1))
        applied = 4 * sum(u[leaf].astype(np.float64) for u in updates)
        np.testing.assert_allclose(applied + summed[leaf], total, atol=5e-5)
    flat = optax_ext.init_state(tx, shards.params_of(), shards.mesh_of((2, 2), names[:2]))
    moved = optax_ext.reshard(state, flat)
    for leaf, value in summed.items():
        np.testing.assert_allclose(waiting(moved)[leaf], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param("ok_topk, adam", marks=pytest.mark.slow), "sparse_adamw"]
)
def test_a_checkpoint_continues_with_the_same_bits_and_on_other_meshes(name, tmp_path):
    tx = OPTIMIZERS[name]()
    mesh = shards.mesh_of((2, 4))
    old = after_steps(tx, (2, 4))
    metadata = json.loads(json.dumps(optax_ext.checkpoint_metadata(old)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shards.params_of())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", old)
        checkpointer.wait_until_finished()
        like = optax_ext.abstract_state(tx, shapes, mesh, specs=shards.SPECS)
        optax_ext.check_metadata(metadata, like)
        restored = checkpointer.restore(tmp_path / "state", like)
        jax.tree.map(np.testing.assert_array_equal, restored, old)
        where = jax.tree.map(lambda x: x.sharding, restored)
        assert where == jax.tree.map(lambda x: x.sharding, state_on(tx, (2, 4))[1])
        # The workers that wrote it are not here.
        was = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = optax_ext.abstract_state(tx, shapes, was, specs=shards.SPECS, sharding=one)
        read = checkpointer.restore(tmp_path / "state", like)
    for sizes in ((4, 2), (2, 2)):
        moved = optax_ext.reshard(read, state_on(tx, sizes)[1])
        for leaf, value in waiting(old).items():
            np.testing.assert_allclose(waiting(moved)[leaf], value, rtol=1e-6, atol=1e-6)
    other = optax_ext.abstract_state(tx, shapes, shards.mesh_of((2, 2)), specs=shards.SPECS)
    with pytest.raises(ValueError, match=r"sharding\.devices\.model: 4 in the checkpoint, 2 here"):
        optax_ext.check_metadata(metadata, other)


def test_on_one_device_it_has_the_same_rows():
    """With the sizes of the axes in place of a mesh."""
    tx = OPTIMIZERS["ok_topk, adam"]()
    _, on_mesh = state_on(tx, (2, 4))
    alone = optax_ext.init_state(
        tx, shards.params_of(), {"data": 2, "model": 4}, specs=shards.SPECS
    )
    assert jax.tree.structure(alone) == jax.tree.structure(on_mesh)
    assert jax.tree.map(jnp.shape, alone) == jax.tree.map(jnp.shape, on_mesh)


def test_what_waits_is_flushed_into_sharded_parameters():
    tx = OPTIMIZERS["sparse_adamw"]()
    state = after_steps(tx, (2, 4))
    params = shards.placed(shards.params_of(), shards.mesh_of((2, 4)))
    new, rest = optax_ext.flush(params, state)
    before, after = waiting(state), waiting(rest)
    for leaf, value in before.items():
        applied = np.clip(value / 2, -state.limit, state.limit)
        np.testing.assert_allclose(new[leaf], np.asarray(params[leaf]) + applied, atol=1e-6)
        np.testing.assert_allclose(2 * applied + after[leaf], value, atol=1e-6)
    assert np.count_nonzero(rest.residual) < np.count_nonzero(state.residual)
    assert rest.residual.sharding == state.residual.sharding


def _wait(results):
    jax.block_until_ready(results)
    jax.effects_barrier()


class TestErrors:
    def params(self, specs, mesh):
        return shards.placed(shards.params_of(), mesh, {**shards.SPECS, **specs})

    def test_sharded_over_the_axis_of_the_workers(self):
        mesh = shards.mesh_of((2, 4))
        params = self.params({"rows": PartitionSpec("data")}, mesh)
        with pytest.raises(ValueError, match=r"params\['rows'\] is sharded over axis 'data', wh"):
            optax_ext.init_state(OPTIMIZERS["sparse_adamw"](), params, mesh)

    def test_not_evenly(self):
        specs = {**shards.SPECS, "odd": PartitionSpec("model")}
        with pytest.raises(ValueError, match=r"params\['odd'\] has dimension 0 of 3, which the 4"):
            optax_ext.init_state(
                OPTIMIZERS["sparse_adamw"](),
                shards.params_of(),
                {"data": 2, "model": 4},
                specs=specs,
            )

    def test_an_axis_that_the_mesh_lacks(self):
        specs = {**shards.SPECS, "odd": PartitionSpec("modle")}
        with pytest.raises(ValueError, match=r"axis 'modle' is not an axis of the mesh"):
            optax_ext.init_state(
                OPTIMIZERS["sparse_adamw"](),
                shards.params_of(),
                shards.mesh_of((2, 4)),
                specs=specs,
            )

    def test_another_mesh(self):
        params = self.params({}, shards.mesh_of((4, 2)))
        with pytest.raises(ValueError, match=r"is sharded over another mesh, .*jax\.device_put"):
            optax_ext.init_state(OPTIMIZERS["sparse_adamw"](), params, shards.mesh_of((2, 4)))

    def test_a_leaf_whose_sharding_changes(self):
        mesh = shards.mesh_of((2, 4))
        tx = OPTIMIZERS["sparse_adamw"]()
        params = self.params({}, mesh)
        state = optax_ext.init_state(tx, params, mesh)
        step = optax_ext.make_train_step(lambda p, x: jnp.sum(p["rows"]) * jnp.mean(x), tx, mesh)
        moved = {
            **params,
            "rows": jax.device_put(params["rows"], NamedSharding(mesh, PartitionSpec())),
        }
        with pytest.raises(ValueError, match=r"params\['rows'\] is sharded as P.*was sharded as P"):
            step(moved, state, jnp.ones(2))
        whole = jax.tree.map(np.asarray, params)
        with pytest.raises(ValueError, match=r"params\['columns'\] is sharded as .*reshard"):
            step(whole, state, jnp.ones(2))
        # Nor is a state of whole parameters one of sharded ones.
        state = optax_ext.init_state(tx, whole, mesh)
        with pytest.raises(ValueError, match=r"params\['columns'\] is sharded as .*make another"):
            step(params, state, jnp.ones(2))

    def test_a_state_of_whole_parameters_in_a_loop_by_hand(self):
        mesh = shards.mesh_of((2, 4))
        tx = OPTIMIZERS["ok_topk, adam"]()
        state = optax_ext.init_state(tx, shards.params_of(), mesh)
        params = self.params({}, mesh)
        step = shards.stepper(tx, mesh, params, state, manual=True)
        gradients = shards.gradients_of(2, 1)
        with pytest.raises(ValueError, match=r"updates\['columns'\].*axes that shard the param"):
            step(params, state, {k: g[0] for k, g in gradients.items()})

    @pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_a_replicated_leaf_whose_gradient_differs(self, check_vma):
        mesh = shards.mesh_of((2, 4))
        tx = optax_ext.assert_replicated_gradients(OPTIMIZERS["ok_topk, adam"]())
        params = self.params({}, mesh)
        state = optax_ext.init_state(tx, params, mesh)

        def step(params, state, scale):
            place = jax.lax.axis_index("model").astype(jnp.float32)
            gradients = jax.tree.map(lambda p: p * scale[0], params)
            gradients["odd"] = gradients["odd"] * (1 + place * scale[0])
            return tx.update(gradients, state, params)

        specs = optax_ext.state_specs(state)
        mapped = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(shards.SPECS, specs, PartitionSpec("data")),
                out_specs=(shards.SPECS, specs),
                check_vma=check_vma,
            )
        )
        if check_vma:
            with pytest.raises(ValueError, match=r"updates\['odd'\] may differ .*along 'model'"):
                mapped(params, state, jnp.ones(2))
            return
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"updates\['odd'\] differ"):
            _wait(mapped(params, state, jnp.ones(2)))
        # Where they are the same it says nothing.
        _wait(mapped(params, state, jnp.zeros(2)))
