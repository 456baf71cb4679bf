"""The train step, the state in a chain, and what a compiled step costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc

WORKERS = 8


def mesh():
    return jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(
        (jnp.tanh(x @ params["hidden"]) @ params["out"] + params["bias"][None] - y) ** 2
    )


def problem(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "hidden": rng.standard_normal((16, 32)).astype(np.float32) / 4,
        "out": rng.standard_normal((32, 4)).astype(np.float32) / 6,
        "bias": np.zeros((4,), np.float32),
    }
    teacher = {name: rng.standard_normal(leaf.shape) / 4 for name, leaf in params.items()}

    def batches():
        while True:
            x = rng.standard_normal((64, 16)).astype(np.float32)
            y = np.tanh(x @ teacher["hidden"]) @ teacher["out"]
            yield x, y.astype(np.float32)

    return jax.tree.map(jnp.asarray, params), batches()


def train(tx, steps, check_vma=True, **options):
    params, batches = problem()
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), check_vma=check_vma, **options)
    losses = []
    for _, batch in zip(range(steps), batches, strict=False):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses, step


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_at_density_one_it_trains_like_the_dense_one(check_vma):
    sparse = optax_ext.ok_topk(density=1.0, axis="data", slack=float(WORKERS))
    dense = optax_ext.dense(axis="data")
    runs = [train(optax.chain(tx, optax.adam(1e-2)), 20, check_vma)[:3] for tx in (sparse, dense)]
    np.testing.assert_allclose(runs[0][2], runs[1][2], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(runs[0][0]), jax.tree.leaves(runs[1][0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_the_dense_step_has_the_gradient_of_the_whole_batch():
    params, batches = problem()
    batch = next(batches)
    tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    new, _, loss = step(params, optax_ext.init_state(tx, params, mesh()), batch)
    expected_loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(new[name], params[name] - gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.05, momentum=0.9),
        optax.adamw(3e-3),
        optax.lamb(1e-2),
    ],
    ids=["momentum", "adamw", "lamb"],
)
def test_it_learns_in_front_of_any_optimizer(optimizer):
    tx = optax.chain(optax_ext.ok_topk(density=0.05, axis="data"), optimizer)
    _, state, losses, _ = train(tx, 150)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])
    assert int(optax_ext.get_state(state).count) == 150


def test_one_trace_and_one_program_for_all_steps():
    tx = optax.chain(optax_ext.ok_topk(density=0.05, axis="data"), optax.sgd(0.1))
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    params, batches = problem()
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(counted, tx, mesh())
    for _, batch in zip(range(5), batches, strict=False):
        params, state, _ = step(params, state, batch)
    assert len(traces) == 1


@pytest.mark.slow
def test_params_and_state_are_donated():
    tx = optax_ext.ok_topk(density=0.05, axis="data")
    params, batches = problem()
    params = jax.device_put(params, jax.NamedSharding(mesh(), P()))
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    step(params, state, next(batches))
    assert state.residual.is_deleted()
    assert params["hidden"].is_deleted()


@pytest.mark.slow
def test_the_step_needs_one_buffer_of_n_beside_the_residual():
    """Of a flat gradient: the update. The sum is made in the donated residual."""
    size = 1 << 20
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    tx = optax_ext.ok_topk(density=0.01, axis="data")
    gradient = jnp.zeros(size)
    state = optax_ext.init_state(tx, gradient, one)
    specs = optax_ext.state_specs(state)
    step = jax.shard_map(
        tx.update, mesh=one, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    memory = jax.jit(step, donate_argnums=1).lower(gradient, state).compile().memory_analysis()
    # Scratch for packed masks and k-sized buffers, and no n-sized one.
    assert memory.temp_size_in_bytes < 0.75 * 4 * size
    assert memory.alias_size_in_bytes >= 4 * size


@pytest.mark.slow
def test_aux_is_averaged_over_the_workers():
    def with_aux(params, batch):
        loss = loss_fn(params, batch)
        return loss, {"twice": 2 * loss}

    tx = optax.chain(optax_ext.ok_topk(density=0.05, axis="data"), optax.sgd(0.1))
    params, batches = problem()
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(with_aux, tx, mesh(), has_aux=True)
    _, _, loss, aux = step(params, state, next(batches))
    np.testing.assert_allclose(aux["twice"], 2 * loss, rtol=1e-6)


def test_the_state_is_found_and_specified_anywhere_in_a_chain():
    tx = optax.chain(
        optax.clip(1.0),
        optax.chain(optax_ext.ok_topk(density=0.1, axis="data"), optax.scale(1.0)),
        optax.adam(1e-3),
    )
    params, _ = problem()
    state = optax_ext.init_state(tx, params, mesh())
    found = optax_ext.get_state(state)
    assert isinstance(found, optax_ext.SparseAllreduceState)
    assert found.residual.shape == (WORKERS, 16 * 32 + 32 * 4 + 4)
    specs = optax_ext.state_specs(state)
    per_worker = optax_ext.get_state(specs)
    assert per_worker.residual == P("data")
    assert per_worker.info.selected == P("data")
    assert per_worker.info.delivered == P()
    assert specs[2][0].mu["out"] == P()
    assert optax_ext.get_state(optax.adam(1e-3).init(params)) is None
    assert optax_ext.get_info(optax.adam(1e-3).init(params)) is None
    # Before the first step there is nothing to report.
    assert optax_ext.get_info(state).words == 0


@pytest.mark.slow
def test_the_traffic_of_a_whole_train_step_is_that_of_the_allreduce_and_the_loss():
    tx = optax.chain(optax_ext.ok_topk(density=0.05, axis="data"), optax.sgd(0.1))
    params, batches = problem()
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    traced = step.trace(params, state, next(batches))
    even = sc.traffic.of_traced(traced, frequencies={"balance": (1.0, 0.0, 0.0, 0.0)})
    n = 16 * 32 + 32 * 4 + 4
    allreduce = sc.traffic.of_allreduce(
        sc.allreduce.ok_topk(density=0.05),
        size=n,
        capacity=round(0.05 * n),
        axis_size=WORKERS,
        frequencies={"balance": (1.0, 0.0, 0.0, 0.0)},
    )
    # Beside it: the mean loss, and the agreement on non-finite values, a word of each worker that
    # is gathered with the windows.
    assert even.words == pytest.approx(allreduce.words + 2 * 7 / 8 + 7)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("selector", ["topk", "threshold_reuse"])
def test_a_step_of_the_size_of_a_model_lowers_for(platform, selector):
    """For 16 devices that are not there; large enough for the paths of large buffers."""
    n, workers = 1 << 22, 16
    choose = getattr(sc.select, selector)(density=0.01)
    tx = optax_ext.ok_topk(density=0.01, axis="data", selector=choose)
    abstract = jax.sharding.AbstractMesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.ShapeDtypeStruct((n,), jnp.float32)
    state = jax.eval_shape(lambda g: optax_ext.init_state(tx, g, {"data": workers}), gradient)
    specs = optax_ext.state_specs(state)
    step = jax.shard_map(
        lambda g, s: tx.update(jax.lax.pcast(g, "data", to="varying"), s),
        mesh=abstract,
        in_specs=(P(), specs),
        out_specs=(P(), specs),
    )
    traced = jax.jit(step).trace(gradient, state)
    traced.lower(lowering_platforms=(platform,))
    k = round(0.01 * n)
    words = sc.traffic.of_traced(traced, frequencies={"balance": (0.0, 0.0, 1.0, 0.0)}).words
    assert words <= 6 * k * (workers - 1) / workers
