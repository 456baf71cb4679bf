"""Numbers to watch a run by: against NumPy, and written where they should be."""

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.test_momentum_correction import SIZE, STEPS, WORKERS, gradients, run


def last_state(tx, given, axis_size=WORKERS):
    """As outside of a mapped function: the workers' rows, and one of what all share."""
    state, _ = run(tx, given, axis_size=axis_size)
    info = state.info
    shared = {name: x[0] for name, x in info._asdict().items() if x.ndim == 1}
    rows = {name: x[:, 0] for name, x in info._asdict().items() if x.ndim == 2}
    one = {name: getattr(state, name)[0] for name in ("count", "skipped", "dropped", "withheld")}
    info = info._replace(**shared, **rows)
    return state._replace(residual=state.residual[:, 0], info=info, **one)


def measured(tx, given, every=1, axis="w", axis_size=WORKERS):
    """xi and updates of each step, and the last state, of all workers."""
    tx = optax_ext.measure_xi(tx, axis=axis, every=every)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (state.xi, updates)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)

    simulated = sc.simulate(train, axis=axis, axis_size=axis_size, in_axes=1, out_axes=(0, 1))
    state, (xi, updates) = jax.tree.map(np.asarray, simulated(given))
    return xi, updates, state


def exact_xi(tx, given, every=1):
    """Equation 5 of Ok-Topk at each step, from the residuals and the updates."""
    _, (updates, (residuals, _, infos)) = run(tx, given)
    before, found, value = np.zeros((WORKERS, SIZE)), [], 0.0
    for step in range(STEPS):
        mean = (before + given[step]).mean(0)
        k = infos.delivered[step, 0]
        kept = np.zeros(SIZE)
        top = np.argsort(-np.abs(mean), kind="stable")[:k]
        kept[top] = mean[top]
        norm = np.linalg.norm(given[step].mean(0))
        if step % every == 0:
            value = np.linalg.norm(kept - updates[step, 0]) / norm
        found.append(value)
        before = residuals[step]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("alias", "every"), [(optax_ext.topk_a, 3), (optax_ext.ok_topk, 1)])
def test_xi_is_that_of_equation_5(alias, every):
    tx = alias(0.1, axis="w")
    expected = exact_xi(tx, gradients(), every)
    xi, _, state = measured(tx, gradients(), every)
    np.testing.assert_allclose(xi[:, 0], expected, rtol=1e-4)
    assert (xi == xi[:, :1]).all()
    assert min(expected) > 0.1
    np.testing.assert_allclose(optax_ext.metrics(state)["xi"][0], expected[-1], rtol=1e-4)


@pytest.mark.slow
def test_xi_of_a_hierarchy_is_that_of_the_whole_vector():
    tx = optax_ext.hitopk(0.1, axis=("node", "device"), inner_axis="device")
    given = gradients(6).reshape(STEPS, 3, 2, SIZE)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state.residual[0], state.info.delivered)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    run = sc.simulate(train, axis=("node", "device"), axis_size=(3, 2), in_axes=1, out_axes=1)
    updates, residuals, delivered = jax.tree.map(np.asarray, run(given))
    before, expected = np.zeros(SIZE), []
    for step in range(STEPS):
        gradient = given[step].mean((0, 1))
        mean = before + gradient
        top = np.argsort(-np.abs(mean), kind="stable")[: delivered[step, 0, 0]]
        wanted = np.zeros(SIZE)
        wanted[top] = mean[top]
        off = np.linalg.norm(wanted - updates[step, 0, 0])
        expected.append(off / np.linalg.norm(gradient))
        # The shards of each node side by side.
        before = residuals[step].reshape(3, -1)[:, :SIZE].sum(0) / 6
    xi, _, _ = measured(tx, given, axis=("node", "device"), axis_size=(3, 2))
    np.testing.assert_allclose(xi[:, 0, 0], expected, rtol=1e-4)
    assert (xi == xi[:, :1, :1]).all()


def test_what_xi_measures_is_a_sparse_allreduce_alone():
    tx = optax.chain(optax_ext.topk_a(0.1, axis="w"), optax.sgd(0.1))
    with pytest.raises(TypeError, match="tx must be a sparse allreduce alone"):
        optax_ext.init_state(optax_ext.measure_xi(tx, axis="w"), jnp.zeros(4), {"w": 2})
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        optax_ext.measure_xi(optax_ext.topk_a(0.1, axis="w"), axis="w", every=0)


@pytest.mark.slow
def test_xi_in_a_train_step_on_a_mesh():
    """Its state is found, split over the workers and reported like any other."""
    mesh = jax.make_mesh((2,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sparse = optax_ext.topk_a(0.1, axis="w")
    results = []
    for tx in (sparse, optax_ext.measure_xi(sparse, axis="w", every=2)):
        tx = optax.chain(tx, optax.sgd(0.1))
        params = jnp.ones(SIZE)
        state = optax_ext.init_state(tx, params, mesh)
        step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p) ** 2), tx, mesh)
        for batch in gradients(4)[:3]:
            params, state, _ = step(params, state, batch)
        results.append((np.asarray(params), float(optax_ext.metrics(state)["xi"])))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == 0
    assert results[1][1] > 0.1


@pytest.mark.slow
def test_xi_of_full_density_is_zero_and_of_no_gradient_too():
    np.testing.assert_allclose(
        measured(optax_ext.topk_a(1.0, axis="w"), gradients())[0], 0, atol=1e-5
    )
    assert (measured(optax_ext.topk_a(0.1, axis="w"), 0 * gradients())[0] == 0).all()


@pytest.mark.slow
def test_xi_changes_nothing_else():
    corrected = {"correction": optax_ext.momentum_correction(0.9)}
    for tx in (optax_ext.ok_topk(0.1, axis="w"), optax_ext.topk_a(0.1, axis="w", **corrected)):
        state, (updates, _) = run(tx, gradients())
        _, with_xi, measuring = measured(tx, gradients(), 2)
        np.testing.assert_array_equal(with_xi, updates)
        np.testing.assert_array_equal(measuring.inner.residual, state.residual)


@pytest.mark.slow
def test_arrived_counts_what_is_in_the_update():
    # Ok-Topk delivers k of the union: what a worker sent of the others comes back whole.
    _, (updates, (_, _, infos)) = run(optax_ext.ok_topk(0.1, axis="w"), gradients())
    _, (_, (_, _, all_arrive)) = run(optax_ext.topk_a(0.1, axis="w"), gradients())
    np.testing.assert_array_equal(all_arrive.arrived, all_arrive.selected)
    assert (infos.arrived <= infos.selected).all()
    assert (infos.arrived < infos.selected).any()
    # Each delivered entry is from at least one worker.
    assert (infos.arrived.sum(1)[:, 0] >= infos.delivered[:, 0]).all()
    assert (updates != 0).sum() > 0


@pytest.mark.slow
def test_drift_is_the_change_of_the_threshold():
    _, (_, (_, _, infos)) = run(optax_ext.topk_a(0.1, axis="w"), gradients())
    thresholds = infos.local_threshold
    np.testing.assert_array_equal(infos.threshold_drift[0], 0)
    np.testing.assert_allclose(
        infos.threshold_drift[1:], thresholds[1:] / thresholds[:-1] - 1, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_metrics_are_those_of_numpy():
    state = last_state(optax_ext.ok_topk(0.1, axis="w"), gradients())
    values = {name: float(x) for name, x in jax.jit(optax_ext.metrics)(state).items()}
    residual = np.asarray(state.residual, np.float64)
    info = state.info
    expected = {
        "steps": STEPS,
        "skipped": 0,
        "withheld": 0,
        "clipped": 0,
        "xi": 0,
        "effective_density": info.selected.mean() / SIZE,
        "delivered_density": info.delivered / SIZE,
        "delivered_share": info.arrived.sum() / info.selected.sum(),
        "overflow": info.overflow.sum(),
        "residual_norm": np.sqrt((residual**2).sum(1).mean()),
        "words": info.words,
        "occupancy": info.useful.mean() / info.words,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)
    assert 0 < values["delivered_share"] < 1
    assert set(values) >= {"local_threshold", "global_threshold", "threshold_drift", "xi"}


def test_metrics_of_buckets_are_of_all_of_them():
    tx = optax_ext.bucketed(optax_ext.topk_a(0.1, axis="w"), 2)
    state = optax_ext.init_state(tx, {"a": jnp.zeros(20), "b": jnp.zeros(20)}, {"w": 2})
    a, b = state.buckets
    a = a._replace(residual=jnp.full((2, 20), 3.0), info=a.info._replace(words=jnp.float32(5)))
    b = b._replace(residual=jnp.full((2, 20), 4.0), info=b.info._replace(words=jnp.float32(7)))
    values = optax_ext.metrics(state._replace(buckets=(a, b)))
    np.testing.assert_allclose(values["residual_norm"], np.sqrt(20 * 9 + 20 * 16), rtol=1e-6)
    assert float(values["words"]) == 12


def test_metrics_without_a_sparse_allreduce():
    assert optax_ext.metrics((jnp.zeros(3),)) == {}


@pytest.mark.slow
def test_the_monitor_writes_every_so_many_steps():
    state = last_state(optax_ext.topk_a(0.1, axis="w"), gradients())
    written = []
    monitor = optax_ext.Monitor(lambda *args: written.append(args), every=2, prefix="")
    for _ in range(5):
        monitor(state)
    monitor(state, step=100)
    monitor(state, step=101)
    assert [step for step, _ in written] == [2, 4, 100]
    assert all(isinstance(x, float) for x in written[0][1].values())
    assert written[0][1]["steps"] == STEPS


@pytest.mark.slow
def test_tensorboard_files_have_the_names(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX, of the extra of that name")
    state = last_state(optax_ext.topk_a(0.1, axis="w"), gradients())
    optax_ext.Monitor(optax_ext.tensorboard_writer(tmp_path))(state)
    (events,) = tmp_path.iterdir()
    # A thread of tensorboardX writes them; the last is xi.
    deadline = time.monotonic() + 60
    while b"sparse/xi" not in events.read_bytes() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert b"sparse/residual_norm" in events.read_bytes()


def test_without_tensorboardx_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse-collectives\[tensorboard\]'"):
        optax_ext.tensorboard_writer(tmp_path)


def test_a_writer_that_cannot_be_called():
    with pytest.raises(TypeError, match="write must be callable"):
        optax_ext.Monitor("logs")
