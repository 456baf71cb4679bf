"""The end of a training: the residual is applied or inspected, with the state of all workers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import helpers
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    bits,
    flat,
    loss_fn,
    mesh,
    refused,
    same,
    train,
)

TX = optax_ext.sparse_sgd(0.1, axis="data", density=0.25, allreduce=sc.allreduce.topk_a())
STEPS = 8


def trained(tx=TX, on=None):
    """Parameters and state with something in the residuals."""
    batches = [batch_of(seed=seed) for seed in range(STEPS)]
    params, state, _ = train(tx, loss_fn, PARAMS, batches, on or mesh())[-1]
    assert np.abs(optax_ext.get_state(state).residual).max() > 0
    return params, state


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a chain"])
def test_consolidate_returns_all_of_the_residuals(wrapped):
    params, state = trained(optax.chain(optax.identity(), TX) if wrapped else TX)
    found, empty = optax_ext.consolidate(params, state)
    assert not np.asarray(optax_ext.get_state(empty).residual).any()
    waits = np.asarray(optax_ext.get_state(state).residual, np.float64).mean(0)
    np.testing.assert_allclose(flat(found), waits, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", [optax_ext.flush, optax_ext.consolidate])
def test_a_state_without_residuals_and_arguments_that_have_changed_places(function):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, name = optax_ext.init_state(TX, params, mesh()), function.__name__
    message = rf"changed places. Write optax_ext\.{name}\(params, opt"
    refused(message, function, state, params)
    for state in (optax.adamw(0.1).init(params), (), {"w": jnp.zeros(3)}):
        refused("opt_state has no residuals", function, params, state)
    # A dense mean has no residual; flush accepts it, so a loop can always call it.
    tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))
    same(optax_ext.flush(params, optax_ext.init_state(tx, params, mesh()))[0], params)


NODES = {
    "axis": ("node", "data"),
    "allreduce": sc.allreduce.hierarchical(inner_axis="data", outer=sc.allreduce.topk_a()),
}
# The options, the mesh, and the share of its residual that a worker looks ahead by.
WAYS = {
    "each step": ({}, mesh(), 1 / 4),
    "no limit": ({"limit": None}, mesh(), 1 / 4),
    "a number": ({"residual": optax_ext.residual(step_ahead=2.0)}, mesh(), 1 / 2),
    "bfloat16": ({"residual": optax_ext.residual(jnp.bfloat16, step_ahead=1.0)}, mesh(), 1 / 4),
    "one worker": ({}, mesh(1), 1.0),
    "rounds": ({"every": 3}, mesh(), 1.0),
    "nodes": (NODES, mesh((2, 2), ("node", "data")), 1 / 2),
    "rounds of nodes": ({**NODES, "every": 3}, mesh((2, 2), ("node", "data")), 1.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(3)
def test_flush_moves_to_the_mean_of_the_look_ahead_parameters(way):
    options, on, share = WAYS[way]
    given = {"axis": "data", "density": 0.05, "weight_decay": 0.0, **options}
    tx = optax_ext.sparse_adamw(optax.linear_schedule(0.1, 0.0, STEPS), **given)
    params, state = trained(tx, on)
    look = helpers.on_mesh(
        lambda p, s: jax.tree.map(lambda x: x[None], optax_ext.ahead(p, s)),
        on,
        (P(), optax_ext.state_specs(state)),
        P(on.axis_names),
    )
    points = flat(look(params, state), (on.size,))
    assert way == "one worker" or np.abs(points - points[0]).max() > 1e-3
    flushed, rest = optax_ext.flush(params, state)
    near = {"rtol": 1e-5, "atol": 2e-3 if way == "bfloat16" else 1e-6}  # It is rounded.
    np.testing.assert_allclose(flat(flushed), points.mean(axis=0), **near)
    # The rest stays with its worker.
    before, after = (np.asarray(x.residual, np.float64) for x in (state, rest))
    tolerance = 2**-8 if way == "bfloat16" else 1e-6
    np.testing.assert_allclose(after, (1 - share) * before, rtol=tolerance)
    waits, left = (flat(optax_ext.consolidate(params, x)[0]) for x in (state, rest))
    np.testing.assert_allclose(flat(flushed) - flat(params) + left, waits, rtol=1e-5, atol=1e-6)
    assert rest.residual.sharding == state.residual.sharding
    assert rest.residual.dtype == state.residual.dtype


def test_of_many_workers_at_least_a_tenth_is_applied():
    tx, params = optax_ext.sparse_sgd(1.0, axis="w"), jnp.zeros(2)
    for workers, share in ((10, 0.1), (16, 0.1), (100, 0.1)):
        state = optax_ext.init_state(tx, params, {"w": workers})
        state = state._replace(residual=jnp.ones_like(state.residual))
        np.testing.assert_allclose(optax_ext.flush(params, state)[0], share, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("falls", [False, True], ids=["constant rate", "falling rate"])
@pytest.mark.parametrize("density", [0.05, 0.01, 0.001])
def test_flush_hurts_no_loss(density, falls):
    """Applying the whole residual at once would at a constant rate: this can show a difference."""
    from flax import nnx

    from benchmarks.training import _data

    data = _data.read_images(None)
    images, labels = data.train_images.reshape(len(data.train_images), -1), data.train_labels
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(images.shape[1], 128, rngs=rngs), nnx.relu, nnx.Linear(128, 128, rngs=rngs)
    model = nnx.Sequential(*layers, nnx.relu, nnx.Linear(128, data.classes, rngs=rngs))
    graph, params = nnx.split(model)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    rate, rng = optax.linear_schedule(1e-3, 0.0 if falls else 1e-3, 100), np.random.default_rng(0)
    tx = optax_ext.sparse_adamw(rate, density=density, axis="data")
    chosen = [rng.integers(0, len(images), 128) for _ in range(100)]
    batches = [(images[rows], labels[rows]) for rows in chosen]
    params, state, _ = train(tx, loss, params, batches, mesh(8))[-1]
    of_all, _ = optax_ext.consolidate(params, state)
    at_once = optax.apply_updates(params, of_all)
    flushed, _ = optax_ext.flush(params, state)
    before, after, whole = (float(loss(p, (images, labels))) for p in (params, flushed, at_once))
    assert after < before
    assert falls or whole > 1.2 * before


def test_a_state_of_pmap_outside_of_it():
    fresh = optax_ext.init_state(TX, PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, TX, mesh(), donate=False)
    params = jax.tree.map(lambda x: np.stack([x] * 4), PARAMS)
    state = jax.pmap(TX.init, axis_name="data", devices=jax.devices()[:4])(params)
    state = jax.device_get(state)._replace(residual=helpers.normal((4, 1, 28)))
    message = r"opt_state is a state of jax\.pmap: its residual has shape \(4, 1, 28\)"
    refused(message, optax_ext.flush, PARAMS, state)
    refused(message, optax_ext.consolidate, PARAMS, state)
    refused(r"a state of jax\.pmap", optax_ext.reshard, state, fresh)
    text = refused(message, step, PARAMS, state, batch_of())
    # The code in the message makes the state of all workers.
    names = {"jax": jax, "optax_ext": optax_ext, "opt_state": state}
    exec("\n".join(line.strip() for line in text.splitlines()[1:]), names)
    joined = names["opt_state"]
    np.testing.assert_array_equal(joined.residual, state.residual[:, 0])
    assert jax.tree.map(jnp.shape, joined) == jax.tree.map(jnp.shape, fresh)
    step(PARAMS, joined, batch_of())


def test_consolidate_with_parts_and_with_a_mapped_axis():
    other = optax_ext.bucketed(optax_ext.topk_a(0.5, axis="data"), 2)
    parts = {"sparse": optax_ext.ok_topk(0.1, axis="data"), "other": other}
    labels = {"w": "sparse", "b": "other", "c": "none", "d": "other"}
    tx = optax.multi_transform(parts | {"none": optax.identity()}, labels)
    params = {**PARAMS, "c": jnp.ones(3), "d": jnp.ones(3)}
    state = jax.tree.map(
        lambda node: node._replace(residual=jnp.ones_like(node.residual)),
        optax_ext.init_state(tx, params, {"data": 2}),
        is_leaf=lambda node: isinstance(node, optax_ext.SparseAllreduceState),
    )
    gradient, state = optax_ext.consolidate(params, state)
    for name, value in (("w", 1), ("b", 1), ("c", 0), ("d", 1)):
        np.testing.assert_array_equal(gradient[name], np.full(params[name].shape, value))
    again, _ = optax_ext.consolidate(params, state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(again))
    one = optax_ext.ok_topk(0.1, axis="w")
    inside = sc.simulate(lambda g: optax_ext.consolidate(g, one.init(g))[0], axis="w", axis_size=2)
    refused("Call it outside", inside, jnp.ones((2, 4)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_consolidate_where_the_sum_is_too_large_and_the_mean_is_not(dtype):
    params = jnp.zeros(3, dtype)
    state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), params, {"w": 4})
    rows = np.zeros((4, 3), np.float32)
    rows[:, 0], rows[:2, 1], rows[0, 2] = 2e38, 3e38, -1.0
    gradient, left = optax_ext.consolidate(params, state._replace(residual=rows))
    assert gradient.dtype == dtype
    mean, eps = rows.astype(np.float64).mean(0), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), mean, rtol=eps)
    assert not np.asarray(left.residual).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("on", [mesh(), mesh((2, 2), ("node", "data"))], ids=["workers", "nodes"])
def test_nothing_of_a_flush_is_lost_by_parameters_of_16_bits(dtype, on):
    options = {"axis": "data"} if on.axis_names == ("data",) else NODES
    tx = optax_ext.sparse_sgd(0.1, density=0.25, **options)
    # One leaf of each kind, and steps from far below a unit in the last place to many.
    params = {"w": jnp.ones((6, 4), dtype), "b": jnp.ones(4), "dense": jnp.ones((), dtype)}
    state = optax_ext.init_state(tx, params, on)
    size = np.logspace(-6, 0, state.residual.size, dtype=np.float32).reshape(state.residual.shape)
    held = size * np.random.default_rng(0).standard_normal(size.shape, np.float32)
    state = state._replace(residual=jax.device_put(held, state.residual.sharding))
    moved, left = optax_ext.flush(params, state)
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (moved, params)]
    before, after = (
        optax_ext.consolidate(wide[1], x._replace(layout=widened(x.layout)))[0]
        for x in (state, left)
    )
    taken = jax.tree.map(np.subtract, *wide)
    # Half a unit in the last place of a parameter of float32.
    np.testing.assert_allclose(flat(taken) + flat(after), flat(before), rtol=1e-6, atol=2.0**-23)
    assert np.abs(flat(taken)).max() > 0.01


def widened(layout):
    """The layout with all leaves in float32."""
    return dataclasses.replace(layout, dtypes=(np.dtype(np.float32),) * len(layout.dtypes))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_flush_takes_arrays_from_anywhere(kind):
    params, state = trained()
    on = mesh(kind=kind)
    moved = optax_ext.reshard(state, optax_ext.init_state(TX, params, on))
    expected, _ = optax_ext.flush(jax.device_get(params), jax.device_get(state))
    elsewhere = mesh(2, kind=kind)
    for place in (SingleDeviceSharding(jax.devices()[1]), NamedSharding(elsewhere, P())):
        for of in (state, moved):
            found, _ = optax_ext.flush(jax.device_put(params, place), of)
            same(found, expected)
    refused(r"params\['b'\] has shape \(5,\)", optax_ext.flush, {**params, "b": jnp.ones(5)}, state)


BUCKETS = optax_ext.bucketed(optax_ext.topk_a(0.25, axis="data"), 2)
UNUSED = {
    "sparse": optax_ext.sparse_sgd(0.2, axis="data", density=0.25),
    "buckets": optax.chain(BUCKETS, optax.sgd(0.1)),
    "dense buckets": optax.chain(optax_ext.dense(axis="data", buckets=2), optax.sgd(0.1)),
}
WRAPPED = {
    "alone": lambda tx: tx,
    "multi_steps": lambda tx: optax_ext.multi_steps(tx, 2),
    "delayed": optax_ext.delayed,
    "local_steps": lambda tx: optax_ext.local_steps(optax.sgd(0.1), tx, every=2),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("name", UNUSED)
def test_a_group_without_leaves_may_have_any_exchange(name, wrapper):
    groups = {"t": TX, "unused": WRAPPED[wrapper](UNUSED[name])}
    tx = optax.partition(groups, {"w": "t", "b": "t"})
    state = optax_ext.init_state(tx, PARAMS, mesh())
    optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(2)))
    same(optax_ext.flush(PARAMS, state)[0], PARAMS)


@pytest.mark.parametrize("where", ["a group", "dense leaves"])
def test_an_exchange_without_leaves_is_flushed_and_resharded(where):
    if where == "a group":
        groups = {"t": TX, "unused": optax_ext.multi_steps(UNUSED["buckets"], 2)}
        tx = optax.partition(groups, {"w": "t", "b": "t"})
    else:
        tx = optax_ext.sparse_sgd(
            0.1, axis="data", density=0.25, dense_leaves=optax_ext.small_leaves(min_size=10**6)
        )
    params, state, _ = train(tx, loss_fn, PARAMS, [batch_of()], mesh())[-1]
    flushed, left = optax_ext.flush(params, state)
    assert where == "a group" or bits(flushed) == bits(params)
    for workers in (2, 3, 4):
        new = optax_ext.reshard(left, optax_ext.init_state(tx, params, mesh(workers)))
        train(tx, loss_fn, flushed, [batch_of(12)], mesh(workers), state=new)


FOLLOWING = {
    "freeze": optax.masked(optax.set_to_zero(), {"w": True, "b": False}),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
    "clip": optax.clip(1.0),
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("inside", [False, True])
def test_a_transformation_that_follows_the_optimizer_is_named(name, inside):
    tx = optax.chain(TX, FOLLOWING[name])
    if inside:
        tx = optax.chain(optax.clip(1.0), optax.chain(tx))
    state = optax_ext.init_state(tx, PARAMS, {"data": 2})
    message = r"transformation after the optimizer.*set_to_zero.*optax_ext\.consolidate"
    refused(message, optax_ext.flush, PARAMS, state)
    named = optax.named_chain(("b", TX), ("a", FOLLOWING[name]))
    state = optax_ext.init_state(named, PARAMS, {"data": 2})
    refused("transformation next to the optimizer in a named", optax_ext.flush, PARAMS, state)


@pytest.mark.parametrize(
    ("around", "name"),
    [
        (lambda tx: optax.contrib.schedule_free(tx, 0.1), "ScheduleFreeState"),
        (optax.contrib.mechanize, "MechanicState"),
    ],
)
def test_what_makes_updates_of_its_own_around_the_optimizer_is_named(around, name):
    for tx in (around(TX), optax.chain(optax.clip(1.0), around(optax.chain(TX)))):
        state = optax_ext.init_state(tx, PARAMS, {"data": 2})
        refused(f"{name} around the optimizer.*consolidate", optax_ext.flush, PARAMS, state)
        optax_ext.consolidate(PARAMS, state)


def test_a_named_chain_of_masks_is_no_partition():
    yes, no = {"w": True, "b": True}, {"w": False, "b": True}
    tx = optax.named_chain(
        ("opt", optax.masked(TX, yes)), ("freeze", optax.masked(optax.set_to_zero(), no))
    )
    state = optax_ext.init_state(tx, PARAMS, {"data": 2})
    refused("transformation next to the optimizer in a named", optax_ext.flush, PARAMS, state)
    twice = optax.named_chain(
        ("z", optax.masked(TX, yes)), ("a", optax.masked(optax.adam(0.1), yes))
    )
    refused("ScaleByAdam next to", optax_ext.init_state, twice, PARAMS, {"data": 2})


def test_an_exchange_without_entries_has_nothing_to_refuse():
    gradients = optax.chain(optax_ext.ok_topk(0.5, axis="data"), optax.adam(0.1))
    none = {"w": False, "b": False}
    for tx in (
        optax.partition({"t": TX, "unused": gradients}, {"w": "t", "b": "t"}),
        optax.chain(optax.masked(optax_ext.sparse_sgd(0.1, axis="data"), none), optax.identity()),
    ):
        state = optax_ext.init_state(tx, PARAMS, {"data": 2})
        same(optax_ext.flush(PARAMS, state)[0], PARAMS)


def test_parts_for_other_leaves_may_stand_around_the_optimizer():
    yes, no = {"w": True, "b": False}, {"w": False, "b": True}
    dense = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))
    for tx in (
        optax.chain(optax.masked(optax.set_to_zero(), no), optax.masked(TX, yes)),
        optax.chain(optax.masked(TX, yes), optax.masked(dense, no)),
        optax.partition({"t": TX, "f": optax.set_to_zero()}, {"w": "t", "b": "f"}),
    ):
        params, state = trained(tx)
        flushed, _ = optax_ext.flush(params, state)
        same(flushed["b"], params["b"])
        assert (np.asarray(flushed["w"]) != np.asarray(params["w"])).any()
