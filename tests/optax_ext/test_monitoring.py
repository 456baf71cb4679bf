"""Watching a run: its numbers, against NumPy and as they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import NODES, mesh, normal, run, train

WORKERS, SIZE, STEPS = 3, 40, 6
GIVEN = normal((STEPS, WORKERS, SIZE))
OK_TOPK, TOPK_A = optax_ext.ok_topk(0.1, axis="w"), optax_ext.topk_a(0.1, axis="w")


def outside(state):
    """As outside a mapped function: the workers' rows, and one copy of shared values."""
    specs = optax_ext.state_specs(jax.tree.map(lambda x: x[0], state))
    return jax.tree.map(
        lambda spec, x: x.reshape(-1, *x.shape[2:]) if len(spec) else x[0], specs, state
    )


HITOPK = optax_ext.published.hitopk(0.1, axis=NODES, inner_axis="device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "every", "workers"),
    [(TOPK_A, 3, (WORKERS,)), (OK_TOPK, 1, (WORKERS,)), (HITOPK, 1, (3, 2))],
    ids=["topk_a", "ok_topk", "hitopk"],
)
def test_xi_is_that_of_equation_5_and_changes_nothing_else(tx, every, workers):
    given, axis = normal((STEPS, *workers, SIZE)), NODES if len(workers) > 1 else "w"
    plain = run(tx, given, axis)
    found = run(optax_ext.measure_xi(tx, axis=axis, every=every), given, axis)
    np.testing.assert_array_equal(found.updates, plain.updates)
    np.testing.assert_array_equal(found.residuals, plain.residuals)
    updates, value, expected = plain.updates.reshape(STEPS, -1, SIZE)[:, 0], 0.0, []
    # The shards of a node are side by side.
    kept = plain.residuals.astype(np.float64).reshape(STEPS, workers[0], -1)[..., :SIZE].sum(1)
    delivered = plain.state.info.delivered.reshape(STEPS, -1)[:, 0]
    for step, gradient in enumerate(given.reshape(STEPS, -1, SIZE).mean(1, dtype=np.float64)):
        mean = gradient + (kept[step - 1] / np.prod(workers) if step else 0)
        top = np.argsort(-np.abs(mean), kind="stable")[: delivered[step]]
        best = np.zeros(SIZE)
        best[top] = mean[top]
        if step % every == 0:
            value = np.linalg.norm(best - updates[step]) / np.linalg.norm(gradient)
        expected.append(value)
    assert min(expected) > 0.1
    xi = found.states.xi.reshape(STEPS, -1)
    np.testing.assert_allclose(xi, np.stack([expected] * xi.shape[1], 1), rtol=1e-4)
    assert (xi == xi[:, :1]).all()


@pytest.mark.slow
def test_xi_of_no_gradient_is_zero_and_in_a_train_step_it_is_reported():
    sparse, results = optax_ext.topk_a(0.1, axis="data"), []
    for tx in (sparse, optax_ext.measure_xi(sparse, axis="data", every=2)):
        tx = optax.chain(tx, optax.sgd(0.1))
        batches = [0 * normal((4, SIZE)), *normal((2, 4, SIZE))]
        ends = train(tx, lambda p, x: jnp.mean((x @ p) ** 2), jnp.ones(SIZE), batches, mesh(2))
        results.append([(np.asarray(p), float(optax_ext.metrics(s)["xi"])) for p, s, _ in ends])
    np.testing.assert_array_equal(results[0][-1][0], results[1][-1][0])
    assert [xi for _, xi in results[0]] == [0] * 4
    assert results[1][1][1] == 0
    assert results[1][3][1] > 0.1


@pytest.mark.slow
def test_metrics_are_those_of_numpy():
    found, every = run(OK_TOPK, GIVEN), run(TOPK_A, GIVEN).state.info
    state = outside(found.last)
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
    # Ok-Topk delivers k of the union, each from at least one worker; topk_a delivers all of it.
    some = found.state.info
    assert (some.arrived <= some.selected).all()
    assert (some.arrived.sum(1)[:, 0] >= some.delivered[:, 0]).all()
    np.testing.assert_array_equal(every.arrived, every.selected)
    drift = every.local_threshold[1:] / every.local_threshold[:-1] - 1
    np.testing.assert_allclose(every.threshold_drift[1:], drift, rtol=1e-5, atol=1e-6)
    assert not every.threshold_drift[0].any()


def test_metrics_of_buckets_are_of_all_of_them_and_of_nothing_none():
    tx = optax_ext.bucketed(optax_ext.topk_a(0.1, axis="w"), 2)
    state = optax_ext.init_state(tx, {"a": jnp.zeros(20), "b": jnp.zeros(20)}, {"w": 2})
    buckets = tuple(
        b._replace(residual=jnp.full((2, 20), kept), info=b.info._replace(words=jnp.float32(words)))
        for b, kept, words in zip(state.buckets, (3.0, 4.0), (5, 7), strict=True)
    )
    values = optax_ext.metrics(state._replace(buckets=buckets))
    np.testing.assert_allclose(values["residual_norm"], np.sqrt(20 * 9 + 20 * 16), rtol=1e-6)
    assert float(values["words"]) == 12
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
