"""The same oracles and bits in every mapped function, and for specs of the same placement.

shard_map (check_vma on and off), pmap, vmap, a scan inside, one axis of workers or nodes; specs
that say the same placement in other words, and axes along which nothing is split.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import helpers, shards
from tests.optax_ext.helpers import NODES, bits, flat, mapped, mesh, normal, over_nodes, run, same
from tests.reference import hierarchical as of_nodes
from tests.reference import ok_topk as oracle

WORKERS, DENSITY, STEPS = 4, 0.05, 6
PARAMS = {"kernel": jnp.zeros((12, 20)), "bias": jnp.zeros(31)}
SIZE = 12 * 20 + 31
TX = optax_ext.ok_topk(DENSITY, axis="data", slack=float(WORKERS), repartition_period=3)
GIVEN = {
    name: normal((STEPS, WORKERS, *leaf.shape), i) for i, (name, leaf) in enumerate(PARAMS.items())
}


def of_steps(step, state):
    """The updates of all steps, and the residuals after them."""
    made = []
    for i in range(STEPS):
        updates, state = step(jax.tree.map(lambda g, i=i: g[i], GIVEN), state)
        made.append(updates)
    return jax.tree.map(lambda *x: np.stack(x), *made), optax_ext.get_state(state).residual


def on_devices(check_vma):
    state = optax_ext.init_state(TX, PARAMS, mesh())
    return of_steps(mapped(TX, mesh(), state, check_vma=check_vma), state)


def of_one(updates):
    """The updates of the first worker, which all workers share."""
    assert all((leaf == leaf[:, :1]).all() for leaf in jax.tree.leaves(updates))
    return jax.tree.map(lambda x: x[:, 0], updates)


def in_pmap():
    each = functools.partial(jax.pmap, axis_name="data", devices=jax.devices()[:WORKERS])
    state = each(TX.init)(jax.tree.map(lambda g: g[0], GIVEN))
    updates, residual = of_steps(each(TX.update), state)
    return of_one(updates), residual[:, 0]


def in_vmap():
    found = run(TX, GIVEN, "data")
    return of_one(found.updates), found.residuals[-1]


def in_a_scan():
    """The carry of a scan has the same types before and after a step."""

    def train(given):
        given = jax.tree.map(lambda g: g[:, 0], given)
        state, updates = jax.lax.scan(lambda s, g: TX.update(g, s)[::-1], TX.init(PARAMS), given)
        return updates, state.residual

    return helpers.on_mesh(train, mesh(), P(None, "data"), (P(), P("data")))(GIVEN)


MODES = {
    "shard_map": lambda: on_devices(True),
    "shard_map, check_vma=False": lambda: on_devices(False),
    "pmap": in_pmap,
    "vmap": in_vmap,
    "a scan in shard_map": in_a_scan,
}


@functools.cache
def result_of(mode):
    return MODES[mode]()


@pytest.mark.parametrize("mode", helpers.slow_but(["vmap"], MODES))
def test_mode_matches_the_oracle_and_has_the_bits_of_the_others(mode):
    updates, residual = result_of(mode)
    kept = np.zeros((WORKERS, SIZE), np.float32)
    accumulated = flat(GIVEN, (STEPS, WORKERS)).astype(np.float32)
    for gradient, update in zip(accumulated, flat(updates, (STEPS,)), strict=True):
        total, kept = oracle.training_step(kept + gradient, round(DENSITY * SIZE))
        np.testing.assert_allclose(update, total / WORKERS, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(residual, kept)
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


@pytest.mark.parametrize("nodes", [False, True])
def test_state_of_all_workers_on_one_device_equals_that_on_a_mesh(nodes):
    tx, on = TX, mesh()
    if nodes:
        correction = optax_ext.momentum_correction(0.9)
        tx, on = over_nodes(OK_TOPK, correction=correction), mesh((3, 2), NODES)
    inside = optax_ext.init_state(tx, PARAMS, on)
    same(optax_ext.init_state(tx, PARAMS, dict(on.shape)), inside)
    expected = jax.tree.map(lambda spec: NamedSharding(on, spec), optax_ext.state_specs(inside))
    for leaf, sharding in zip(jax.tree.leaves(inside), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


OK_TOPK = sc.allreduce.ok_topk(density=DENSITY, slack=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (2, 1)])
def test_hierarchy_is_algorithm_2_of_the_paper(shape):
    given = normal((STEPS, *shape, 101))
    tx, shard = over_nodes(sc.allreduce.topk_a(), DENSITY), -(-101 // shape[1])
    found = run(tx, given, NODES)
    kept = np.zeros((*shape, shard), np.float32)
    for step, gradient in enumerate(given):
        total, kept = of_nodes.training_step(gradient, kept, round(DENSITY * shard))
        mean = total / np.prod(shape)
        np.testing.assert_allclose(found.updates[step, 0, 0], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.residuals[step], kept, rtol=1e-4, atol=1e-5)
        assert (found.state.info.delivered[step] == np.count_nonzero(total)).all()


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_hierarchy_on_a_mesh_does_what_it_does_in_simulation(check_vma):
    given, on, tx = normal((STEPS, 3, 2, 101)), mesh((3, 2), NODES), over_nodes(OK_TOPK, DENSITY)
    state, expected = optax_ext.init_state(tx, jnp.zeros(101), on), run(tx, given, NODES)
    specs = optax_ext.state_specs(state)
    assert (specs.residual, specs.allreduce.boundaries) == (P(NODES), P("device"))
    step = mapped(tx, on, state, check_vma=check_vma)
    for i, gradient in enumerate(given):
        updates, state = step(gradient.reshape(6, 101), state)
        np.testing.assert_allclose(updates, expected.updates[i, 0, 0], rtol=1e-5, atol=1e-6)
        residuals = expected.residuals[i].reshape(6, -1)
        np.testing.assert_allclose(state.residual, residuals, atol=1e-5)


SHAPES = {"up": (6, 8), "down": (8, 4), "bias": (4,)}
# Specs of "up" and "down". All specs in a list place them in the same way if "one" is one device.
SAME = {
    "whole": [
        (P(), P()),
        (P("one"), P()),
        (P(None, "one"), P("one")),
        (P(("one",)), P(None, None)),
        (P("one", None), P(None, "one")),
    ],
    "split": [
        (P(None, "two"), P("two")),
        (P(None, ("two",)), P("two", None)),
        (P("one", "two"), P("two", "one")),
        (P(None, ("one", "two")), P(("two", "one"))),
    ],
}
SIZES = {"whole": (2, 1, 1), "split": (2, 1, 4)}
BATCHES = [normal((8, 6), seed) for seed in range(3)]
# With the exchange that compiles fastest.
FAST = {"density": 0.2, "allreduce": sc.allreduce.topk_a()}
sparse_sgd = functools.partial(optax_ext.sparse_sgd, 0.1, **FAST)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"][None] - 1) ** 2)


def placed(on, up, down, params=None):
    params = params or {key: normal(shape, len(key)) for key, shape in SHAPES.items()}
    return shards.placed(params, on, {"up": up, "down": down, "bias": P()})


def trained(on, tx, begin, later=None, **options):
    """Three steps of one program; before the second the parameters are put where ``later`` says."""
    traces = []

    def counted(params, x):
        traces.append(1)
        return loss_fn(params, x)

    params = placed(on, *begin)
    places = {name: params[name].sharding for name in ("up", "down")}
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(counted, tx, on, **options)
    for i, batch in enumerate(BATCHES):
        if i == 1 and later is not None:
            params = placed(on, *later, params)
        params, state, loss = step(params, state, batch)
        for name, place in places.items():
            assert params[name].sharding.is_equivalent_to(place, 2)
    assert len(traces) == 1
    assert np.isfinite(loss)
    return jax.device_get(params)


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.one_in(2)
def test_specs_of_the_same_placement_are_the_same(kind):
    on, tx = mesh(SIZES[kind], ("data", "one", "two")), sparse_sgd(axis="data")
    ends = [trained(on, tx, begin, SAME[kind][i - 1]) for i, begin in enumerate(SAME[kind])]
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_allclose, end, ends[0])


AXES, ONES = ("site", "fsdp"), ("site", "one", "two")


@pytest.mark.parametrize(
    ("sizes", "names", "specs", "options"),
    [
        ((1, 8), AXES, (P(None, AXES), P(AXES)), {}),
        ((8, 1), AXES, (P("fsdp"), P()), {}),
        ((1, 1), AXES, (P(AXES), P("site", "fsdp")), {}),
        ((4, 1, 1), ONES, (P(), P()), {"batch_spec": P(("site", "one"))}),
    ],
)
@pytest.mark.one_in(2)
def test_axes_of_one_worker_or_of_one_device(sizes, names, specs, options):
    trained(mesh(sizes, names), sparse_sgd(axis="site"), specs, **options)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.one_in(2)
def test_mapped_function_of_ones_own_over_explicit_axes(check_vma):
    """The state is on the mesh that was given, and trains as on one with automatic axes."""
    ends, tx = [], sparse_sgd(axis="data")
    for kind in (AxisType.Auto, AxisType.Explicit):
        on = mesh(4, "data", kind)
        params = placed(on, P(), P())
        state = optax_ext.init_state(tx, params, on)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {on}
        specs = P(), optax_ext.state_specs(state)
        local = helpers.local_step(tx, loss_fn)
        step = helpers.on_mesh(local, on, (*specs, P("data")), specs, check_vma)
        for batch in BATCHES:
            params, state = step(params, state, jax.device_put(batch, NamedSharding(on, P("data"))))
        flushed, _ = optax_ext.flush(params, state)
        ends.append(jax.device_get((params, flushed, optax_ext.metrics(state))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *ends)
