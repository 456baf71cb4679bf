"""LARS and LAMB with partitioned norms: optax's results, the same bits on every worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext.contrib import _partitioned_norms
from tests.optax_ext.helpers import mesh, slow

STEPS, WHOLE = 3, P()
# Sizes above and below the bound for slices; 8, 3 and 2 workers divide some and not others.
SHAPES = {"even": (24, 16), "odd": (13, 11), "bias": (7,), "scalar": (), "zero": (9, 9)}
MASK = {"even": True, "odd": True, "bias": False, "scalar": False, "zero": True}


@pytest.fixture(autouse=True)
def _small_leaves_are_sliced(monkeypatch):
    monkeypatch.setattr(_partitioned_norms, "SMALL", 64)


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    leaves = {name: jnp.asarray(rng.standard_normal(s), dtype) for name, s in SHAPES.items()}
    return leaves | {"zero": jnp.zeros_like(leaves["zero"])}


OPTIMIZERS = {
    "lamb": ("lamb", {"learning_rate": 0.01}),
    "lamb, all options": (
        "lamb",
        {
            "learning_rate": optax.linear_schedule(0.1, 0.01, 3),
            "b1": 0.8,
            "b2": 0.9,
            "eps": 1e-3,
            "eps_root": 1e-4,
            "weight_decay": 0.1,
            "mask": MASK,
        },
    ),
    "lars": ("lars", {"learning_rate": 0.1}),
    "lars, all options": (
        "lars",
        {
            "learning_rate": optax.linear_schedule(0.1, 0.01, 3),
            "weight_decay": 0.1,
            "weight_decay_mask": MASK,
            "trust_coefficient": 0.1,
            "eps": 1e-2,
            "trust_ratio_mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
            "momentum": 0.8,
            "nesterov": True,
        },
    ),
    "ratio": ("scale_by_trust_ratio", {}),
    "ratio, all options": (
        "scale_by_trust_ratio",
        {"min_norm": 5.0, "trust_coefficient": 0.3, "eps": 0.1},
    ),
}


def train(tx, params):
    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    gradients = jax.tree.map(lambda *x: jnp.stack(x), *(tree(i + 1) for i in range(STEPS)))
    return jax.lax.scan(step, (params, tx.init(params)), gradients)[0]


@functools.cache
def expected(name):
    kind, options = OPTIMIZERS[name]
    return jax.jit(lambda p: train(getattr(optax, kind)(**options), p))(tree(0))


def ours(name):
    kind, options = OPTIMIZERS[name]
    return getattr(optax_ext.contrib, kind)(**options, axis="w")


def assert_equal_to_optax(result, name):
    assert jax.tree.structure(result) == jax.tree.structure(expected(name))
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected(name)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def worker_zero_of_equals(result):
    for leaf in jax.tree.leaves(result):
        assert (np.asarray(leaf) == np.asarray(leaf)[:1]).all()
    return jax.tree.map(lambda x: x[0], result)


def on_mesh(fn, check_vma=True, out_specs=WHOLE):
    on = mesh(8, "w")
    return jax.jit(
        jax.shard_map(fn, mesh=on, in_specs=WHOLE, out_specs=out_specs, check_vma=check_vma)
    )


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        slow(name, p) if "lamb" in name else (name, p)
        for name in OPTIMIZERS
        for p in ((1, 2, 3, 8) if "all" in name else (3,))
    ],
)
def test_equal_to_optax_for_any_number_of_workers(name, workers):
    run = sc.simulate(lambda p: train(ours(name), p), axis="w", axis_size=workers, in_axes=None)
    assert_equal_to_optax(worker_zero_of_equals(run(tree(0))), name)


@pytest.mark.parametrize("name", ["lamb, all options", "lars, all options"])
@pytest.mark.parametrize(
    "mode",
    [
        "check_vma",
        slow("no check_vma"),
        slow("pmap"),
    ],
)
def test_equal_to_optax_on_eight_devices(name, mode):
    def run(params):
        return train(ours(name), params)

    if mode == "check_vma":  # The types prove that the result is replicated.
        result = on_mesh(run)(tree(0))
    elif mode == "no check_vma":
        stacked = on_mesh(lambda p: jax.tree.map(lambda x: x[None], run(p)), False, P("w"))
        result = worker_zero_of_equals(stacked(tree(0)))
    else:
        params = jax.tree.map(lambda x: jnp.stack([x] * 8), tree(0))
        result = worker_zero_of_equals(jax.pmap(run, axis_name="w")(params))
    assert_equal_to_optax(result, name)


@pytest.mark.slow
def test_behind_a_sparse_allreduce():
    sparse = optax_ext.ok_topk(0.5, axis="w")
    chained = optax.chain(sparse, optax_ext.contrib.lamb(0.1, axis="w"))
    plain = optax.lamb(0.1)

    def local(params):
        number = jax.lax.axis_index("w").astype(jnp.float32)
        gradient = jax.tree.map(lambda x: x * (1.0 + number), tree(1))
        state = chained.init(params)
        reduced = sparse.update(gradient, state[0])[0]
        want = plain.update(reduced, plain.init(params), params)[0]
        return chained.update(gradient, state, params)[0], want

    got, want = on_mesh(local)(tree(0))
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-7)


def scaled(updates, params, workers):
    tx = optax_ext.contrib.scale_by_trust_ratio(axis="w")
    step = lambda u, p: tx.update(u, tx.init(p), p)[0]  # noqa: E731
    return sc.simulate(step, axis="w", axis_size=workers, in_axes=None)(updates, params)["a"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_summed_in_float32(dtype):
    params = {"a": jnp.full((64, 64), 8.0, dtype)}
    updates = {"a": jnp.full((64, 64), 2.0, dtype)}  # Norms 512 and 128.
    got = scaled(updates, params, 3)
    assert got.dtype == dtype
    assert (np.asarray(got, np.float32) == 8.0).all()


def test_mixed_dtypes_give_the_dtype_of_optax():
    params, updates = {"a": jnp.ones(100)}, {"a": jnp.ones(100, jnp.bfloat16)}
    plain = optax.scale_by_trust_ratio()
    with jax.numpy_dtype_promotion("standard"):  # It is the promotion that is compared.
        want = plain.update(updates, plain.init(params), params)[0]
        assert scaled(updates, params, 2).dtype == want["a"].dtype


def test_one_small_allreduce_and_slices_only():
    """Two numbers for each sliced leaf travel, and the norms read a P-th."""
    tx = optax_ext.contrib.scale_by_trust_ratio(axis="w")
    jaxpr = str(
        jax.make_jaxpr(lambda u, p: tx.update(u, tx.init(p), p)[0], axis_env=[("w", 8)])(
            tree(1), tree(0)
        )
    )
    assert jaxpr.count("psum") == 1
    assert "f32[6]" in next(line for line in jaxpr.splitlines() if "psum" in line)
    assert jaxpr.count("slice_sizes=(48,)") == 2  # 24 x 16 over 8 workers.


def test_derivative_at_a_zero_norm_is_finite():
    tx = optax_ext.contrib.scale_by_trust_ratio(axis="w")

    def loss(params):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(tx.update(tree(1), (), params)[0]))

    gradient = sc.simulate(jax.grad(loss), axis="w", axis_size=1, in_axes=None)(tree(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_an_empty_tree():
    tx = optax_ext.contrib.scale_by_trust_ratio(axis="w")
    jax.make_jaxpr(lambda: tx.update({}, tx.init({}), {})[0], axis_env=[("w", 2)])()


RATIO = optax_ext.contrib.scale_by_trust_ratio(axis="w")
INTEGERS = {"a": np.arange(3)}
WRONG = [
    (
        lambda: optax_ext.contrib.lamb(0.1, axis="w").update(
            tree(1), optax_ext.contrib.lamb(0.1, axis="w").init(tree(0)), tree(0)
        ),
        ValueError,
        r"axis='w' is not bound.*shard_map.*optax",
    ),
    (lambda: RATIO.update(tree(1), RATIO.init(tree(0))), ValueError, r"params=None was given"),
    (
        lambda: jax.make_jaxpr(lambda u: RATIO.update(u, (), u)[0], axis_env=[("w", 2)])(INTEGERS),
        TypeError,
        r"updates\['a'\] must be of a real floating type",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("varies", ["updates", "params"])
def test_what_differs_between_the_workers(varies):
    tx = optax_ext.contrib.scale_by_trust_ratio(axis="w")

    def local(x):
        args = {"updates": x, "params": x}
        args[varies] = jax.lax.pcast(x, "w", to="varying")
        return tx.update(args["updates"], (), args["params"])[0]

    with pytest.raises(ValueError, match=rf"{varies}\['bias'\] differs.*optax_ext\.dense"):
        on_mesh(local)(tree(0))
