"""A residual counts for the worker that made it: copies are left out, and reported if possible.

``flax.jax_utils.unreplicate`` and ``replicate`` around a checkpoint, as pmap trainers write them,
and a spec without the axis, give all workers what one of them had.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._state._find import get_states, is_state
from tests.optax_ext import helpers, shards
from tests.optax_ext.helpers import NODES, mapped, mesh, normal, on_mesh, over_nodes, refused, same

WORKERS, SIZE, STEPS = 4, 60, 3
topk_a = functools.partial(optax_ext.topk_a, 0.1, axis="w")
CORRECTION = optax_ext.momentum_correction(0.9)
BF16 = optax_ext.residual(jnp.bfloat16, decay=0.9)
TRANSFORMATIONS = {
    "ok_topk": optax_ext.ok_topk(0.1, axis="w"),
    "sparse_adamw": optax_ext.sparse_adamw(0.1, density=0.1, axis="w", weight_decay=0.0),
    "dense leaves": topk_a(correction=CORRECTION, dense_leaves={"a": "sparse", "b": "dense"}),
    "bfloat16, drop": topk_a(residual=BF16, nonfinite="drop"),
    "a dense step": topk_a(dense_steps=lambda step: step >= STEPS),
    "powersgd": optax_ext.powersgd(1, axis="w"),
    "quantized": optax_ext.quantized(axis="w"),
    "bucketed": optax_ext.bucketed(topk_a(), 2),
    "multi_steps": optax_ext.multi_steps(topk_a(), 1),
    "delayed": optax_ext.delayed(optax.chain(topk_a(), optax.adam(0.1))),
    "hierarchical": over_nodes(sc.allreduce.topk_a()),
}
PARAMS = {"a": jnp.ones((6, 6)), "b": jnp.ones((SIZE - 36,))}


def gradients(seed, shape=(WORKERS,)):
    return {key: normal((*shape, *x.shape), seed) for key, x in PARAMS.items()}


OF_ONE = ("residual", "velocity", "dense_velocity")


@pytest.mark.parametrize(
    "name", [helpers.slow(n) if n in ("ok_topk", "bucketed") else n for n in TRANSFORMATIONS]
)
@pytest.mark.one_in(3)
def test_a_copy_is_left_out(name):
    """A step from copies of worker 0's residual equals a step from worker 0's residual alone."""
    tx, nested = TRANSFORMATIONS[name], name == "hierarchical"
    shape, axis = ((2, 2), NODES) if nested else ((WORKERS,), "w")
    lanes = {"axis": axis, "axis_size": shape if nested else WORKERS}
    first, index = (0,) * len(shape), jnp.arange(WORKERS, dtype=jnp.int32)
    update = sc.simulate(lambda g, s: tx.update(g, s, PARAMS), **lanes)
    state = sc.simulate(lambda g: tx.init(PARAMS), **lanes)(gradients(0, shape))
    for seed in range(STEPS):
        _, state = update(gradients(seed, shape), state)
    assert any(np.any(node.residual[first]) for node in get_states(state))

    def zeroed(x):
        return jnp.zeros_like(x).at[first].set(x[first])

    def alone(node):
        kept = {n: jax.tree.map(zeroed, getattr(node, n)) for n in OF_ONE}
        return node._replace(**kept, owner=index.reshape(*shape, 1))

    copied = jax.tree.map(lambda x: jnp.broadcast_to(x[first], x.shape), state)
    own = jax.tree.map(lambda n: alone(n) if is_state(n) else n, copied, is_leaf=is_state)
    given = gradients(STEPS, shape)
    updates, after = update(given, copied)
    expected, wanted = update(given, own)
    same(updates, expected)
    _, later = update(given, after)
    for got, want, next_one in zip(*map(get_states, (after, wanted, later)), strict=True):
        for field in OF_ONE:
            same(getattr(got, field), getattr(want, field))
        # It is this worker's from now on.
        for node in (got, next_one):
            np.testing.assert_array_equal(np.ravel(node.owner), np.where(index == 0, 0, -1 - index))


def loss_fn(params, batch):
    where = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)])
    return jnp.mean((where[None] - batch) ** 2)


batch = functools.partial(normal, (2 * WORKERS, SIZE))


def replicate(tree):
    return jax.tree.map(lambda x: np.stack([x] * WORKERS), tree)


@pytest.mark.slow
def test_a_pmap_trainer_that_unreplicates_its_checkpoint():
    tx = optax_ext.sparse_adamw(0.01, density=0.1, axis="w", weight_decay=0.0)
    options = {"axis_name": "w", "devices": jax.devices()[:WORKERS]}
    state = jax.pmap(lambda _: tx.init(PARAMS), **options)(np.arange(WORKERS))
    step, params = jax.pmap(helpers.local_step(tx, loss_fn), **options), replicate(PARAMS)
    for seed in range(STEPS):
        params, state = step(params, state, batch(seed).reshape(WORKERS, 2, SIZE))
    assert optax_ext.checkpoint_metadata(state)["workers"] == WORKERS
    saved = jax.tree.map(lambda x: np.asarray(x)[0], state)
    one, other = "residual of 1 of 4 workers", r"another worker on 3 of 4 workers \(1, 2, 3\)"
    refused(one + ", as .*unreplicate", optax_ext.checkpoint_metadata, saved)
    refused(one, optax_ext.flush, PARAMS, saved)
    refused("is a state of jax.pmap", optax_ext.flush, PARAMS, replicate(saved))
    refused(other, optax_ext.checkpoint_metadata, replicate(saved))
    # The whole state stays valid on the host; copies are marked.
    whole = jax.tree.map(np.asarray, state), np.arange(WORKERS)
    for given, owner in (whole, (replicate(saved), [0, -2, -3, -4])):
        _, after = step(params, given, batch().reshape(WORKERS, 2, SIZE))
        np.testing.assert_array_equal(np.ravel(after.owner), owner)


def test_what_has_somebody_to_tell_refuses_copies():
    tx = topk_a(local=optax.scale(-1.0), residual=optax_ext.residual(step_ahead=0.25))
    on = mesh(WORKERS, "w")
    state = optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)
    _, state, _ = step(PARAMS, state, batch())
    rows = [jnp.stack([x[0]] * WORKERS) for x in (state.residual, state.owner)]
    copied = state._replace(residual=rows[0], owner=rows[1])
    message = r"opt_state has the residual of another worker on 3 of 4 .*reshard\(opt_state"
    for refuses, *given in (
        (optax_ext.make_train_step(loss_fn, tx, on), PARAMS, copied, batch()),
        (optax_ext.flush, PARAMS, copied),
        (optax_ext.consolidate, PARAMS, copied),
        (optax_ext.checkpoint_metadata, copied),
    ):
        refused(message, refuses, *given)
    # The way out that the message names.
    for workers in (WORKERS, 2):
        again = optax_ext.reshard(copied, optax_ext.init_state(tx, PARAMS, mesh(workers, "w")))
        np.testing.assert_array_equal(again.residual.sum(0), state.residual[0])
        optax_ext.checkpoint_metadata(again)


def test_monitoring_says_it_once():
    tx = optax_ext.topk_a(0.1, axis="w")
    state = optax_ext.init_state(tx, PARAMS, {"w": WORKERS})
    written = []
    monitor = optax_ext.Monitor(lambda step, values: written.append(values["sparse/copied"]))
    monitor(state)
    damaged = state._replace(owner=jnp.asarray([0, 1, -3, -4], jnp.int32))
    with pytest.warns(UserWarning, match="2 workers were given the residual of another"):
        monitor(damaged)
    monitor(damaged)
    assert written == [0.0, 2.0, 2.0]


def test_of_sharded_parameters_each_worker_has_one_mark():
    tx = optax_ext.sparse_adamw(0.1, density=0.1, axis="data")
    on = shards.mesh_of((2, 4))
    params = shards.placed(shards.params_of(), on)
    state = optax_ext.init_state(tx, params, on)
    np.testing.assert_array_equal(state.owner, [0, 1])
    full = jnp.ones_like(state.residual)
    copied = state._replace(residual=full, owner=jnp.zeros_like(state.owner))
    total, _ = optax_ext.consolidate(params, optax_ext.reshard(copied, state))
    assert all((leaf == 0.5).all() for leaf in jax.tree.leaves(total))


def test_a_spec_without_the_axis_loses_others_but_copies_nothing():
    """``out_specs=P()`` under ``check_vma=False`` makes worker 0's state the state of all."""
    tx = optax_ext.topk_a(0.1, axis="w")
    state = optax_ext.init_state(tx, PARAMS, mesh(WORKERS, "w"))

    def step(specs, out_specs):
        given, local = (P(), specs, P("w")), helpers.local_step(tx, loss_fn)
        return on_mesh(local, mesh(WORKERS, "w"), given, (P(), out_specs), check_vma=False)

    specs, message = optax_ext.state_specs(state), "residual of 1 of 4 workers"
    _, lost = step(specs, P())(PARAMS, state, batch())
    refused(message, optax_ext.checkpoint_metadata, lost)
    refused(message, optax_ext.check_metadata, optax_ext.checkpoint_metadata(state), lost)
    # As in a checkpoint, which holds one device's copy of a state that is typed as replicated.
    on_host = jax.tree.map(np.asarray, lost)
    _, marked = step(P(), specs)(PARAMS, on_host, batch())
    np.testing.assert_array_equal(np.ravel(marked.owner), [0, -2, -3, -4])


def test_specs_without_the_axis_are_named_where_they_can_be():
    """Types find them; without types one residual of four is left, and the next step fails."""
    tx, on, params = topk_a(), mesh(WORKERS, "w"), jnp.zeros(20)
    state, gradient = optax_ext.init_state(tx, params, on), normal((WORKERS, 20))
    wrong = optax_ext.state_specs(state)._replace(residual=P())
    lower = mapped(tx, on, state, out_specs=wrong).lower
    refused(r"residual is P\(\) which implies.*replicated", lower, gradient, state)
    _, lost = mapped(tx, on, state, out_specs=wrong, check_vma=False)(gradient, state)
    lower = mapped(tx, on, state, check_vma=False).lower
    refused(r"(?s)not evenly divisible.*residual", lower, gradient, lost)
    shared = optax_ext.init_state(tx, params, {"w": 1})
    shared = shared._replace(settings=dataclasses.replace(shared.settings, workers=WORKERS))
    step = mapped(tx, on, shared, specs=jax.tree.map(lambda _: P(), shared))
    message = r"one row that all 4 workers of axis 'w' share.*specs"
    refused(message, step.lower, gradient, shared)
