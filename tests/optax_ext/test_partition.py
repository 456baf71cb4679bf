"""Work that is split over the workers: a function of each leaf, and the norms of LARS and LAMB."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from optax_ext import contrib
from optax_ext.contrib import _trust_ratio
from tests.optax_ext.helpers import bits, mesh, on_mesh, refused, slow

STEPS = 3
# Sizes above and below the bound for slices; 8, 3 and 2 workers divide some and not others.
SHAPES = {"even": (24, 16), "odd": (13, 11), "bias": (7,), "scalar": (), "zero": (9, 9)}
MASK = {"even": True, "odd": True, "bias": False, "scalar": False, "zero": True}
RATIO = contrib.scale_by_trust_ratio(axis="w")


def tree(seed=0):
    rng = np.random.default_rng(seed)
    leaves = {name: jnp.asarray(rng.standard_normal(s), "f4") for name, s in SHAPES.items()}
    return leaves | {"zero": jnp.zeros_like(leaves["zero"])}


def over_all(fn, workers=8, check_vma=True, out_specs=None):
    out_specs = P() if out_specs is None else out_specs
    return on_mesh(fn, mesh(workers, "w"), P(), out_specs, check_vma)


def of_worker_zero(result):
    """The result of worker 0, which all workers share."""
    assert all((np.asarray(x) == np.asarray(x)[:1]).all() for x in jax.tree.leaves(result))
    return jax.tree.map(lambda x: x[0], result)


def statistics(leaf, other):
    """Statistics of several shapes and dtypes."""
    return {
        "norm": jnp.linalg.norm(leaf),
        "dot": jnp.vdot(leaf, other),
        "largest": jnp.argmax(jnp.abs(leaf)),
        "finite": jnp.all(jnp.isfinite(leaf)),
        "narrow": jnp.ravel(leaf)[:3].astype(jnp.bfloat16),
        "sign": -0.0 * jnp.ones(2),
    }


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("check_vma", [slow(True), False])
def test_partitioned_result_is_that_of_every_leaf_by_itself(check_vma, workers):
    given, other = tree(), tree(1)
    given["bias"] = given["bias"].at[2].set(jnp.nan)
    got = over_all(contrib.distributed(statistics, axis="w"), workers, check_vma)(given, other)
    expected = {name: jax.jit(statistics)(given[name], other[name]) for name in SHAPES}
    assert jax.tree.map(jnp.dtype, got) == jax.tree.map(jnp.dtype, expected)
    assert bits(got) == bits(expected)
    for leaf in jax.tree.leaves(got):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_partitioned_workers_compute_their_own_and_one_message_follows():
    largest = contrib.distributed(lambda x: jnp.linalg.svd(jnp.atleast_2d(x))[1][0], axis="w")
    program = over_all(largest, 4).trace(tree())
    assert program.lower().as_text().count("stablehlo.case") == 1
    assert program.lower().as_text().count("stablehlo.all_reduce") == 1
    # One number of each leaf, and nothing for the leaves themselves.
    assert sc.traffic.of_traced(program).words == pytest.approx(2 * len(SHAPES) * 3 / 4)


def test_pieces_of_one_tensor_are_leaves():
    """Equations 12 to 14: each worker computes a piece, and one message brings them together."""
    x = tree()["even"]
    exp = contrib.distributed(jnp.exp, axis="w")
    mapped = over_all(lambda x: jnp.concatenate(exp(jnp.array_split(x, 4))), 4)
    assert bits(mapped(x)) == bits(jax.jit(jnp.exp)(x))
    program = mapped.trace(x)
    assert sc.traffic.of_traced(program).words == pytest.approx(2 * x.size * 3 / 4)
    branches = program.lower().as_text().split("stablehlo.case")[1].split("stablehlo.all_reduce")[0]
    assert branches.count("stablehlo.exponential") == 4  # one in each of the branches


# LARS and LAMB: optax's results, the same bits on every worker.


@pytest.fixture(autouse=True)
def _small_leaves_are_sliced(monkeypatch):
    monkeypatch.setattr(_trust_ratio, "SMALL", 64)


RATES, RATIO_OPTIONS = optax.linear_schedule(0.1, 0.01, 3), {"min_norm": 5.0, "eps": 0.1}
LAMB = {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "eps_root": 1e-4, "weight_decay": 0.1, "mask": MASK}
LARS = {
    "weight_decay": 0.1,
    "weight_decay_mask": MASK,
    "trust_coefficient": 0.1,
    "eps": 1e-2,
    "trust_ratio_mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "momentum": 0.8,
    "nesterov": True,
}
OPTIMIZERS = {
    "lamb": ("lamb", {"learning_rate": 0.01}),
    "lamb, all options": ("lamb", {"learning_rate": RATES, **LAMB}),
    "lars": ("lars", {"learning_rate": 0.1}),
    "lars, all options": ("lars", {"learning_rate": RATES, **LARS}),
    "ratio": ("scale_by_trust_ratio", {}),
    "ratio, all options": ("scale_by_trust_ratio", {"trust_coefficient": 0.3, **RATIO_OPTIONS}),
}


def trained(tx, params):
    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    gradients = jax.tree.map(lambda *x: jnp.stack(x), *(tree(i + 1) for i in range(STEPS)))
    return jax.lax.scan(step, (params, tx.init(params)), gradients)[0]


@functools.cache
def expected(name):
    kind, options = OPTIMIZERS[name]
    return jax.jit(lambda p: trained(getattr(optax, kind)(**options), p))(tree())


def ours(name):
    kind, options = OPTIMIZERS[name]
    return lambda params: trained(getattr(contrib, kind)(**options, axis="w"), params)


def equal_to_optax(result, name):
    assert jax.tree.map(jnp.dtype, result) == jax.tree.map(jnp.dtype, expected(name))
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected(name)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        slow(name, p) if "lamb" in name else (name, p)
        for name in OPTIMIZERS
        for p in ((1, 2, 3, 8) if "all" in name else (3,))
    ],
)
@pytest.mark.one_in(3)
def test_equal_to_optax_for_any_number_of_workers(name, workers):
    run = sc.simulate(ours(name), axis="w", axis_size=workers, in_axes=None)
    equal_to_optax(of_worker_zero(run(tree())), name)


@pytest.mark.parametrize("name", ["lamb, all options", "lars, all options"])
@pytest.mark.parametrize("mode", ["check_vma", slow("no check_vma"), slow("pmap")])
def test_equal_to_optax_on_eight_devices(name, mode):
    if mode == "check_vma":  # The types prove that the result is replicated.
        result = over_all(ours(name))(tree())
    elif mode == "no check_vma":
        every = over_all(lambda p: jax.tree.map(lambda x: x[None], ours(name)(p)), 8, False, P("w"))
        result = of_worker_zero(every(tree()))
    else:
        params = jax.tree.map(lambda x: jnp.stack([x] * 8), tree())
        result = of_worker_zero(jax.pmap(ours(name), axis_name="w")(params))
    equal_to_optax(result, name)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_lars_with_separate_norms_is_equation_11(workers):
    """By the text: gamma eta |w| / (|g| + decay |w|) times gradient and decay."""
    gamma, eta, beta = 0.01, 0.5, 0.1
    params = {k: np.asarray(x, np.float64) for k, x in tree().items()}
    random = {k: np.asarray(x, np.float64) for k, x in tree(1).items()}
    # A gradient that nearly cancels the decay, where optax's ratio is far larger.
    cancels = {k: -beta * w + 1e-4 * random[k] for k, w in params.items()}
    masked = "even"
    for gradients in (random, cancels):
        tx = contrib.lars(
            eta,
            weight_decay=beta,
            trust_coefficient=gamma,
            momentum=0.0,
            trust_ratio_mask={k: k != masked for k in params},
            separate_norms=True,
            axis="w",
        )
        given = [
            {k: jnp.asarray(x, jnp.float32) for k, x in t.items()} for t in (gradients, params)
        ]
        step = sc.simulate(
            lambda g, p, tx=tx: tx.update(g, tx.init(p), p)[0],
            axis="w",
            axis_size=workers,
            in_axes=None,
        )
        found = of_worker_zero(step(*given))
        for k, w in params.items():
            g, norm = gradients[k], np.linalg.norm
            zero = not norm(w) or not norm(g) + beta * norm(w)
            local = eta * (
                1 if zero or k == masked else gamma * norm(w) / (norm(g) + beta * norm(w))
            )
            expected = -local * (g + beta * w)
            # The gradient and the decay are added in float32, of which little may be left.
            most = 1e-6 * local * (np.abs(g) + beta * np.abs(w)).max(initial=0)
            np.testing.assert_allclose(found[k], expected, rtol=1e-5, atol=most)


def scaled(updates, params, workers):
    def step(updates, params):
        return RATIO.update({"a": updates}, (), {"a": params})[0]["a"]

    return sc.simulate(step, axis="w", axis_size=workers, in_axes=None)(updates, params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_summed_in_float32_and_mixed_dtypes_are_those_of_optax(dtype):
    params, updates = jnp.full((64, 64), 8.0, dtype), jnp.full((64, 64), 2.0, dtype)
    got = scaled(updates, params, 3)  # Norms 512 and 128.
    assert got.dtype == dtype
    assert (np.asarray(got, np.float32) == 8.0).all()
    with jax.numpy_dtype_promotion("standard"):  # It is the promotion that is compared.
        params = params.astype(jnp.float32)
        want = optax.scale_by_trust_ratio().update(updates, optax.EmptyState(), params)[0]
        assert scaled(updates, params, 2).dtype == want.dtype


def test_partitioned_norms_are_one_small_allreduce_and_slices_only():
    """Two numbers for each sliced leaf travel, and the norms read a P-th."""
    step = jax.make_jaxpr(lambda u, p: RATIO.update(u, (), p)[0], axis_env=[("w", 8)])
    text = str(step(tree(1), tree()))
    assert text.count("psum") == 1
    assert "f32[6]" in next(line for line in text.splitlines() if "psum" in line)
    assert text.count("slice_sizes=(48,)") == 2  # 24 x 16 over 8 workers.
    jax.make_jaxpr(lambda: RATIO.update({}, (), {})[0], axis_env=[("w", 2)])()


def test_derivative_at_a_zero_norm_is_finite():
    def loss(params):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(RATIO.update(tree(1), (), params)[0]))

    gradient = sc.simulate(jax.grad(loss), axis="w", axis_size=1, in_axes=None)(tree())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_wrong_calls():
    lamb, integers = contrib.lamb(0.1, axis="w"), {"a": np.arange(3)}
    unbound = r"axis='w' is not bound.*shard_map.*optax"
    refused(unbound, lamb.update, tree(1), lamb.init(tree()), tree())
    refused("axis='w' is not bound here", contrib.distributed(jnp.sum, axis="w"), tree())
    refused(r"params=None was given", RATIO.update, tree(1), ())
    traced = jax.make_jaxpr(lambda u: RATIO.update(u, (), u)[0], axis_env=[("w", 2)])
    refused(r"updates\['a'\] must be of a real floating type", traced, integers, error=TypeError)
    two = contrib.distributed(lambda x, y: jnp.sum(x + y), axis="w")
    two = sc.simulate(two, axis="w", axis_size=2, in_axes=None)
    refused("even|structure|key", two, tree(), {"odd": jnp.ones(3)})
    for varies in ("updates", "params"):

        def local(x, varies=varies):
            given = {"updates": x, "params": x}
            given[varies] = jax.lax.pcast(x, "w", to="varying")
            return RATIO.update(given["updates"], (), given["params"])[0]

        refused(rf"{varies}\['bias'\] differs.*optax_ext\.dense", over_all(local), tree())
