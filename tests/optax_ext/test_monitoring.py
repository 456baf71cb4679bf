"""Numbers to watch a run by: against NumPy, and written where they should be."""

import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
from tests.optax_ext.test_momentum_correction import SIZE, STEPS, WORKERS, gradients, run


def last_state(tx, given, axis_size=WORKERS):
    """As outside of a mapped function: the workers' rows, and one of what all share."""
    state, _ = run(tx, given, axis_size=axis_size)
    info = state.info
    shared = {name: x[0] for name, x in info._asdict().items() if x.ndim == 1}
    rows = {name: x[:, 0] for name, x in info._asdict().items() if x.ndim == 2}
    one = {name: getattr(state, name)[0] for name in ("count", "skipped", "dropped", "clipped")}
    info = info._replace(**shared, **rows)
    return state._replace(residual=state.residual[:, 0], info=info, **one)


def exact_xi(tx, given, every=1):
    """Equation 5 of Ok-Topk at each step, from the residuals and the updates."""
    _, (updates, (residuals, _, infos)) = run(tx, given)
    before, found = np.zeros((WORKERS, SIZE)), []
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
    return found, infos


@pytest.mark.parametrize(
    ("alias", "every"),
    [
        (optax_ext.topk_a, 3),
        pytest.param(optax_ext.topk_a, 1, marks=pytest.mark.slow),
        pytest.param(optax_ext.ok_topk, 1, marks=pytest.mark.slow),
        pytest.param(optax_ext.ok_topk, 3, marks=pytest.mark.slow),
    ],
)
def test_xi_is_that_of_equation_5(alias, every):
    tx = alias(0.1, axis="w", xi_every=every)
    expected, infos = exact_xi(tx, gradients(), every)
    np.testing.assert_allclose(infos.xi[:, 0], expected, rtol=1e-4)
    assert min(expected) > 0.1


def test_xi_of_full_density_is_zero_and_of_no_gradient_too():
    _, (_, (_, _, infos)) = run(optax_ext.topk_a(1.0, axis="w", xi_every=1), gradients())
    np.testing.assert_allclose(infos.xi, 0, atol=1e-5)
    _, (_, (_, _, infos)) = run(optax_ext.topk_a(0.1, axis="w", xi_every=1), 0 * gradients())
    assert (infos.xi == 0).all()


@pytest.mark.slow
def test_xi_changes_nothing_else():
    for correction in (None, optax_ext.momentum_correction(0.9)):
        results = [
            run(optax_ext.ok_topk(0.1, axis="w", correction=correction, xi_every=n), gradients())
            for n in (0, 2)
        ]
        np.testing.assert_array_equal(results[0][1][0], results[1][1][0])
        np.testing.assert_array_equal(results[0][0].residual, results[1][0].residual)


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


def test_drift_is_the_change_of_the_threshold():
    _, (_, (_, _, infos)) = run(optax_ext.topk_a(0.1, axis="w"), gradients())
    thresholds = infos.local_threshold
    np.testing.assert_array_equal(infos.threshold_drift[0], 0)
    np.testing.assert_allclose(
        infos.threshold_drift[1:], thresholds[1:] / thresholds[:-1] - 1, rtol=1e-5, atol=1e-6
    )


def test_metrics_are_those_of_numpy():
    state = last_state(optax_ext.ok_topk(0.1, axis="w"), gradients())
    values = {name: float(x) for name, x in jax.jit(optax_ext.metrics)(state).items()}
    residual = np.asarray(state.residual, np.float64)
    info = state.info
    expected = {
        "steps": STEPS,
        "skipped": 0,
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
    tx = optax_ext.bucketed(optax_ext.topk_a(0.1, axis="w", axis_size=2), 2)
    state = tx.init({"a": jnp.zeros(20), "b": jnp.zeros(20)})
    a, b = state.buckets
    a = a._replace(residual=jnp.full((2, 20), 3.0), info=a.info._replace(words=jnp.float32(5)))
    b = b._replace(residual=jnp.full((2, 20), 4.0), info=b.info._replace(words=jnp.float32(7)))
    values = optax_ext.metrics(state._replace(buckets=(a, b)))
    np.testing.assert_allclose(values["residual_norm"], np.sqrt(20 * 9 + 20 * 16), rtol=1e-6)
    assert float(values["words"]) == 12


def test_metrics_without_a_sparse_allreduce():
    assert optax_ext.metrics((jnp.zeros(3),)) == {}


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
