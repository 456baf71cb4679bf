"""Programs of other frameworks, as docs/clients.md changes them, before and after the change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, linen, nnx
from flax.training import train_state

import optax_ext
from benchmarks.learning import _page_programs
from benchmarks.learning._page_programs import names_after
from tests.clients import WORKERS, sends_little, shows_the_lines_that_it_counts
from tests.optax_ext.helpers import loss_fn, mesh, normal, programs_of, refused

pytestmark = pytest.mark.usefixtures("default_promotion")
PROGRAMS = _page_programs.programs_of("clients")
_, _, NNX_DROPOUT, *_ = programs_of("clients")


def accuracy(names):
    return float(names["accuracy"])


def last_loss(names):
    return float(names["metrics"]["loss"] if "metrics" in names else names["loss"])


def test_the_page_shows_the_lines_that_it_counts():
    shows_the_lines_that_it_counts("clients", 6)


@pytest.mark.parametrize(
    "section",
    ["flax nnx", "flax linen", "flax linen with pmap", "equinox"],
)
@pytest.mark.one_in(4)
def test_a_classifier_learns_as_before(section):
    before, after = map(names_after, PROGRAMS[section])
    assert accuracy(before) > 0.85
    assert accuracy(after) > accuracy(before) - 0.05
    sends_little(after)


@pytest.mark.parametrize(("section", "most"), [("A GPT", 3.2), ("haiku", 0.4)])
@pytest.mark.slow
def test_a_loss_falls_as_before(section, most):
    before, after = map(names_after, PROGRAMS[section])
    assert last_loss(before) < most
    assert last_loss(after) < last_loss(before) + 0.1
    sends_little(after)


@pytest.mark.slow
def test_the_same_program_trains_alike_on_a_mesh_and_under_pmap():
    # A compiled start is rounded in another way than one by single operations, and a training of
    # sparse updates goes on from there: both begin with the same bits.
    alike = "with jax.ensure_compile_time_eval(): params = cnn.init(jax.random.key(0), "
    on_mesh, mapped = (
        names_after([x.replace("params = cnn.init(rng, ", alike) for x in program.after])
        for program in list(PROGRAMS.values())[1:3]
    )
    params = jax.tree.map(np.asarray, mapped["state"].params)
    for a, b in zip(*map(jax.tree.leaves, (on_mesh["state"].params, params)), strict=True):
        np.testing.assert_array_equal(b, np.stack([b[0]] * WORKERS))
        np.testing.assert_allclose(a, b[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_dropout_of_nnx_in_make_train_step():
    """It learns, and each worker drops other numbers: a first loss is the mean over eight keys."""
    names = names_after(NNX_DROPOUT.splitlines())
    assert accuracy(names) > 0.85
    sends_little(names)
    # All workers have the same examples. The residual is 0 in a first step.
    batch, keys = next(names["batches"](1, size=4)), jax.random.split(jax.random.key(1), WORKERS)
    _, params = nnx.split(names["Classifier"](nnx.Rngs(1)), nnx.Param)
    loss = jax.jit(names["loss_fn"])
    alone = [float(loss(params, batch | {"keys": key[None]})) for key in keys]
    assert len(set(alone)) == WORKERS
    together = jax.tree.map(lambda x: np.concatenate([x] * WORKERS), batch) | {"keys": keys}
    opt_state = optax_ext.init_state(names["tx"], params, names["mesh"])
    *_, found = names["step"](params, opt_state, together)
    assert float(found) == pytest.approx(np.mean(alone), rel=1e-5)


# The decorator.

PARAMS = {"w": normal((6, 4)), "b": np.zeros(4, np.float32)}


def step_of(tx, at=optax_ext.ahead, result=lambda loss, batch: loss, summed=False):
    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(at(params, opt_state), batch)
        gradients = jax.lax.pmean(gradients, "data") if summed else gradients
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, result(loss, batch)

    return step


@pytest.fixture(scope="module")
def tx():
    return optax_ext.sparse_adamw(1e-2, axis="data")


@pytest.fixture(scope="module")
def opt_state(tx):
    return optax_ext.init_state(tx, PARAMS, mesh(WORKERS))


BATCHES = [normal((16, 6), seed) for seed in range(4)]


@pytest.mark.parametrize("name", ["sparse_adamw", "ok_topk before adam", "dense"])
@pytest.mark.one_in(2)
def test_the_bits_are_those_of_make_train_step(name, tx):
    tx = {
        "sparse_adamw": tx,
        "ok_topk before adam": optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.adam(0.01)),
        "dense": optax.chain(optax_ext.dense(axis="data"), optax.adamw(1e-2)),
    }[name]
    traced = []

    def step(*args):
        traced.append(args)
        return step_of(tx)(*args)

    on, trained = mesh(WORKERS), []
    for take in (
        optax_ext.data_parallel(step),
        optax_ext.make_train_step(loss_fn, tx, on, donate=False),
    ):
        found = PARAMS, optax_ext.init_state(tx, PARAMS, on), None
        for batch in BATCHES:
            found = take(*found[:2], batch)
        trained.append(found)
    assert len(traced) == 1
    for a, b in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_dense_mean_trains_as_one_device_does():
    before, after = PROGRAMS["flax linen"]
    dense = "optax.chain(optax_ext.dense(axis='data'), optax.adamw(3e-3))"
    after = [re.sub(r"optax_ext\.sparse_adamw\(.*?\)", dense, line) for line in after]
    states = [names_after(lines)["state"] for lines in (before, after)]
    for a, b in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_each_worker_draws_its_own_numbers(opt_state):
    """With typed keys, in a module or not; the keys that come back are the same on all."""

    @optax_ext.data_parallel
    def step(opt_state, keys, rngs, batch):
        drawn = jnp.stack([jax.random.uniform(key) for key in (keys[1], rngs())])
        each = jnp.zeros((WORKERS, 2)).at[jax.lax.axis_index("data")].set(drawn)
        return opt_state, jax.random.split(keys[0])[0], jax.lax.psum(each, "data")

    rngs, keys = nnx.Rngs(3), jax.random.split(jax.random.key(0))
    state, key, first = step(opt_state, keys, rngs, BATCHES[0])
    assert int(rngs.default.count[...]) == 1
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    *_, second = step(state, jax.random.split(key), rngs, BATCHES[0])
    drawn = np.stack([first, second])
    assert len(np.unique(drawn)) == drawn.size


def test_numbers_of_a_state_are_arrays_and_other_leaves_constants(opt_state, tx):
    traced = []

    @optax_ext.data_parallel
    def step(state, batch):
        traced.append(state["rate"])
        assert state["rate"].weak_type
        assert state["act"] is jnp.tanh
        params, opt_state, _ = step_of(tx)(state["params"], state["opt_state"], batch)
        step = state["step"] + 1
        return state | {"params": params, "opt_state": opt_state, "step": step}

    state = {"params": PARAMS, "opt_state": opt_state, "step": 0, "rate": 0.1, "act": jnp.tanh}
    for _ in range(3):
        state = step(state, BATCHES[0])
    assert int(state["step"]) == 3
    assert (float(state["rate"]), state["act"]) == (pytest.approx(0.1), jnp.tanh)
    assert len(traced) == 1


def test_a_mesh_with_explicit_axes_may_be_set(tx):
    with jax.set_mesh(jax.make_mesh((WORKERS,), ("data",))):
        *_, loss = optax_ext.data_parallel(step_of(tx))(PARAMS, tx.init(PARAMS), BATCHES[0])
    assert np.isfinite(loss)


WITH_TRACE = optax.chain(optax.trace(0.9), optax_ext.ok_topk(0.1, axis="data"), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("step", "batch", "message"),
    [
        (lambda tx: step_of(tx, summed=True), None, "pmean or psum of the gradients"),
        (lambda tx: jax.jit(optax_ext.data_parallel(step_of(tx))), None, "outside of jax.jit"),
        (
            lambda tx: step_of(tx, result=lambda _, batch: jnp.sum(batch > 0)),
            None,
            r"result\[?.* int32, differs .* jax\.lax\.psum",
        ),
        (step_of, np.float32(1), "ends with argument 1 .*, the model or its optimizer"),
        (step_of, (BATCHES[0], jax.random.key(0)), r"batch\[1\] is one PRNG key"),
        (step_of, BATCHES[0][:9], r"\(9, 6\): its leading dimension must be a multiple"),
    ],
    ids=["pmean", "jit around it", "counts", "scalar", "key", "rest"],
)
def test_a_step_that_cannot_be_is_an_error(step, batch, message, tx, opt_state):
    step = step(tx)
    take = step if hasattr(step, "lower") else optax_ext.data_parallel(step)
    refused(message, take, PARAMS, opt_state, BATCHES[0] if batch is None else batch)


def test_a_gradient_that_is_not_taken_ahead_is_local_and_warned_of_where_it_is_given(tx, opt_state):
    step = optax_ext.data_parallel(step_of(tx, at=lambda params, _: params))
    with pytest.warns(UserWarning, match=r"optax_ext\.ahead\(params, opt_state\)") as found:
        step(PARAMS, opt_state, BATCHES[0])
    assert [warning.filename for warning in found] == [__file__]
    # Without a look-ahead there is nothing to warn of.
    exchange = optax_ext.with_mesh(optax_ext.topk_a(0.5, axis="data"), mesh(WORKERS))
    state = exchange.init(PARAMS)
    results = [
        optax_ext.data_parallel(step_of(exchange, at=at))(PARAMS, state, BATCHES[0])
        for at in (optax_ext.ahead, lambda params, _: params)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_state_that_cannot_be_is_an_error(tx, opt_state):
    take, batch = optax_ext.data_parallel(step_of(tx)), BATCHES[0]
    refused("on no mesh", take, PARAMS, jax.device_get(opt_state), batch)
    refused("no sparse allreduce", take, PARAMS, optax.adamw(1e-2).init(PARAMS), batch)
    rounds = optax_ext.sparse_adamw(1e-2, axis="data", every=4)
    state = optax_ext.init_state(rounds, PARAMS, mesh(WORKERS))
    refused("make_train_step", take, PARAMS, state, batch)
    state = optax_ext.init_state(WITH_TRACE, PARAMS, mesh(WORKERS))
    take = optax_ext.data_parallel(step_of(WITH_TRACE))
    refused(r"trace.* of the optimizer state differs", take, PARAMS, state, batch)


def test_sharded_parameters_are_an_error(tx):
    on = mesh((2, 4), ("data", "fsdp"))
    spec = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(None, "fsdp"))
    params = {"w": jax.device_put(PARAMS["w"], spec), "b": PARAMS["b"]}
    state = optax_ext.init_state(tx, params, on)
    take = optax_ext.data_parallel(step_of(tx))
    refused("make_train_step", take, params, state, BATCHES[0])
    state = optax_ext.init_state(tx, PARAMS, on)
    assert np.isfinite(take(PARAMS, state, BATCHES[0])[2])


# Other mistakes that the page lists.


def test_arguments_of_adamw_that_mean_something_else_are_errors():
    refused("no first moment", optax_ext.sparse_adamw, 1e-3, b1=0.9, axis="data")
    given = {"axis": "data", "error": TypeError}
    refused("b1 in optax.adamw", optax_ext.sparse_adamw, 1e-3, 0.9, **given)


def test_a_state_without_a_mesh_is_an_error_that_names_with_mesh(tx):
    create = train_state.TrainState.create
    refused("TrainState.*with_mesh", create, apply_fn=None, params=PARAMS, tx=tx)
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    refused(r"nnx\.Optimizer.*with_mesh", nnx.Optimizer, model, tx, wrt=nnx.Param)


def test_a_pmap_state_that_was_unreplicated_cannot_be_saved(tx):
    def create(params):
        model = linen.Dense(4)
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def local_step(state, batch):
        here = optax_ext.ahead(state.params, state.opt_state)
        return state.apply_gradients(grads=jax.grad(loss_fn)(here, batch))

    state = jax.pmap(create, axis_name="data")(jax_utils.replicate(PARAMS))
    step = jax.pmap(local_step, axis_name="data")
    state = step(state, BATCHES[0].reshape(WORKERS, -1, 6))
    alone = jax_utils.unreplicate(state)
    refused("residual of 1 of 8 workers", optax_ext.checkpoint_metadata, alone.opt_state)
    copied = jax_utils.replicate(jax.device_get(alone))
    refused("of another worker on 7 of 8", optax_ext.checkpoint_metadata, copied.opt_state)
    step(copied, BATCHES[1].reshape(WORKERS, -1, 6))
