"""Numbers to watch a run by: against NumPy, and written where they should be."""

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import mesh, normal, run, train

WORKERS, SIZE, STEPS = 3, 40, 6
GIVEN = normal((STEPS, WORKERS, SIZE))
OK_TOPK, TOPK_A = optax_ext.ok_topk(0.1, axis="w"), optax_ext.topk_a(0.1, axis="w")


def outside(state):
    """As outside of a mapped function: the workers' rows, and one of what all share."""
    specs = optax_ext.state_specs(jax.tree.map(lambda x: x[0], state))
    return jax.tree.map(
        lambda spec, x: x.reshape(-1, *x.shape[2:]) if len(spec) else x[0], specs, state
    )


def measured(tx, given, every=1, axis="w"):
    return run(optax_ext.measure_xi(tx, axis=axis, every=every), given, axis)


def exact_xi(found, given, workers, every=1):
    """Equation 5 of Ok-Topk at each step, from the residuals and the updates.

    Of `given` the mean over the workers, ``[steps, n]``; the shards of a node are side by side.
    """
    updates, value, xi = found.updates.reshape(STEPS, -1, SIZE)[:, 0], 0.0, []
    residuals = found.residuals.astype(np.float64).reshape(STEPS, workers[0], -1)
    kept = residuals[..., :SIZE].sum(1) / np.prod(workers)
    delivered = found.state.info.delivered.reshape(STEPS, -1)[:, 0]
    for step, gradient in enumerate(given):
        mean = gradient + (kept[step - 1] if step else 0)
        top = np.argsort(-np.abs(mean), kind="stable")[: delivered[step]]
        best = np.zeros(SIZE)
        best[top] = mean[top]
        if step % every == 0:
            value = np.linalg.norm(best - updates[step]) / np.linalg.norm(gradient)
        xi.append(value)
    return xi


NODES = ("node", "device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "every", "workers"),
    [
        (optax_ext.topk_a(0.1, axis="w"), 3, (WORKERS,)),
        (optax_ext.ok_topk(0.1, axis="w"), 1, (WORKERS,)),
        (optax_ext.published.hitopk(0.1, axis=NODES, inner_axis="device"), 1, (3, 2)),
    ],
    ids=["topk_a", "ok_topk", "hitopk"],
)
def test_xi_is_that_of_equation_5_and_changes_nothing_else(tx, every, workers):
    given, axis = normal((STEPS, *workers, SIZE)), NODES if len(workers) > 1 else "w"
    plain, found = run(tx, given, axis), measured(tx, given, every, axis)
    mean = given.reshape(STEPS, -1, SIZE).mean(1, dtype=np.float64)
    expected = exact_xi(plain, mean, workers, every)
    xi = found.states.xi.reshape(STEPS, -1)
    np.testing.assert_allclose(xi[:, 0], expected, rtol=1e-4)
    assert (xi == xi[:, :1]).all()
    assert min(expected) > 0.1
    np.testing.assert_array_equal(found.updates, plain.updates)
    np.testing.assert_array_equal(found.residuals, plain.residuals)


def test_what_xi_measures_is_a_sparse_allreduce_alone():
    tx = optax.chain(optax_ext.topk_a(0.1, axis="w"), optax.sgd(0.1))
    with pytest.raises(TypeError, match="tx must be a sparse allreduce alone"):
        optax_ext.init_state(optax_ext.measure_xi(tx, axis="w"), jnp.zeros(4), {"w": 2})
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        optax_ext.measure_xi(optax_ext.topk_a(0.1, axis="w"), axis="w", every=0)


@pytest.mark.slow
def test_xi_in_a_train_step_on_a_mesh():
    """Its state is found, split over the workers and reported like any other."""
    sparse, results = optax_ext.topk_a(0.1, axis="data"), []
    for tx in (sparse, optax_ext.measure_xi(sparse, axis="data", every=2)):
        tx = optax.chain(tx, optax.sgd(0.1))
        batches = normal((3, 4, SIZE))
        params, state, _ = train(
            tx, lambda p, x: jnp.mean((x @ p) ** 2), jnp.ones(SIZE), batches, mesh(2)
        )[-1]
        results.append((np.asarray(params), float(optax_ext.metrics(state)["xi"])))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == 0
    assert results[1][1] > 0.1


@pytest.mark.slow
def test_xi_of_full_density_is_zero_and_of_no_gradient_too():
    whole, part = (optax_ext.topk_a(density, axis="w") for density in (1.0, 0.1))
    np.testing.assert_allclose(measured(whole, GIVEN).states.xi, 0, atol=1e-5)
    assert (measured(part, 0 * GIVEN).states.xi == 0).all()


@pytest.mark.slow
def test_arrived_counts_what_is_in_the_update():
    # Ok-Topk delivers k of the union: what a worker sent of the others comes back whole.
    some, every = run(OK_TOPK, GIVEN).state.info, run(TOPK_A, GIVEN).state.info
    np.testing.assert_array_equal(every.arrived, every.selected)
    assert (some.arrived <= some.selected).all()
    assert (some.arrived < some.selected).any()
    # Each delivered entry is from at least one worker.
    assert (some.arrived.sum(1)[:, 0] >= some.delivered[:, 0]).all()


@pytest.mark.slow
def test_drift_is_the_change_of_the_threshold():
    info = run(TOPK_A, GIVEN).state.info
    thresholds = info.local_threshold
    np.testing.assert_array_equal(info.threshold_drift[0], 0)
    expected = thresholds[1:] / thresholds[:-1] - 1
    np.testing.assert_allclose(info.threshold_drift[1:], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_metrics_are_those_of_numpy():
    state = outside(run(OK_TOPK, GIVEN).last)
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
    state = outside(run(TOPK_A, GIVEN).last)
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
    state = outside(run(TOPK_A, GIVEN).last)
    optax_ext.Monitor(optax_ext.contrib.tensorboard_writer(tmp_path))(state)
    (events,) = tmp_path.iterdir()
    # A thread of tensorboardX writes them; the last is xi.
    deadline = time.monotonic() + 60
    while b"sparse/xi" not in events.read_bytes() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert b"sparse/residual_norm" in events.read_bytes()


def test_without_tensorboardx_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse-collectives\[tensorboard\]'"):
        optax_ext.contrib.tensorboard_writer(tmp_path)


def test_a_writer_that_cannot_be_called():
    with pytest.raises(TypeError, match="write must be callable"):
        optax_ext.Monitor("logs")
