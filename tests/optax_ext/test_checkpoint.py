"""Orbax saves and restores the whole state; a checkpoint that does not fit is refused."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

import optax_ext
import sparse_collectives as sc

PARAMS = {"w": np.ones((10, 7), np.float32)}
RECIPES = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def mesh(workers=8):
    return jax.make_mesh(
        (workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def batches(number, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((16, 10)).astype(np.float32) for _ in range(number)]


def transformation(density=0.1, alias=optax_ext.ok_topk, **options):
    return optax.chain(alias(density, axis="data", **options), optax.adamw(1e-2))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "selector",
    [
        sc.select.threshold_reuse(density=0.1),
        pytest.param(sc.select.adtopk(density=0.1), marks=pytest.mark.slow),
    ],
)
def test_the_step_after_a_restore_has_the_same_bits(tmp_path, selector):
    tx = transformation(selector=selector)
    params, state = PARAMS, optax_ext.init_state(tx, PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    for batch in batches(3):
        params, state, _ = step(params, state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = optax_ext.abstract_state(tx, PARAMS, mesh())
        restored = checkpointer.restore(tmp_path / "state", target)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, state)
    assert all(jax.tree.leaves(same))
    batch = batches(1, seed=1)[0]
    assert bits(step(params, restored, batch)) == bits(step(params, state, batch))


def test_a_checkpoint_of_other_settings_is_refused_by_name():
    def made(tx, workers=8, params=PARAMS):
        return optax_ext.init_state(tx, params, mesh(workers))

    state = made(transformation())
    saved = json.loads(json.dumps(optax_ext.checkpoint_metadata(state)))
    optax_ext.check_metadata(saved, state)
    optax_ext.check_metadata(saved, optax_ext.abstract_state(transformation(), PARAMS, mesh()))
    for other, message in (
        (made(transformation(0.2)), r"selector: topk\(density=0.1\) in the checkpoint"),
        (made(transformation(alias=optax_ext.gtopk)), r"allreduce: ok_topk\(.*gtopk\("),
        (made(transformation(), workers=4), r"workers: 8 in the checkpoint, 4 here[^$]*reshard"),
        (made(transformation(), params={"w": jnp.ones((10, 6))}), r"n: 70 .*, 60 here"),
        (made(transformation(local=optax.scale(0.1))), "local: none in the checkpoint, Empty"),
        (made(optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.sgd(0.1))), r"arrays\."),
    ):
        with pytest.raises(ValueError, match=message):
            optax_ext.check_metadata(saved, other)
    # Another version of the library is none of another state.
    optax_ext.check_metadata({**saved, "version": "0.0.1"}, state)


def test_the_step_refuses_another_number_of_workers():
    tx = transformation()
    state = optax_ext.init_state(tx, PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh(4))
    with pytest.raises(ValueError, match="opt_state is that of 8 workers, and the mesh has 4"):
        step(PARAMS, state, batches(1)[0])


def test_an_abstract_state_needs_a_place():
    workers = AbstractMesh((3,), ("data",))
    with pytest.raises(ValueError, match="mesh is an AbstractMesh"):
        optax_ext.abstract_state(transformation(), PARAMS, workers)
    where = SingleDeviceSharding(jax.devices()[0])
    state = optax_ext.abstract_state(transformation(), PARAMS, workers, sharding=where)
    assert state[0].residual.shape == (3, 70)


def test_settings_are_read_from_the_factories():
    inner = sc.select.layerwise(sc.select.topk(density=0.1))
    tx = optax_ext.sparse_allreduce(inner, sc.allreduce.topk_a(codec=sc.wire.bf16()), axis="w")
    state = optax_ext.init_state(tx, PARAMS, {"w": 2})
    assert state.settings.selector == "layerwise(selector=topk(density=0.1))"
    assert state.settings.allreduce == "topk_a(codec=bf16())"
    assert (state.settings.local, state.settings.correction) == ("none", "none")


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (optax.scale(0.1), "EmptyState"),
        (optax.scale_by_schedule(lambda count: 0.1), "ScaleByScheduleState"),
        (optax.chain(optax.clip(1.0), optax.ema(0.9)), "EmptyState, EmaState"),
        # Made for the tree of the parameters, and no other.
        (optax.masked(optax.ema(0.9), {"w": True}), "MaskedState, EmaState"),
        (optax.GradientTransformation(lambda p: None, lambda u, s, p=None: (u, s)), "no state"),
    ],
)
def test_the_metadata_names_the_states_of_a_local_transformation(local, expected):
    state = optax_ext.init_state(transformation(local=local), PARAMS, {"data": 2})
    assert optax_ext.checkpoint_metadata(state)["sparse"]["[0]"]["local"] == expected


@pytest.mark.slow
def test_the_recipes_run(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    assert len(programs) == 4
    names = {
        "folder": tmp_path,
        "mesh": mesh(),
        "params": PARAMS,
        "loss_fn": loss_fn,
        "batches": batches(3),
    }
    for program in programs:
        exec(program, names)
    assert int(optax_ext.get_state(names["opt_state"]).count) == 6
    assert optax_ext.get_state(names["opt_state"]).residual.shape[0] == 3
    assert not np.asarray(optax_ext.get_state(names["consolidated"]).residual).any()
