"""What optax and JAX put around an exchange: one vector of leaves, no jit, rates in float64."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import optax_ext
from tests.optax_ext.helpers import bits, mesh, normal, refused, train

PARAMS = {"w": normal((6, 4), 0), "b": np.zeros(4, np.float32)}
BATCHES = [normal((4, 6), 1 + i) for i in range(3)]
ADAMW = optax_ext.sparse_adamw(1e-2, axis="data", density=0.3)
TOPK_A = optax.chain(optax_ext.topk_a(0.3, axis="data"), optax.adam(1e-2))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - x[:, :4]) ** 2)


def trained(tx):
    return train(tx, loss_fn, PARAMS, BATCHES, mesh(2))[-1][:2]


@pytest.mark.parametrize("tx", [ADAMW, TOPK_A], ids=["sparse_adamw", "topk_a"])
def test_one_vector_of_all_leaves(tx):
    flat, whole = trained(optax.flatten(tx)), trained(tx)
    assert bits(flat[0]) == bits(whole[0])
    # The moments of the optimizer after an exchange are one vector as well.
    assert bits(optax_ext.consolidate(*flat)[0]) == bits(optax_ext.consolidate(*whole)[0])
    if tx is ADAMW:
        assert bits(optax_ext.flush(*flat)) == bits(optax_ext.flush(*whole))


def test_one_vector_of_a_matrix():
    def loss_of(w, x):
        return loss_fn({**PARAMS, "w": w}, x)

    flat, whole = (
        train(tx, loss_of, PARAMS["w"], BATCHES, mesh(2))[-1][:2]
        for tx in (optax.flatten(ADAMW), ADAMW)
    )
    assert bits(optax_ext.flush(*flat)) == bits(optax_ext.flush(*whole))


def test_one_vector_in_the_middle_of_a_round():
    mean = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.adam(0.1), mean, every=2)
    flat, whole = trained(optax.flatten(tx)), trained(tx)
    pair = (optax_ext.flush(*each)[0] for each in (flat, whole))
    # XLA rounds a matrix in other places than a vector.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), *pair)
    refused("in the middle of a round", optax_ext.consolidate, *flat)


def test_one_vector_of_some_leaves():
    tx = optax.partition({"a": optax.flatten(ADAMW), "b": TOPK_A}, {"w": "a", "b": "b"})
    refused("put optax.flatten around optax.partition", trained, tx)


NO_ENTRIES = {
    "group": optax.partition({"train": ADAMW, "other": TOPK_A}, {"w": "train", "b": "train"}),
    "dense leaves": optax_ext.sparse_adamw(
        1e-2, axis="data", dense_leaves=optax_ext.small_leaves(min_size=10**6)
    ),
}


@pytest.mark.parametrize("name", NO_ENTRIES)
def test_an_exchange_without_entries_compiles_once(name):
    tx, on = NO_ENTRIES[name], mesh(2)
    params, state = PARAMS, optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on)
    for batch in BATCHES:
        params, state, _ = step(params, state, batch)
    assert step.jitted._cache_size() == 1


def own_step(tx, state, frozen=None, **options):
    """A mapped step of your own, whose gradient of ``b`` is replaced."""
    specs = optax_ext.state_specs(state)

    def step(params, state, batch):
        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), batch)
        if frozen is not None:
            gradients["b"] = frozen(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    whole = PartitionSpec()
    return jax.shard_map(
        step,
        mesh=mesh(2),
        in_specs=(whole, specs, PartitionSpec("data")),
        out_specs=(whole, specs),
        **options,
    )


ZEROS = {
    "like the parameter": lambda params: jnp.zeros_like(params["b"]),
    "of a shape": lambda params: jnp.zeros(4),
    "of numpy": lambda params: np.zeros(4, np.float32),
}


@pytest.mark.parametrize("name", ZEROS)
def test_a_constant_gradient_is_no_sum(name):
    state = optax_ext.init_state(TOPK_A, PARAMS, mesh(2))
    params, _ = jax.jit(own_step(TOPK_A, state, ZEROS[name]))(PARAMS, state, BATCHES[0])
    assert not np.any(params["b"])
    assert np.all(np.any(params["w"] != PARAMS["w"]))


def test_a_parameter_as_its_gradient_is_the_same_on_all_workers():
    state = optax_ext.init_state(TOPK_A, PARAMS, mesh(2))
    step = jax.jit(own_step(TOPK_A, state, lambda params: params["b"]))
    refused(r"updates\['b'\] is the same on every worker", step, PARAMS, state, BATCHES[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_without_jit_computes_the_same(check_vma):
    """A sparse exchange takes a minute so, and traces values in the same way."""
    tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))
    state = optax_ext.init_state(tx, PARAMS, mesh(2))
    step = own_step(tx, state, check_vma=check_vma)
    on = jax.sharding.NamedSharding(mesh(2), PartitionSpec())
    params = jax.device_put(PARAMS, on)
    batch = jax.device_put(BATCHES[0], on.update(spec=PartitionSpec("data")))
    eager, jitted = (run(params, state, batch)[0] for run in (step, jax.jit(step)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), eager, jitted)


@pytest.mark.parametrize("rate", [np.float64(0.01), jnp.float32(0.01)], ids=["float64", "float32"])
@pytest.mark.parametrize("make", [optax_ext.sparse_adamw, optax_ext.sparse_sgd])
@pytest.mark.usefixtures("default_promotion")
def test_a_learning_rate_in_float64(make, rate):
    expected = trained(make(0.01, axis="data"))
    with jax.enable_x64(True):
        found = trained(make(rate, axis="data"))
    assert {x.dtype.name for x in jax.tree.leaves(found[0])} == {"float32"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found[0], expected[0])


@pytest.mark.usefixtures("default_promotion")  # optax mixes dtypes in it.
def test_a_branch_in_the_optimizer_of_a_worker():
    inner = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    mean = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    tx, on = optax_ext.local_steps(inner, mean, every=2), mesh(2)
    state = optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)
    with pytest.raises(TypeError, match=r"reduce_on_plateau.* Write check_vma=False"):
        step(PARAMS, state, BATCHES[0])
    step = optax_ext.make_train_step(loss_fn, tx, on, check_vma=False)
    assert np.isfinite(step(PARAMS, state, BATCHES[0])[2]).all()


def test_a_wrapper_that_reads_gradients_before_the_exchange():
    tx = optax.contrib.mechanize(TOPK_A)
    state = optax_ext.init_state(tx, PARAMS, mesh(2))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(2))
    message = r"the update of params.*mechanize.*the wrapper around what follows it"
    refused(message, step, PARAMS, state, BATCHES[0])


def test_an_abstract_mesh_outside_of_eval_shape():
    on = AbstractMesh((2,), ("data",))
    refused("mesh is an AbstractMesh.*abstract_state", optax_ext.init_state, ADAMW, PARAMS, on)
    shapes = jax.eval_shape(lambda: optax_ext.init_state(ADAMW, PARAMS, on))
    assert shapes.residual.shape == (2, 28)


def test_a_state_on_the_host_goes_back_to_the_mesh_with_its_residuals():
    @optax_ext.data_parallel
    def step(params, state, batch):
        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), batch)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(PARAMS, optax_ext.init_state(ADAMW, PARAMS, mesh(2)), BATCHES[0])
    saved = pickle.loads(pickle.dumps(jax.device_get((params, state))))
    refused(r"on no mesh.*optax_ext\.reshard\(opt_state", step, *saved, BATCHES[1])
    restored = optax_ext.reshard(saved[1], optax_ext.init_state(ADAMW, PARAMS, mesh(2)))
    found, expected = (step(*x, BATCHES[1]) for x in ((saved[0], restored), (params, state)))
    assert bits(found[0]) == bits(expected[0])
    # The report of the step before is not kept.
    assert bits(found[1]._replace(info=())) == bits(expected[1]._replace(info=()))
