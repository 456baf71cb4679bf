"""States in ``flax.serialization``, pickle and equinox: the next step has the same bits."""

import pickle

import equinox as eqx
import flax
import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import optax_ext
from tests.optax_ext.helpers import PARAMS, batch_of, bits, loss_fn, mesh, refused, slow

OPTIMIZERS = {
    "sparse_adamw": lambda: optax_ext.sparse_adamw(1e-2, axis="data", density=0.25),
    "bfloat16": lambda: optax_ext.sparse_sgd(
        0.1, axis="data", residual=optax_ext.residual(jax.numpy.bfloat16, step_ahead=1.0)
    ),
    "ok_topk": lambda: optax.chain(
        optax_ext.ok_topk(0.25, axis="data", correction=optax_ext.momentum_correction(0.9)),
        optax.adam(1e-2),
    ),
    "powersgd": lambda: optax.chain(optax_ext.powersgd(1, axis="data"), optax.sgd(0.1)),
    "quantized": lambda: optax.chain(optax_ext.quantized(axis="data"), optax.lion(1e-3)),
    "diloco": lambda: optax_ext.published.diloco(optax.adam(1e-2), axis="data", every=2),
    "multi_steps of dense": lambda: optax_ext.multi_steps(
        optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-2)), 2
    ),
    "group": lambda: optax.multi_transform(
        {
            "t": optax_ext.sparse_adamw(1e-2, axis="data", density=0.25),
            "f": optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1)),
        },
        {"w": "t", "b": "f"},
    ),
}


def with_flax(tree, like, _):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(tree))


def with_pickle(tree, like, _):
    return pickle.loads(pickle.dumps(jax.device_get(tree)))


def with_equinox(tree, like, folder):
    eqx.tree_serialise_leaves(folder / "state.eqx", tree)
    return eqx.tree_deserialise_leaves(folder / "state.eqx", like)


WAYS = {"flax": with_flax, "pickle": with_pickle, "equinox": with_equinox}
QUICK = {("flax", "sparse_adamw"), ("flax", "group"), ("pickle", "group"), ("equinox", "group")}
CASES = [
    case if case in QUICK else slow(*case) for case in ((a, b) for a in WAYS for b in OPTIMIZERS)
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_the_step_after_a_restore_has_the_same_bits(way, name, tmp_path):
    tx, on = OPTIMIZERS[name](), mesh(2)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)

    def fresh():
        return jax.tree.map(np.array, PARAMS), optax_ext.init_state(tx, PARAMS, on)

    carry = fresh()
    for i in range(3):
        carry = step(*carry, batch_of(seed=i))[:2]
    restored = WAYS[way](carry, fresh(), tmp_path)
    assert bits(restored) == bits(carry)
    assert bits(step(*restored, batch_of(seed=3))) == bits(step(*carry, batch_of(seed=3)))


def test_a_train_state_and_a_state_of_other_workers():
    tx = optax_ext.with_mesh(OPTIMIZERS["sparse_adamw"](), mesh(2))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert bits(restored.opt_state) == bits(state.opt_state)
    assert restored.opt_state.layout == state.opt_state.layout
    # The arrays of two workers are no state of four.
    other = optax_ext.init_state(tx, PARAMS, mesh(4))
    wrong = flax.serialization.from_bytes(other, flax.serialization.to_bytes(state.opt_state))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(4))
    refused("opt_state.*of 2 of 4 workers|made for", step, PARAMS, wrong, batch_of())


@pytest.mark.parametrize("name", ["dense", "ok_topk"])
def test_a_state_made_under_pmap_is_saved_without_any_other_call(name, monkeypatch):
    """Neither ``init_state`` nor ``with_mesh`` registers its parts with flax."""
    for cls in [x for x in flax.serialization._STATE_DICT_REGISTRY if "optax_ext" in x.__module__]:
        monkeypatch.delitem(flax.serialization._STATE_DICT_REGISTRY, cls)
    tx = {"dense": optax_ext.dense(axis="w"), "ok_topk": optax_ext.ok_topk(0.25, axis="w")}[name]
    many = jax.tree.map(lambda x: np.stack([x] * 2), PARAMS)
    state = jax.pmap(tx.init, axis_name="w", devices=jax.devices()[:2])(many)
    assert bits(with_flax(state, state, None)) == bits(state)
