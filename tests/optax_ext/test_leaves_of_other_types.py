"""Leaves that are no real floats, and wrappers with parameters of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import bits, mesh, normal, refused, train

# optax mixes dtypes in both wrappers.
pytestmark = pytest.mark.usefixtures("default_promotion")
PARAMS = {"w": np.full((6, 4), 0.01, np.float32), "c": np.zeros(3, np.complex64)}
TX = optax_ext.sparse_adamw(1e-2, axis="data", density=0.5)


def loss_fn(params, x):
    error = x @ params["w"] - x[:, :4]
    return jnp.mean(error**2) + jnp.sum(jnp.abs(params["c"] - (1 + 2j)) ** 2)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.one_in(2)
def test_complex_leaves_train_as_their_real_and_imaginary_parts(every):
    whole = optax_ext.sparse_adamw(1e-2, axis="data", density=0.5, every=every)
    split = {"w": PARAMS["w"], "c": np.zeros((3, 2), np.float32)}

    def of_parts(params, x):
        return loss_fn({**params, "c": params["c"][:, 0] + 1j * params["c"][:, 1]}, x)

    ends = []
    for tx, loss, params in (
        (optax.contrib.split_real_and_imaginary(whole), loss_fn, PARAMS),
        (whole, of_parts, split),
    ):
        state = optax_ext.init_state(tx, params, mesh(2))
        step = optax_ext.make_train_step(loss, tx, mesh(2))
        for i in range(4):
            params, state, _ = step(params, state, normal((8, 6), i))
        params = optax.apply_updates(params, optax_ext.consolidate(params, state)[0])
        ends.append({name: np.asarray(x) for name, x in params.items()})
    parts = ends[0]["c"].view(np.float32).reshape(3, 2)
    # They stand in another order in the buffer, in which the workers choose.
    np.testing.assert_allclose(parts, ends[1]["c"], rtol=1e-2)
    assert (parts > 0.03).all()


@pytest.mark.parametrize("around", [lambda tx: optax_ext.multi_steps(tx, 2), optax_ext.delayed])
def test_complex_leaves_are_split_before_they_are_accumulated(around):
    chain = optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-2))
    split = optax.contrib.split_real_and_imaginary
    message = r"params\['c'\].*got complex64.*takes them in optax.contrib.split_real_and_imaginary"
    refused(message, optax_ext.init_state, around(split(chain)), PARAMS, mesh(2), error=TypeError)
    *_, (params, _, _) = train(
        split(around(chain)), loss_fn, PARAMS, [normal((8, 6), i) for i in range(4)], mesh(2)
    )
    assert (np.imag(params["c"]) > 0).all()


def test_weights_and_a_norm_of_complex_leaves():
    def weighted(params, batch):
        x, mask = batch
        error = jnp.sum(jnp.abs(x @ params["c"] - 1j) ** 2, axis=-1)
        return jnp.sum(error * mask) / jnp.sum(mask), jnp.sum(mask)

    split = optax.contrib.split_real_and_imaginary
    exchange = split(optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0)))
    params = {"c": np.full((6, 2), 1 + 1j, np.complex64)}
    x, mask = normal((4, 6)), np.array([1, 1, 1, 0], np.float32)
    gradients = jax.grad(lambda p: weighted(p, (x, mask))[0])(params)
    gradients = jax.tree.map(jnp.conj, gradients)
    clipped, _ = optax.clip_by_global_norm(0.1).update(gradients, optax.EmptyState())
    local_clip = optax_ext.local_clip_by_global_norm(0.1, axis="data")
    for workers, before, expected in (
        (2, optax.identity(), gradients),
        (1, local_clip, clipped),
    ):
        tx = optax.chain(before, exchange)
        state = optax_ext.init_state(tx, params, mesh(workers))
        step = optax_ext.make_train_step(weighted, tx, mesh(workers), weighted=True, donate=False)
        got, _, _ = step(params, state, (x, mask))
        np.testing.assert_allclose(got["c"], params["c"] - expected["c"], rtol=1e-5)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.arange(3), "got int32. Keep such leaves out"),
        (jax.random.key(0), "got key<fry>. Keep such leaves out"),
        (np.zeros(3, np.complex64), "got complex64.*split_real_and_imaginary"),
    ],
)
def test_other_leaves_are_named(leaf, message):
    for tx in (TX, optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.sgd(0.1))):
        params = {"w": PARAMS["w"], "extra": leaf}
        named = rf"params\['extra'\] must be.*{message}"
        refused(named, optax_ext.init_state, tx, params, mesh(2), error=TypeError)


def test_lookahead_of_optax_and_ahead_outside_of_the_map():
    tx, params = optax.lookahead(TX, 3, 0.5), {"w": PARAMS["w"]}
    pair = optax.LookaheadParams.init_synced(params)
    state = optax_ext.init_state(tx, pair, mesh(2))

    def loss(params, x):
        return jnp.mean((x @ params["w"] - x[:, :4]) ** 2)

    step = optax_ext.make_train_step(lambda p, x: loss(p.fast, x), tx, mesh(2), donate=False)
    refused(r"the two of optax.LookaheadParams.*params\.fast", step, pair, state, normal((8, 6)))
    refused(r"ahead was called where axis='data' is not", optax_ext.ahead, params, state)

    @optax_ext.data_parallel
    def own(pair, state, x):
        gradients = jax.grad(loss)(optax_ext.ahead(pair.fast, state), x)
        updates, state = tx.update(gradients, state, pair)
        return optax.apply_updates(pair, updates), state

    for i in range(3):
        pair, state = own(pair, state, normal((8, 6), i))
    # After three steps both are the same again.
    np.testing.assert_allclose(pair.fast["w"], pair.slow["w"], rtol=1e-6)
    assert bits(pair.fast) != bits(params)


class Foreign:
    """An array of a library whose dtypes NumPy cannot read."""

    dtype, shape = object(), (4,)


STRANGE = {
    "function": jnp.tanh,
    "str": "relu",
    "object": object(),
    "strings": np.array(["a", "b", "c", "d"]),
    "objects": np.array([None] * 4),
    "dates": np.array(["2020-01-01"] * 4, dtype="M8[D]"),
    "foreign": Foreign(),
}
strange = pytest.mark.parametrize("leaf", STRANGE.values(), ids=STRANGE)


@strange
def test_a_parameter_that_is_no_array_of_numbers_is_named(leaf):
    message = r"^params\['act'\] is .*, and must be an array of numbers\. .*nnx\.state"
    with pytest.raises(TypeError, match=message):
        optax_ext.init_state(TX, {"w": jnp.ones(4), "act": leaf}, {"data": 2})


@strange
def test_examples_that_are_no_array_of_numbers_are_named(leaf):
    params = {"w": jnp.ones((6, 4)), "c": jnp.zeros(3)}
    step = optax_ext.make_train_step(lambda params, batch: loss_fn(params, batch["x"]), TX, mesh(2))
    state = optax_ext.init_state(TX, params, mesh(2))
    message = r"^batch\['name'\] is .*, and must be an array of numbers\. .*close over a constant"
    with pytest.raises(TypeError, match=message):
        step(params, state, {"x": normal((4, 6), 0), "name": leaf})


@pytest.mark.parametrize("aux", [*STRANGE.values(), jax.random.key(0)], ids=[*STRANGE, "key"])
def test_auxiliary_values_that_have_no_mean_are_named(aux):
    params = {"w": jnp.ones((6, 4)), "c": jnp.zeros(3)}

    def loss_and_aux(params, x):
        return loss_fn(params, x), {"kept": aux}

    step = optax_ext.make_train_step(loss_and_aux, TX, mesh(2), has_aux=True)
    state = optax_ext.init_state(TX, params, mesh(2))
    message = r"^aux\['kept'\] is .*, and must be an array of numbers\. .*means.*Leave it out"
    with pytest.raises(TypeError, match=message):
        step(params, state, normal((4, 6), 0))


@pytest.mark.parametrize("dtype", [np.complex64, np.int32])
def test_local_steps_refuse_leaves_that_are_not_real(dtype):
    outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.sgd(0.1), outer, every=2)
    message = rf"params\['a'\] must be of a real floating type, got {dtype.__name__}"
    refused(
        message, optax_ext.init_state, tx, {"a": np.ones(3, dtype)}, {"data": 2}, error=TypeError
    )


@pytest.mark.parametrize("leaf", [np.array(3), np.array(True), jax.random.key(0)])
def test_a_step_of_a_dense_optimizer_names_them_as_well(leaf):
    tx = optax.chain(optax_ext.dense(axis="data"), optax.set_to_zero())
    params = {"w": PARAMS["w"], "extra": leaf}
    step = optax_ext.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, mesh(2))
    state = optax_ext.init_state(tx, params, mesh(2))
    message = r"params\['extra'\] must be.*Keep such leaves out"
    refused(message, step, params, state, normal((8, 6)), error=TypeError)


@pytest.mark.parametrize("make", [optax_ext.sparse_adamw, optax_ext.sparse_sgd])
def test_parameters_without_entries_are_stepped(make):
    tx, params = make(0.1, axis="data"), {"w": jnp.zeros((0, 3))}
    step = optax_ext.make_train_step(
        lambda p, x: jnp.sum(p["w"]) + jnp.mean(x), tx, mesh(2), donate=False
    )
    params, state, loss = step(params, optax_ext.init_state(tx, params, mesh(2)), jnp.ones((8, 6)))
    assert (params["w"].shape, float(loss), int(state.count)) == ((0, 3), 1.0, 1)
