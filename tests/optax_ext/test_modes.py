"""shard_map (check_vma on and off), pmap and vmap: one oracle, the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mapped, mesh, normal, same, slow_but
from tests.reference import ok_topk as oracle

WORKERS, DENSITY, STEPS = 4, 0.05, 6
SHAPES = {"kernel": (12, 20), "bias": (31,)}
SIZE = 12 * 20 + 31


TX = optax.chain(
    optax_ext.ok_topk(DENSITY, axis="data", slack=float(WORKERS), repartition_period=3),
    optax.sgd(0.5),
)


def params_at_start():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradients():
    return {
        name: normal((STEPS, WORKERS, *shape), i) for i, (name, shape) in enumerate(SHAPES.items())
    }


GIVEN = [jax.tree.map(lambda g, i=i: g[i], gradients()) for i in range(STEPS)]


def one_step(params, state, gradient):
    updates, state = TX.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def run_shard_map(check_vma):
    params, on = params_at_start(), mesh()
    state = optax_ext.init_state(TX, params, on)
    specs = optax_ext.state_specs(state)
    step = jax.shard_map(
        lambda p, s, g: one_step(p, s, jax.tree.map(lambda x: x[0], g)),
        mesh=on,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    step = jax.jit(step, donate_argnums=1)
    for given in GIVEN:
        params, state = step(params, state, given)
    return params, optax_ext.get_state(state).residual


def run_lanes(mapped):
    """With an axis of the workers in front of all; ``mapped`` maps a function over it."""
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params_at_start())
    state, step = mapped(TX.init)(params), mapped(one_step)
    for given in GIVEN:
        params, state = step(params, state, given)
    for leaf in jax.tree.leaves(params):
        assert (np.asarray(leaf) == np.asarray(leaf)[0]).all()
    return jax.tree.map(lambda x: x[0], params), optax_ext.get_state(state).residual[:, 0]


MODES = {
    "shard_map": lambda: run_shard_map(True),
    "shard_map, check_vma=False": lambda: run_shard_map(False),
    "pmap": lambda: run_lanes(
        lambda f: jax.pmap(f, axis_name="data", devices=jax.devices()[:WORKERS])
    ),
    "vmap": lambda: run_lanes(lambda f: sc.simulate(f, axis="data", axis_size=WORKERS)),
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


@pytest.mark.parametrize("mode", slow_but(["vmap"], MODES))
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
    on = mesh((2, 2), ("host", "device"))
    tx = optax_ext.ok_topk(density=DENSITY, axis=("host", "device"), slack=4.0)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), on)
    acc = normal((4, SIZE), 1)
    updates, state = mapped(tx, on, state)(acc, state)
    total, residual = oracle.training_step(acc, round(DENSITY * SIZE))
    np.testing.assert_allclose(updates, total / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.residual, residual)


def test_the_state_of_all_workers_on_one_device_equals_that_on_a_mesh():
    outside = optax_ext.init_state(TX, params_at_start(), {"data": WORKERS})
    inside = optax_ext.init_state(TX, params_at_start(), mesh())
    same(outside, inside)
    expected = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), optax_ext.state_specs(inside))
    for leaf, sharding in zip(jax.tree.leaves(inside), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.slow
def test_init_and_scan_inside_one_mapped_function():
    """The carry of a scan has the same types before and after a step."""

    def train(gradient):
        params = params_at_start()
        carry, _ = jax.lax.scan(
            lambda carry, g: (one_step(*carry, g), None),
            (params, TX.init(params)),
            jax.tree.map(lambda g: g[:, 0], gradient),
        )
        return carry[0]

    params = jax.jit(jax.shard_map(train, mesh=mesh(), in_specs=P(None, "data"), out_specs=P()))(
        gradients()
    )
    flat = np.concatenate([np.ravel(params[name]) for name in sorted(SHAPES)])
    np.testing.assert_allclose(flat, oracle_result()[0], rtol=1e-5, atol=1e-6)
