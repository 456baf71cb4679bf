"""shard_map (check_vma on and off), pmap and vmap: one oracle, the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.reference import ok_topk as oracle

WORKERS, DENSITY, STEPS = 4, 0.05, 6
SHAPES = {"kernel": (12, 20), "bias": (31,)}
SIZE = 12 * 20 + 31


def transformation(**options):
    options = {"slack": float(WORKERS), "repartition_period": 3, **options}
    return optax.chain(optax_ext.ok_topk(density=DENSITY, axis="data", **options), optax.sgd(0.5))


def params_at_start():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradients():
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal((STEPS, WORKERS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def one_step(tx, params, state, gradient):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def mesh():
    return jax.make_mesh(
        (WORKERS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS]
    )


def run_shard_map(check_vma):
    tx = transformation()
    params = params_at_start()
    state = optax_ext.init_state(tx, params, mesh())
    specs = optax_ext.state_specs(state)

    def local(params, state, gradient):
        return one_step(tx, params, state, jax.tree.map(lambda g: g[0], gradient))

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh(),
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
            check_vma=check_vma,
        ),
        donate_argnums=1,
    )
    for i in range(STEPS):
        params, state = step(params, state, jax.tree.map(lambda g: g[i], gradients()))  # noqa: B023
    return params, optax_ext.get_state(state).residual


def run_pmap():
    tx = transformation()
    devices = jax.devices()[:WORKERS]
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params_at_start())
    state = jax.pmap(tx.init, axis_name="data", devices=devices)(params)
    step = jax.pmap(lambda p, s, g: one_step(tx, p, s, g), axis_name="data", devices=devices)
    for i in range(STEPS):
        params, state = step(params, state, jax.tree.map(lambda g: g[i], gradients()))  # noqa: B023
    for leaf in jax.tree.leaves(params):
        assert (np.asarray(leaf) == np.asarray(leaf)[0]).all()
    return jax.tree.map(lambda x: x[0], params), optax_ext.get_state(state).residual[:, 0]


def run_vmap():
    tx = transformation()
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params_at_start())
    state = sc.simulate(tx.init, axis="data", axis_size=WORKERS)(params)
    step = sc.simulate(lambda p, s, g: one_step(tx, p, s, g), axis="data", axis_size=WORKERS)
    for i in range(STEPS):
        params, state = step(params, state, jax.tree.map(lambda g: g[i], gradients()))  # noqa: B023
    return jax.tree.map(lambda x: x[0], params), optax_ext.get_state(state).residual[:, 0]


MODES = {
    "shard_map": lambda: run_shard_map(True),
    "shard_map, check_vma=False": lambda: run_shard_map(False),
    "pmap": run_pmap,
    "vmap": run_vmap,
}


@functools.cache
def result_of(mode):
    return MODES[mode]()


def oracle_result():
    flat = np.concatenate(
        [gradients()[name].reshape(STEPS, WORKERS, -1) for name in sorted(SHAPES)], axis=-1
    )
    params, residual = np.zeros(SIZE), np.zeros((WORKERS, SIZE), np.float32)
    for gradient in flat:
        total, residual = oracle.training_step(residual + gradient, round(DENSITY * SIZE))
        params -= 0.5 * total / WORKERS
    return params, residual


@pytest.mark.parametrize(
    "mode", [pytest.param(x, marks=() if x == "vmap" else pytest.mark.slow) for x in MODES]
)
def test_mode_matches_the_oracle(mode):
    params, residual = result_of(mode)
    expected_params, expected_residual = oracle_result()
    flat = np.concatenate([np.ravel(params[name]) for name in sorted(SHAPES)])
    np.testing.assert_allclose(flat, expected_params, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(residual, expected_residual)


@pytest.mark.slow
def test_modes_give_the_same_bits():
    results = [jax.tree.leaves(result_of(mode)) for mode in MODES]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_two_mesh_axes_are_one_set_of_workers():
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    two = Mesh(devices, ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    tx = optax_ext.ok_topk(density=DENSITY, axis=("host", "device"), slack=4.0)
    params = jnp.zeros(SIZE)
    state = optax_ext.init_state(tx, params, two)
    specs = optax_ext.state_specs(state)
    split = P(("host", "device"))
    step = jax.jit(
        jax.shard_map(
            lambda s, g: tx.update(g[0], s),
            mesh=two,
            in_specs=(specs, split),
            out_specs=(P(), specs),
        )
    )
    acc = np.random.default_rng(1).standard_normal((4, SIZE)).astype(np.float32)
    updates, state = step(state, acc)
    total, residual = oracle.training_step(acc, round(DENSITY * SIZE))
    np.testing.assert_allclose(updates, total / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.residual, residual)


def test_the_state_of_all_workers_on_one_device_equals_that_on_a_mesh():
    outside = optax_ext.init_state(transformation(), params_at_start(), {"data": WORKERS})
    inside = optax_ext.init_state(transformation(), params_at_start(), mesh())
    assert jax.tree.structure(outside) == jax.tree.structure(inside)
    for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    expected = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), optax_ext.state_specs(inside))
    for leaf, sharding in zip(jax.tree.leaves(inside), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.slow
def test_init_and_scan_inside_one_mapped_function():
    """The carry of a scan has the same types before and after a step."""
    tx = transformation()

    def train(gradient):
        params = params_at_start()
        carry = (params, tx.init(params))
        carry, _ = jax.lax.scan(
            lambda carry, g: (one_step(tx, *carry, g), None),
            carry,
            jax.tree.map(lambda g: g[:, 0], gradient),
        )
        return carry[0]

    params = jax.jit(jax.shard_map(train, mesh=mesh(), in_specs=P(None, "data"), out_specs=P()))(
        gradients()
    )
    flat = np.concatenate([np.ravel(params[name]) for name in sorted(SHAPES)])
    np.testing.assert_allclose(flat, oracle_result()[0], rtol=1e-5, atol=1e-6)
