"""Optimizers of optax_ext called as in optax, without a mapped function around `init`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import optax_ext
import sparse_collectives as sc
from optax_ext._state import _index
from sparse_collectives import _varying
from tests.optax_ext.helpers import mesh, same, slow

WORKERS = 4
ONE_AND_FOUR = [1, slow(4)]
MAKERS = {
    "sparse_adamw": lambda **o: optax_ext.sparse_adamw(0.1, axis="data", **o),
    "sparse_sgd": lambda **o: optax_ext.sparse_sgd(0.1, axis="data", **o),
    "ok_topk_sgd": lambda **o: optax_ext.ok_topk_sgd(0.1, density=0.5, axis="data", **o),
    "chain": lambda **o: optax.chain(optax_ext.ok_topk(0.5, axis="data", **o), optax.adam(0.1)),
    "powersgd": lambda **o: optax.chain(optax_ext.powersgd(1, axis="data", **o), optax.sgd(0.1)),
    "quantized": lambda **o: optax.chain(optax_ext.quantized(axis="data", **o), optax.lion(0.1)),
    "dense": lambda: optax.chain(optax_ext.dense(axis="data"), optax.adamw(0.1)),
    "multi_steps": lambda **o: optax_ext.multi_steps(optax_ext.sparse_sgd(0.1, axis="data"), 2),
}
PARAMS = {"w": jnp.arange(24.0).reshape(4, 6), "b": jnp.ones(6)}


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.one_in(3)
def test_init_with_a_mesh_makes_the_state_of_all_workers(name, kind):
    """The mesh is set by ``jax.set_mesh`` or given once."""
    tx, on = MAKERS[name](), mesh(kind=kind)
    given = optax_ext.with_mesh(tx, on)
    expected = optax_ext.init_state(tx, PARAMS, on)
    with jax.set_mesh(on):
        same(tx.init(PARAMS), expected)
        same(jax.jit(tx.init)(PARAMS), expected)
        shapes = jax.eval_shape(tx.init, PARAMS)
    same(given.init(PARAMS), expected)
    for found in (shapes, jax.eval_shape(given.init, PARAMS)):
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    inside = [
        sc.simulate(each.init, axis="data", axis_size=WORKERS, in_axes=None)(PARAMS)
        for each in (given, tx)
    ]
    same(*inside)


def test_sharded_parameters_are_found_where_they_are():
    on = mesh((2, 2), ("data", "model"))
    split = jax.sharding.NamedSharding(on, PartitionSpec(None, "model"))
    params = {"w": jax.device_put(PARAMS["w"], split)}
    tx = MAKERS["sparse_adamw"]()
    expected = optax_ext.init_state(tx, params, on)
    assert expected.devices == 2
    with jax.set_mesh(on):
        same(tx.init(params), expected)


def test_init_with_an_abstract_mesh_gives_shapes():
    with jax.sharding.use_abstract_mesh(AbstractMesh((WORKERS,), ("data",))):
        shapes = jax.eval_shape(MAKERS["sparse_adamw"]().init, PARAMS)
    assert shapes.residual.shape == (WORKERS, 30)


@pytest.mark.parametrize("name", ["sparse_adamw", "sparse_sgd", "ok_topk_sgd", "chain"])
def test_optax_reads_the_state_and_finds_what_is_like_the_parameters(name):
    tx = MAKERS[name]()
    state = optax_ext.init_state(tx, PARAMS, mesh())
    assert optax.tree.get(state, "info") is optax_ext.get_state(state).info
    assert optax.tree.get(state, "residual").shape == (WORKERS, 30)
    marks, other = {"w": "w", "b": "b"}, {"transform_non_params": lambda _: "other"}
    found = jax.tree.leaves(optax.tree.map_params(tx, lambda _, m: m, state, marks, **other))
    behind = 2 if name == "chain" else 0  # The moments of Adam.
    assert found.count("w") == found.count("b") == behind
    assert found.count("other") == len(found) - 2 * behind
    assert len(found) == len(jax.tree.leaves(state))


# Optax's requirements for its optimizers, with one worker and with four: they reach the minimum of
# its two test functions, keep dtypes and the types of their states, and work under `lax.cond`.
WHOLE = {
    "sparse_adamw": optax_ext.sparse_adamw(3e-3, axis="data", weight_decay=0.0),
    "sparse_sgd": optax_ext.sparse_sgd(1e-3, axis="data"),
    "ok_topk_sgd": optax_ext.ok_topk_sgd(1e-3, density=0.5, axis="data"),
}


def parabola(x):
    return jnp.sum((x - jnp.asarray([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(x):
    return (1.0 - x[0]) ** 2 + 100.0 * (x[1] - x[0] ** 2) ** 2


@pytest.mark.parametrize("workers", ONE_AND_FOUR)
@pytest.mark.parametrize(
    ("function", "start", "end"),
    [
        (parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
        slow(rosenbrock, [0.0, 0.0], [1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("tx", WHOLE.values(), ids=WHOLE)
@pytest.mark.one_in(3)
def test_optimizers_converge_on_the_test_functions_of_optax(tx, function, start, end, workers):
    def train(index):
        # Over the workers it adds up to 0.
        aside = (0.1 * (index - (workers - 1) / 2)).astype(jnp.float32)

        def step(_, carry):
            x, state = carry
            gradient = jax.grad(function)(optax_ext.ahead(x, state)) + aside
            updates, state = tx.update(gradient, state, x)
            return optax.apply_updates(x, updates), state

        x = jnp.asarray(start)
        return jax.lax.fori_loop(0, 30_000, step, (x, tx.init(x)))

    run = sc.simulate(train, axis="data", axis_size=workers)
    x, _ = run(jnp.arange(workers, dtype=jnp.float32))
    np.testing.assert_allclose(x[0], end, atol=3e-2)


@pytest.mark.parametrize("workers", ONE_AND_FOUR)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32), slow(jnp.float16)])
@pytest.mark.parametrize("tx", WHOLE.values(), ids=WHOLE)
@pytest.mark.one_in(2)
def test_dtypes_stay_and_a_step_may_be_one_of_two_branches(tx, dtype, workers):
    def train(_):
        x = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones((2,), dtype)}
        state = tx.init(x)

        def step():
            gradient = jax.tree.map(lambda x: jnp.full(x.shape, 2.0, dtype), x)
            updates, new = tx.update(gradient, state, x, value=jnp.float32(1), loss_fn=None)
            return updates, _varying.to_varying(new, "data")

        def wait():
            return jax.tree.map(jnp.zeros_like, x), _varying.to_varying(state, "data")

        updates, new = jax.lax.cond(True, step, wait)
        return updates, new, state

    updates, new, state = sc.simulate(train, axis="data", axis_size=workers)(jnp.zeros(workers))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    types = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(t)] for t in (new, state)]
    assert types[0] == types[1]


@pytest.mark.parametrize("workers", ONE_AND_FOUR)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.one_in(3)
def test_extra_arguments_reach_what_is_local_and_what_is_behind(name, workers):
    found = []

    def spy(where):
        def update(updates, state, params=None, **extra):
            found.append((where, sorted(extra)))
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)

    takes_local = name in ("chain", "powersgd", "quantized")
    options = {"local": spy("local")} if takes_local else {}
    tx = optax.chain(MAKERS[name](**options), spy("behind"))

    def train(_):
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)[0]

    sc.simulate(train, axis="data", axis_size=workers)(jnp.zeros(workers))
    expected = {("behind", "value")} | ({("local", "value")} if takes_local else set())
    assert {(where, *names) for where, names in found} == expected


def test_the_layout_of_a_placeholder_is_in_no_cache():
    """It compares equal to any, as ``optax.tree.map_params`` needs, so it has no hash."""
    tx = optax_ext.sparse_adamw(0.1, axis="data")
    state = optax_ext.init_state(tx, jnp.zeros(6), {"data": 2})
    found = []

    def placed(params):
        found.append(tx.init(params))
        return found[-1]

    optax.tree.map_params(placed, lambda x: x, state)
    (placeholder,) = found
    assert placeholder.layout == state.layout == placeholder.layout
    _index._cached.cache_clear()
    assert _index.of(placeholder).sparse[0][1].of_placeholder
    assert not _index.of(state).sparse[0][1].of_placeholder
    with pytest.raises(TypeError, match="no hash"):
        hash(placeholder.layout)
