"""The state of PowerSGD and ACP-SGD: in a loop, saved, for other workers; and what is an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_ext
from optax_ext._low_rank import _factors, _matrices
from tests.optax_ext.helpers import bits, mesh, normal, same, slow, train

METHODS = {"powersgd": optax_ext.powersgd, "acp_sgd": optax_ext.acp_sgd}
# Each compiles programs of its own.
both = pytest.mark.parametrize("method", ["acp_sgd", slow("powersgd")])
PARAMS = {"b": np.zeros(12, np.float32), "w": np.zeros((16, 12), np.float32)}
SIZE, STEPS = 16 * 12, 40


def transformation(method, **options):
    """SGD whose residual is an update of the parameters."""
    return METHODS[method](
        2,
        axis="data",
        local=optax.scale_by_learning_rate(0.1),
        residual=optax_ext.residual(step_ahead=1.0),
        **options,
    )


def loss_fn(params, batch):
    x, y = batch
    return 0.5 * jnp.mean(jnp.sum((x @ params["w"] + params["b"][None] - y) ** 2, axis=1))


def batch_of(seed):
    x = normal((32, 16), seed)
    return x, x @ normal((16, 12), 100) + 1 + np.float32(0.1) * normal((32, 12), seed + 200)


@functools.cache
def trained(method):
    """Parameters, states and losses before the first step and after each."""
    batches = [batch_of(seed) for seed in range(STEPS)]
    return train(transformation(method), loss_fn, PARAMS, batches, mesh())


@pytest.mark.slow
@both
def test_it_trains_a_step_ahead_in_a_checked_step(method):
    results = trained(method)
    params, state, loss = results[-1]
    # The noise alone is a loss of 0.06.
    assert float(results[1][2]) > 80
    assert float(loss) < 1
    values = optax_ext.metrics(state)
    assert float(values["steps"]) == STEPS
    assert float(values["delivered_density"]) == float(values["occupancy"]) == 1
    assert float(values["effective_density"]) < 2 * 28 / SIZE + 1e-6
    waiting = np.asarray(state.residual).mean(0).reshape(16, 12)
    flushed, empty = optax_ext.flush(params, state)
    np.testing.assert_allclose(flushed["w"], params["w"] + waiting, rtol=1e-5, atol=1e-6)
    assert not np.asarray(empty.residual).any()


@both
def test_it_is_restored_to_the_bit(method, tmp_path):
    results, tx = trained(method), transformation(method)
    params, state, _ = results[5]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        expected = optax_ext.abstract_state(tx, PARAMS, mesh())
        restored = checkpointer.restore(tmp_path / "state", expected)
    after = train(tx, loss_fn, params, [batch_of(5)], mesh(), state=restored)[-1]
    assert bits(after[:2]) == bits(results[6][:2])


@both
def test_other_workers_have_the_sum_and_the_factors(method):
    params, state, _ = trained(method)[9]
    total = np.asarray(state.residual, np.float64).sum(0)
    for workers in (2, 8):
        fresh = optax_ext.init_state(transformation(method), PARAMS, mesh(workers))
        moved = optax_ext.reshard(state, fresh)
        assert moved.residual.shape == (workers, SIZE)
        np.testing.assert_allclose(np.asarray(moved.residual, np.float64).sum(0), total, atol=1e-6)
        assert int(moved.count) == 9
        same(moved.allreduce, state.allreduce)
    higher = METHODS[method](
        3, axis="data", local=optax.scale_by_learning_rate(0.1), residual=optax_ext.residual()
    )
    fresh = optax_ext.init_state(higher, PARAMS, {"data": 3})
    again = optax_ext.reshard(state, fresh)
    np.testing.assert_array_equal(again.allreduce.right, fresh.allreduce.right)
    gradient, _ = optax_ext.consolidate(params, state)
    np.testing.assert_allclose(gradient["w"].ravel(), total / 4, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [
        ((5, 7), 5, 7),
        ((3, 3, 64, 128), 576, 128),
        ((1, 1, 64, 256), 64, 256),
        ((512, 8, 64), 512, 512),
        ((8, 64, 512), 512, 512),
        ((9,), 1, 9),
        ((), 1, 1),
    ],
)
def test_how_leaves_are_matrices(shape, rows, cols):
    assert _matrices.sides(shape) == (rows, cols)
    most = _matrices.largest_rank(shape)
    assert most * (rows + cols) < max(rows * cols, 1) <= (most + 1) * (rows + cols)


@pytest.mark.parametrize(
    "case", ["random", "zero", "one column", "equal", "tiny", "huge", "lengths"]
)
def test_a_basis_is_orthonormal_whatever_the_columns(case):
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    x = {
        "random": x,
        "zero": 0 * x,
        "one column": x * np.float32([0, 1, 0, 0]),
        "equal": np.repeat(x[:, :1], 4, axis=1),
        "tiny": x * np.float32(1e-35),
        "huge": x * np.float32(1e30),
        "lengths": x * np.float32([1e-20, 1, 1e20, 1e-9]),
    }[case]
    basis = np.asarray(_factors.basis(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-5)
    if case in ("random", "tiny", "huge", "lengths"):
        unit = x / np.abs(x).max(0)
        np.testing.assert_allclose(basis @ (basis.T @ unit), unit, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"rank": 1.5}, "rank must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"residual": optax_ext.residual(step_ahead=0.1)}, "Put the rate in front"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        optax_ext.powersgd(**({"rank": 2, "axis": "data"} | options))


@both
def test_a_rank_that_makes_no_leaf_smaller(method):
    message = r"rank=7 makes no leaf.*params\['w'\], a matrix of 16 x 12,.*at most 6"
    with pytest.raises(ValueError, match=message):
        optax_ext.init_state(METHODS[method](7, axis="data"), PARAMS, {"data": 2})


@both
def test_without_matrices_all_is_dense_and_without_leaves_nothing_is_done(method):
    vectors = {"b": jnp.zeros(3), "scale": jnp.zeros(())}
    for params in (vectors, {}):
        state = optax_ext.init_state(METHODS[method](4, axis="data"), params, {"data": 2})
        assert state.residual.shape == (2, 0)


WRAPPED = {
    "pmap": lambda tx: tx,
    "multi_steps": lambda tx: optax_ext.multi_steps(optax.chain(tx, optax.sgd(0.1)), 2),
    "buckets": lambda tx: optax.chain(optax_ext.bucketed(tx, 2), optax.adam(1e-2)),
    "xi": lambda tx: optax.chain(optax_ext.measure_xi(tx, axis="data"), optax.sgd(0.1)),
    "groups": lambda tx: optax.multi_transform(
        {"low": tx, "dense": optax_ext.dense(axis="data")}, {"b": "dense", "w": "low"}
    ),
}


@pytest.mark.slow
@both
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_what_goes_around_a_sparse_allreduce_goes_around_it(method, wrapper):
    tx = WRAPPED[wrapper](METHODS[method](2, axis="data"))
    batches = normal((6, 2, 8, 16))

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) @ params["w"].T) ** 2)

    def worker(batches):
        def step(carry, batch):
            params, state = carry
            gradient = jax.grad(loss)(params, batch)
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), updates

        params = {"b": jnp.ones(12), "w": jnp.eye(16, 12)}
        return jax.lax.scan(step, (params, tx.init(params)), batches)

    mapped = jax.pmap if wrapper == "pmap" else jax.vmap
    (params, state), updates = mapped(worker, axis_name="data")(batches.swapaxes(0, 1))
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_array_equal(leaf[0], leaf[1])
        assert np.asarray(leaf).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


@pytest.mark.slow
@both
@pytest.mark.parametrize("check_vma", [True, False])
def test_workers_along_two_axes_of_a_larger_mesh(method, check_vma):
    on = mesh((2, 2, 2), ("node", "data", "model"))
    tx = METHODS[method](2, axis=("node", "data"), dense_steps=1)
    batches = [batch_of(seed) for seed in range(6)]
    tx = optax.chain(tx, optax.sgd(0.05))
    results = train(tx, loss_fn, PARAMS, batches, on, check_vma=check_vma)
    losses = [float(loss) for _, _, loss in results[1:]]
    assert losses[-1] < losses[1] < losses[0]
    assert optax_ext.get_state(results[-1][1]).residual.shape == (4, SIZE)
