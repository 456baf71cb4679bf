"""The train step: what it computes, returns, waits for and costs."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import optax_ext
import sparse_collectives as sc
from optax_ext._train import _arrays
from tests.optax_ext.helpers import flat, mesh, normal, on_mesh, refused, train

WORKERS = 8


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(
        (jnp.tanh(x @ params["hidden"]) @ params["out"] + params["bias"][None] - y) ** 2
    )


SHAPES = {"hidden": (16, 32), "out": (32, 4), "bias": (4,)}
PARAMS = {name: normal(shape, 1) / 5 for name, shape in SHAPES.items()}
N = 16 * 32 + 32 * 4 + 4


def batches(count):
    return [(normal((64, 16), 10 + seed), normal((64, 4), seed)) for seed in range(count)]


def trained(tx, steps, **options):
    return train(tx, loss_fn, PARAMS, batches(steps), mesh(WORKERS), **options)


def state_of(tx):
    return optax_ext.init_state(tx, PARAMS, mesh(WORKERS))


def step_of(tx, loss=loss_fn, **options):
    return optax_ext.make_train_step(loss, tx, mesh(WORKERS), donate=False, **options)


def test_a_dense_step_has_loss_and_gradient_of_the_whole_batch_and_the_mean_of_aux():
    def with_aux(params, batch):
        loss = loss_fn(params, batch)
        return loss, {"twice": 2 * loss}

    tx, (batch,) = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0)), batches(1)
    new, _, loss, aux = step_of(tx, with_aux, has_aux=True)(PARAMS, state_of(tx), batch)
    expected_loss, gradient = jax.value_and_grad(loss_fn)(PARAMS, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(aux["twice"], 2 * loss, rtol=1e-6)
    np.testing.assert_allclose(flat(new), flat(PARAMS) - flat(gradient), rtol=1e-4, atol=1e-6)


def test_an_optimizer_receives_the_mean_loss_and_a_line_search_is_refused():
    (batch,) = batches(1)
    tx = optax.chain(optax_ext.dense(axis="data"), optax.contrib.momo(1.0))
    _, state, loss = step_of(tx)(PARAMS, state_of(tx), batch)
    (found,) = (x for x in jax.tree.leaves(state, is_leaf=is_momo) if is_momo(x))
    np.testing.assert_allclose(found.barf, loss, rtol=1e-6)
    searches = [optax.lbfgs(), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)]
    for optimizer in searches:
        tx = optax.chain(optax_ext.dense(axis="data"), optimizer)
        message = "'value_fn'.* a line search .* Take an optimizer without it"
        refused(message, step_of(tx), PARAMS, state_of(tx), batch, error=TypeError)


def test_an_optimizer_of_the_loss_is_refused_where_each_worker_has_one_of_its_own():
    (batch,) = batches(1)
    outer = optax.chain(optax_ext.dense(axis="data"), optax.polyak_sgd(0.1))
    tx = optax_ext.local_steps(optax.sgd(0.1), outer, every=2)
    message = "in outer of optax_ext.local_steps needs 'value'.*Put the transformation into inner"
    refused(message, step_of(tx), PARAMS, state_of(tx), batch, error=TypeError)


def is_momo(state):
    return hasattr(state, "barf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.05, momentum=0.9), optax.adamw(3e-3)], ids=["momentum", "adamw"]
)
def test_it_learns_in_front_of_any_optimizer(optimizer):
    tx = optax.chain(optax_ext.ok_topk(density=0.05, axis="data"), optimizer)
    # Targets that the inputs determine.
    pairs = [(x, x[:, :4]) for x, _ in batches(150)]
    results = train(tx, loss_fn, PARAMS, pairs, mesh(WORKERS))
    losses = [float(loss) for *_, loss in results[1:]]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])


@pytest.mark.slow
def test_the_step_needs_one_buffer_of_n_beside_the_residual():
    """For a flat gradient it is the update; the sum is computed in the donated residual."""
    size = 1 << 20
    one = mesh(1)
    tx = optax_ext.ok_topk(density=0.01, axis="data")
    gradient = jnp.zeros(size)
    state = optax_ext.init_state(tx, gradient, one)
    specs = P(), optax_ext.state_specs(state)
    step = jax.jit(on_mesh(tx.update, one, specs, specs, check_vma=False), donate_argnums=1)
    memory = step.lower(gradient, state).compile().memory_analysis()
    # Scratch for packed masks and k-sized buffers, and no n-sized one.
    assert memory.temp_size_in_bytes < 0.75 * 4 * size
    assert memory.alias_size_in_bytes >= 4 * size


@pytest.mark.slow
def test_the_words_of_a_whole_train_step_are_those_of_the_allreduce_and_of_two_numbers():
    """The mean loss, and the agreement on non-finite values."""
    tx, even = optax_ext.ok_topk(density=0.05, axis="data"), {"balance": (1.0, 0.0, 0.0, 0.0)}
    traced = step_of(tx).trace(PARAMS, state_of(tx), batches(1)[0])
    given = {"size": N, "capacity": round(0.05 * N), "axis_size": WORKERS, "frequencies": even}
    alone = sc.traffic.of_allreduce(sc.allreduce.ok_topk(density=0.05), **given).words
    found = sc.traffic.of_traced(traced, frequencies=even).words
    assert found == pytest.approx(alone + 2 * (2 * 7 / 8))


def test_the_state_is_found_and_specified_anywhere_in_a_chain():
    adam, inner = optax.adam(1e-3), optax_ext.ok_topk(density=0.1, axis="data")
    tx = optax.chain(optax.clip(1.0), optax.chain(inner, optax.scale(1.0)), adam)
    state = state_of(tx)
    found = optax_ext.get_state(state)
    assert isinstance(found, optax_ext.SparseAllreduceState)
    assert found.residual.shape == (WORKERS, N)
    specs = optax_ext.state_specs(state)
    per_worker = optax_ext.get_state(specs)
    assert per_worker.residual == per_worker.info.selected == P("data")
    assert per_worker.info.delivered == specs[2][0].mu["out"] == P()
    assert optax_ext.get_state(adam.init(PARAMS)) is optax_ext.get_info(adam.init(PARAMS)) is None
    # Before the first step there is nothing to report.
    assert optax_ext.get_info(state).words == 0


@pytest.mark.usefixtures("default_promotion")
def test_the_loss_that_is_returned_is_that_where_the_gradients_are_taken():
    """As in docs/troubleshooting.md: the parameters' loss if dense, otherwise slightly lower."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)

    def cross_entropy(params, batch):
        logits = batch[0] @ params["w"] + params["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    rng = np.random.default_rng(0)
    chosen = [rng.choice(1400, 128, replace=False) for _ in range(20)]
    given = [(images[rows], labels[rows]) for rows in chosen]
    start, at_params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}, jax.jit(cross_entropy)

    def gaps(tx):
        """The relative difference between each step's loss and the loss of its parameters."""
        results = train(tx, cross_entropy, start, given, mesh(8))
        before = [float(at_params(p, x)) for (p, _, _), x in zip(results, given, strict=False)]
        return np.asarray([float(loss) for _, _, loss in results[1:]]) / before - 1

    dense = gaps(optax.chain(optax_ext.dense(axis="data"), optax.adamw(1e-2)))
    np.testing.assert_allclose(dense, 0, atol=1e-5)
    for limit in (2.0, None):
        found = gaps(optax_ext.sparse_adamw(1e-2, axis="data", limit=limit))
        # The residual is 0 before the first step.
        assert found[0] == pytest.approx(0, abs=1e-5)
        assert max(found[1:]) < 0
        # As the page says.
        assert -0.1 < np.mean(found) < -0.01


def test_the_limit_of_steps_in_flight_is_for_cpu():
    """The queue of steps is bounded on platforms on which it can be fatal."""
    for given, platform, expected in ((None, "cpu", 2), (None, "gpu", None), (5, "gpu", 5)):
        on = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        assert _arrays.limit(given, on) == expected
    for wrong in (0, 1.5):
        message = "steps_in_flight must be an integer of at least 1"
        refused(message, step_of, optax_ext.dense(axis="data"), steps_in_flight=wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "expected"), [(None, [0, 1, 2]), (1, [0, 1, 2, 3]), (4, [0])])
def test_a_train_step_waits_for_the_losses_of_older_steps(monkeypatch, limit, expected):
    """Before it is launched, so that an interrupt of the wait loses no results."""
    tx, waited, wait = optax_ext.topk_a(0.5, axis="data"), [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waited.append(x), wait(x))[1])
    losses = [loss for *_, loss in trained(tx, 5, steps_in_flight=limit)[1:]]
    assert [next(i for i, x in enumerate(losses) if x is y) for y in waited] == expected


def test_an_error_of_a_step_is_in_its_own_results():
    queue = _arrays.Queue(1)

    class Failed:
        def block_until_ready(self):
            raise RuntimeError("a callback of this step")

    queue.add(Failed())
    queue.wait()
    queue.wait()


@pytest.mark.slow
def test_a_train_step_inside_another_program():
    """It waits for nothing while it is traced."""
    tx = optax.chain(optax_ext.topk_a(0.5, axis="data"), optax.sgd(0.1))
    step, given = step_of(tx), batches(3)

    @jax.jit
    def three(params, state):
        for batch in given:
            params, state, loss = step(params, state, batch)
        return params, loss

    inside, loss = three(jax.tree.map(jnp.asarray, PARAMS), state_of(tx))
    params, _, expected = trained(tx, 3)[-1]
    np.testing.assert_allclose(flat(inside), flat(params), rtol=1e-6)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_a_step_that_donates_is_not_for_another_program():
    tx, (batch,) = optax_ext.topk_a(0.5, axis="data"), batches(1)
    step, given = optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS)), (PARAMS, state_of(tx))
    message = r"is compiled already.*without jax\.jit.*make_train_step\(\.\.\., donate=False\)"

    def in_a_scan(params, state, batch):
        stacked = jax.tree.map(lambda x: x[None], batch)
        return jax.lax.scan(lambda carry, x: (step(*carry, x)[:2], None), (params, state), stacked)

    around = (
        jax.jit(step),
        in_a_scan,
        jax.grad(lambda *given: step(*given)[2], allow_int=True),
        lambda params, state, batch: jax.jit(lambda x: step(params, state, x))(batch),
    )
    for function in around:
        refused(message, function, *given, batch, error=TypeError)


def test_a_step_lowers_for_shapes_as_for_arrays():
    tx, (batch,) = optax_ext.topk_a(0.5, axis="data"), batches(1)
    given = PARAMS, state_of(tx), batch
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    of_shapes, of_arrays = step_of(tx).lower(*shapes), step_of(tx).lower(*given)
    assert of_shapes.as_text() == of_arrays.as_text()


def test_a_mesh_with_explicit_axes_may_be_set_around_the_step():
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    params = {"w": jnp.ones((4, 3))}

    def loss(p, x):
        return jnp.mean((x @ p["w"]) ** 2)

    tx = optax_ext.sparse_sgd(0.1, axis="data", density=0.5)
    # On jax 0.12 an array that is made under such a mesh cannot be split over its axes again.
    results, batch = [], np.ones((8, 4), np.float32)
    for context in (contextlib.nullcontext, functools.partial(jax.set_mesh, explicit)):
        with context():
            state = optax_ext.init_state(tx, params, explicit)
            step = optax_ext.make_train_step(loss, tx, explicit, donate=False)
            results.append(step(params, state, batch)[0]["w"])
    np.testing.assert_array_equal(*results)
