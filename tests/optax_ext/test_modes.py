"""shard_map (check_vma on and off), pmap, vmap, one axis of workers or nodes: the same oracles."""

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
from tests.optax_ext.helpers import bits, flat, mapped, mesh, normal, run, same, slow_but
from tests.reference import hierarchical as of_nodes
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
    params, residual = np.zeros(SIZE), np.zeros((WORKERS, SIZE), np.float32)
    for gradient in flat(gradients(), (STEPS, WORKERS)).astype(np.float32):
        total, residual = oracle.training_step(residual + gradient, round(DENSITY * SIZE))
        params -= 0.5 * total / WORKERS
    return params, residual


@pytest.mark.parametrize("mode", slow_but(["vmap"], MODES))
def test_mode_matches_the_oracle_and_has_the_bits_of_the_others(mode):
    params, residual = result_of(mode)
    expected_params, expected_residual = oracle_result()
    np.testing.assert_allclose(flat(params), expected_params, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(residual, expected_residual)
    assert bits(result_of(mode)) == bits(result_of("vmap"))


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


@pytest.mark.parametrize("over_nodes", [False, True])
def test_the_state_of_all_workers_on_one_device_equals_that_on_a_mesh(over_nodes):
    correction = optax_ext.momentum_correction(0.9)
    tx = hierarchical(OK_TOPK, correction=correction) if over_nodes else TX
    on = mesh((3, 2), NODES) if over_nodes else mesh()
    outside = optax_ext.init_state(tx, params_at_start(), dict(on.shape))
    inside = optax_ext.init_state(tx, params_at_start(), on)
    same(outside, inside)
    expected = jax.tree.map(lambda spec: NamedSharding(on, spec), optax_ext.state_specs(inside))
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
    np.testing.assert_allclose(flat(params), oracle_result()[0], rtol=1e-5, atol=1e-6)


# Nodes of workers.

NODES = ("node", "device")
OK_TOPK = sc.allreduce.ok_topk(density=DENSITY, slack=1.0)


def hierarchical(outer, **options):
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=outer)
    selector = sc.select.topk(density=DENSITY)
    return optax_ext.sparse_allreduce(selector, exchange, axis=NODES, **options)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (2, 1)])
def test_a_hierarchy_is_algorithm_2_of_the_paper(shape):
    given = normal((STEPS, *shape, 101))
    found, shard = run(hierarchical(sc.allreduce.topk_a()), given, NODES), -(-101 // shape[1])
    kept = np.zeros((*shape, shard), np.float32)
    for step, gradient in enumerate(given):
        total, kept = of_nodes.training_step(gradient, kept, round(DENSITY * shard))
        mean = total / np.prod(shape)
        np.testing.assert_allclose(found.updates[step, 0, 0], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.residuals[step], kept, rtol=1e-4, atol=1e-5)
        assert (found.state.info.delivered[step] == np.count_nonzero(total)).all()


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_a_hierarchy_does_what_it_does_in_simulation(check_vma):
    given, on, tx = normal((STEPS, 3, 2, 101)), mesh((3, 2), NODES), hierarchical(OK_TOPK)
    state, expected = optax_ext.init_state(tx, jnp.zeros(101), on), run(tx, given, NODES)
    specs = optax_ext.state_specs(state)
    assert (specs.residual, specs.allreduce.boundaries) == (P(NODES), P("device"))
    step = mapped(tx, on, state, check_vma=check_vma)
    for i, gradient in enumerate(given):
        updates, state = step(gradient.reshape(6, 101), state)
        np.testing.assert_allclose(updates, expected.updates[i, 0, 0], rtol=1e-5, atol=1e-6)
        residuals = expected.residuals[i].reshape(6, -1)
        np.testing.assert_allclose(state.residual, residuals, atol=1e-5)
