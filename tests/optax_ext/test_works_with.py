"""Every row of combinations.py, in every mapped function that it names."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import combinations
from tests.optax_ext.helpers import bits, flat, local_step, mesh, slow, train
from tests.optax_ext.shards import same_on_devices

pytestmark = pytest.mark.usefixtures("default_promotion")
WORKERS, STEPS = 8, 4


def marks_of(row, quick):
    new = "optax.freeze" in row.code and not hasattr(optax, "freeze")
    marks = [pytest.mark.skipif(new, reason="this optax has no freeze yet")]
    return marks if row.name in quick else [*marks, pytest.mark.slow]


def rows(chosen, quick=()):
    values = [pytest.param(row, marks=marks_of(row, quick), id=row.name) for row in chosen]
    return pytest.mark.parametrize("row", values)


def batches():
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        yield tuple(rng.standard_normal((4 * WORKERS, m)).astype(np.float32) for m in (6, 2))


class Sum(NamedTuple):
    tree: Any


def summed(over_workers):
    """Adds up the updates over the steps; before an allreduce, also over the workers."""

    def init(params):
        return Sum(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

    def update(updates, state, params=None):
        del params
        local = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        total = lax.psum(local, "data") if over_workers else local
        return updates, Sum(jax.tree.map(jnp.add, state.tree, total))

    return optax.GradientTransformation(init, update)


def observed(row):
    """The row at a density of 0.1; its state has the sums before and after the allreduce."""
    # Ok-Topk compiles for seconds in each program, so only rows with several programs use it.
    make = optax_ext.ok_topk if row.also else optax_ext.topk_a
    reduce = make(density=0.1, axis="data")
    if "reduce" not in row.code:
        tx = combinations.transformation(row, reduce, 0.1)
        return optax.chain(summed(True), tx, summed(False))
    seen = optax.chain(summed(True), reduce, summed(False))
    return combinations.transformation(row, seen, 0.1)


def sums_and_residual(state):
    """The sums of the gradients and of the updates, and the residuals, all flat."""
    sums = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Sum))
    before, after = (node for node in sums if isinstance(node, Sum))
    return flat(before), flat(after), np.asarray(optax_ext.get_state(state).residual).sum(0)


def end_of(row, tx):
    """Parameters and state after all steps, which are one program."""
    params, loss_fn = combinations.model(row.model)
    on, has_aux, traces = mesh(WORKERS), row.model == "batch_norm", []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(counted, tx, on, has_aux=has_aux, donate=False)
    for batch in batches():
        params, state, _, *aux = step(params, state, batch)
        if has_aux:
            params = {**params, "batch_stats": aux[0]}
    assert len(traces) == 1
    return params, state


@functools.cache
def trained(row):
    return end_of(row, observed(row))


def with_all_entries(row, density):
    """The row with a selection of all entries, or with the dense mean if ``density`` is None.

    The allreduce is the one that compiles fastest.
    """
    reduce = optax_ext.dense(axis="data")
    if density is not None:
        reduce = optax_ext.topk_a(density=density, axis="data")
    return combinations.transformation(row, reduce, density)


def equal(row, ends):
    leaves = [[np.asarray(x, np.float32) for x in jax.tree.leaves(end)] for end in ends]
    for sparse, dense in zip(*leaves, strict=True):
        np.testing.assert_allclose(sparse, dense, rtol=row.rounding, atol=row.rounding)


@rows(combinations.ROWS)
def test_combination_at_density_one_is_the_dense_one(row):
    ends = [end_of(row, with_all_entries(row, density))[0] for density in (1.0, None)]
    equal(row, ends)
    # Otherwise equality would mean nothing.
    moved = np.abs(flat(ends[1]) - flat(combinations.model(row.model)[0])).max()
    assert moved > 3 * min(row.rounding, 1e-3)


@rows(combinations.ROWS, quick=["`optax_ext.delayed` around the chain"])
@pytest.mark.slow
def test_combination_at_density_a_tenth_loses_nothing_and_no_worker_drifts(row):
    params, state = trained(row)
    assert all(len(leaf.addressable_shards) == WORKERS for leaf in jax.tree.leaves(params))
    same_on_devices(params)
    before, after, residual = sums_and_residual(state)
    # A whole SGD has its learning rate in the residual, and its update is subtracted.
    if "reduce" not in row.code:
        before, after = 0.1 * before, -after
    assert np.abs(before).max() > 0
    assert np.abs(residual).max() > 0
    # bfloat16 updates are rounded when they leave the allreduce.
    rounding = 2**-7 if row.model == "bfloat16_params" else 1e-5
    np.testing.assert_allclose(
        before, WORKERS * after + residual, atol=rounding * np.abs(before).max()
    )


def own_loop(row, mode):
    tx, (params, loss_fn) = observed(row), combinations.model(row.model)
    each = {
        "pmap": functools.partial(jax.pmap, axis_name="data"),
        "simulate": functools.partial(sc.simulate, axis="data", axis_size=WORKERS),
    }[mode]
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
    state, step = each(tx.init)(params), each(local_step(tx, loss_fn, at=lambda p, _: p))
    for batch in batches():
        split = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        params, state = step(params, state, split)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("mode", combinations.ALL)
@rows([row for row in combinations.ROWS if row.also])
def test_combination_in_a_loop_of_ones_own_is_the_same(row, mode):
    expected, _ = trained(row)
    for ours, theirs in zip(*map(jax.tree.leaves, (own_loop(row, mode), expected)), strict=True):
        ours = np.asarray(ours)
        assert len({worker.tobytes() for worker in ours}) == 1
        # Other programs round the gradients of the model at other points.
        np.testing.assert_allclose(ours[0], theirs, rtol=1e-5, atol=1e-6)


def placed(params, sharded_mesh):
    """Shards matrices over two devices of each worker, along their longest even side."""

    def place(leaf):
        even = [i for i, n in enumerate(np.shape(leaf)) if n % 2 == 0]
        spec = [None] * np.ndim(leaf)
        if np.ndim(leaf) >= 2 and even:
            spec[max(even, key=lambda i: np.shape(leaf)[i])] = "model"
        return jax.device_put(leaf, NamedSharding(sharded_mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, params)


# The rows that are also tested in other loops are the most different ones.
DIFFERENT = {row.name for row in combinations.ROWS if row.also} - {"`optax_ext.contrib.lamb`"}


@rows([row for row in combinations.ROWS if row.sharded], quick=DIFFERENT)
@pytest.mark.one_in(3)
def test_combination_with_sharded_parameters_is_the_dense_one(row):
    apart, together = mesh((4, 2), ("data", "model")), mesh(4)
    ends = []
    for where, density in ((apart, 1.0), (together, None)):
        tx, (params, loss_fn) = with_all_entries(row, density), combinations.model(row.model)
        params = placed(params, apart) if where is apart else params
        begun = params
        params, _, _ = train(tx, loss_fn, params, batches(), where)[-1]
        if where is apart:
            leaves = zip(*map(jax.tree.leaves, (params, begun)), strict=True)
            assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in leaves)
        ends.append(params)
    equal(row, ends)


def trained_by(tx, hyperparams):
    """The parameters after each step, before which the injected hyperparameters are set."""
    params, loss_fn = combinations.model("mlp")
    state = optax_ext.init_state(tx, params, mesh(WORKERS))
    step, ends = optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS), donate=False), [params]
    for batch, given in zip(batches(), hyperparams, strict=True):
        if given:
            given = {name: jnp.float32(value) for name, value in given.items()}
            state = state._replace(hyperparams=state.hyperparams | given)
        params, state, _ = step(params, state, batch)
        ends.append(params)
    return ends


# With a small eps all entries of a first step are equal, and rounding chooses among them.
ADAMW = {"weight_decay": 0.1, "gain": 1.5, "limit": 3.0, "eps": 0.1}
TOPK_A = {"allreduce": sc.allreduce.topk_a()}
# Integers are static.
OK_TOPK_SGD = {
    "density": 0.1,
    "dense_steps": 0,
    "repartition_period": 64,
    "messages_in_flight": 4,
}
WHOLE = {
    "sparse_adamw": (optax_ext.sparse_adamw, ADAMW | TOPK_A),
    "sparse_sgd": (optax_ext.sparse_sgd, {"weight_decay": 0.1} | TOPK_A),
    "ok_topk_sgd": (optax_ext.ok_topk_sgd, {}),
}


@pytest.mark.parametrize(
    ("name", "given"),
    [(name, given) for name in list(WHOLE)[:2] for given in ({}, {"density": 0.2})]
    + [slow("ok_topk_sgd", OK_TOPK_SGD)],
)
@pytest.mark.one_in(8)
def test_whole_optimizers_with_injected_hyperparameters(name, given):
    make, options = WHOLE[name]
    options = options | given | {"axis": "data"}
    injected = optax.inject_hyperparams(make, static_args=tuple(given))(
        learning_rate=0.01, **options
    )
    plain, ends = trained_by(make(0.01, **options), [{}] * 4), trained_by(injected, [{}] * 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ends, plain)
    # They are read at every step.
    if name == "sparse_adamw":
        for where, change in ((1, {"learning_rate": 0.0}), (3, {"b2": 0.5, "eps": 1e-3})):
            changed = trained_by(injected, [change if step == where else {} for step in range(4)])
            differ = [bits(a) != bits(b) for a, b in zip(ends, changed, strict=True)]
            assert differ == [step > where for step in range(len(ends))]
