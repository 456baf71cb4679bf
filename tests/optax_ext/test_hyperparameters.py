"""Hyperparameters out of range, or in a dtype that rounds them, and steps of 16-bit parameters."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    loss_fn,
    mesh,
    normal,
    refused,
    run,
    slow,
    train,
)

ADAMW = functools.partial(optax_ext.sparse_adamw, axis="data")
SGD = functools.partial(optax_ext.sparse_sgd, axis="data")
PAPER = functools.partial(optax_ext.ok_topk_sgd, axis="data", density=0.1)
OK_TOPK = functools.partial(optax_ext.ok_topk, 0.1, axis="data")
NAN, INF, LARGE = float("nan"), float("inf"), 2**31
NOT_POSITIVE, NO_AVERAGE, NOT_COUNTED = (0, 0.0, -1.0, NAN), (1.0, -0.1, 1.5, NAN), (0, -1, LARGE)
# For each argument the functions that take it, and values that are errors.
RANGES = [
    ("learning_rate", (ADAMW, SGD, PAPER), (NAN, INF, -INF)),
    ("gain", (functools.partial(ADAMW, 0.1),), (*NOT_POSITIVE, INF)),
    ("b1", (functools.partial(ADAMW, 0.1, every=2),), NO_AVERAGE),
    ("b2", (functools.partial(ADAMW, 0.1), optax_ext.scale_by_local_adam), NO_AVERAGE),
    ("eps", (functools.partial(ADAMW, 0.1), optax_ext.scale_by_local_adam), (-1e-8, 2.0, NAN)),
    ("weight_decay", (functools.partial(ADAMW, 0.1), functools.partial(SGD, 0.1)), (-1, NAN, INF)),
    ("limit", (functools.partial(ADAMW, 0.1),), NOT_POSITIVE),
    ("every", (functools.partial(ADAMW, 0.1), functools.partial(SGD, 0.1)), NOT_COUNTED),
    (
        "every",
        (
            functools.partial(optax_ext.local_steps, optax.sgd(0.1), optax.sgd(1.0)),
            functools.partial(optax_ext.published.diloco, optax.sgd(0.1), axis="data"),
            functools.partial(optax_ext.measure_xi, OK_TOPK(), axis="data"),
        ),
        NOT_COUNTED,
    ),
    ("every_k_schedule", (functools.partial(optax_ext.multi_steps, OK_TOPK()),), NOT_COUNTED),
    ("dense_steps", (functools.partial(ADAMW, 0.1), OK_TOPK), (-1, LARGE)),
    ("average_every", (functools.partial(optax_ext.scale_by_local_adam, axis="w"),), NOT_COUNTED),
    ("buckets", (functools.partial(optax_ext.dense, axis="data"),), NOT_COUNTED),
    (
        "momentum",
        (
            optax_ext.momentum_correction,
            functools.partial(optax_ext.published.diloco, optax.sgd(0.1), axis="data", every=2),
            functools.partial(optax_ext.published.dgc, 0.1, axis="data"),
        ),
        NO_AVERAGE,
    ),
    ("decay", (optax_ext.residual,), (-0.1, 1.5, NAN)),
    ("step_ahead", (optax_ext.residual,), (-0.1, NAN)),
    (
        "max_norm",
        (functools.partial(optax_ext.local_clip_by_global_norm, axis="data"),),
        (*NOT_POSITIVE, INF),
    ),
]


@pytest.mark.parametrize(("name", "functions", "values"), RANGES)
def test_a_value_out_of_range_is_an_error_that_names_it(name, functions, values):
    for function in functions:
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must be .* got {value}") as raised:
                function(**{name: value})
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("make", [ADAMW, SGD, PAPER])
def test_a_learning_rate_is_one_number(make, schedule):
    rate = np.full(1, 0.1, np.float32)

    def trained():
        tx = make(learning_rate=(lambda count: rate) if schedule else rate)
        train(tx, loss_fn, PARAMS, [batch_of()], mesh(2))

    refused(r"^learning_rate must be one number.*of shape \(1,\)", trained)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (optax_ext.sparse_adamw, "learning_rate"),
        (functools.partial(optax_ext.sparse_adamw, 0.1), "b2"),
        (optax_ext.sparse_sgd, "learning_rate"),
        (functools.partial(optax_ext.ok_topk_sgd, density=0.1), "learning_rate"),
    ],
)
def test_injected_hyperparameters_that_round_are_an_error_with_the_fix(make, name, dtype):
    params = {"w": jnp.ones((8, 4), dtype)}
    value = 0.999 if name == "b2" else 0.1
    narrow = optax.inject_hyperparams(make)(**{name: value}, axis="data")
    with pytest.raises(ValueError, match=rf"^{name} is an array of .*hyperparam_dtype=jnp.float32"):
        optax_ext.init_state(narrow, params, mesh(2))


@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16), jnp.float16])
def test_injected_hyperparameters_in_float32_are_those_of_the_call(dtype):
    params = {"w": jnp.ones((8, 4), dtype)}
    targets = normal((3, 2, 8, 4))

    def loss_fn(params, target):
        return 0.5 * jnp.sum((params["w"].astype(jnp.float32) - target[0]) ** 2)

    # All entries are delivered: which of them are depends on the last bit.
    make = functools.partial(ADAMW, density=1.0, allreduce=sc.allreduce.topk_a())
    injected = optax.inject_hyperparams(
        lambda rate, b2: make(rate, b2=b2), hyperparam_dtype=jnp.float32
    )
    injected, plain = (
        train(tx, loss_fn, params, targets, mesh(2))[-1][0]["w"]
        for tx in (injected(rate=0.1, b2=0.999), make(0.1))
    )
    wide = [np.asarray(x.astype(jnp.float32)) for x in (injected, plain)]
    np.testing.assert_allclose(*wide, rtol=0.02, atol=0.02)
    assert not np.array_equal(wide[0], np.ones((8, 4)))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optax_ext.sparse_adamw, {}),
        (optax_ext.sparse_sgd, {}),
        (optax_ext.ok_topk_sgd, {"density": 0.1}),
        (optax_ext.ok_topk, {"density": 0.1}),
        (optax_ext.powersgd, {"rank": 1, "seed": 0}),
        (optax_ext.quantized, {"bits": (2, 4)}),
        (functools.partial(optax_ext.local_clip_by_global_norm, max_norm=1.0), {}),
    ],
)
def test_only_options_that_are_given_have_to_be_named_static(make, options):
    """``optax.inject_hyperparams`` makes arrays of the numbers in a signature as well."""
    injected = optax.inject_hyperparams(make, static_args=tuple(options))
    if "learning_rate" in inspect.signature(make).parameters:
        options = {**options, "learning_rate": 0.1}
    params = {"w": jnp.ones((8, 4))}
    state, plain = (
        optax_ext.init_state(tx(**options, axis="data"), params, mesh(2)) for tx in (injected, make)
    )
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)


def test_a_number_that_has_to_be_static_says_so():
    outer = functools.partial(optax_ext.published.diloco, optax.sgd(0.1), axis="data")
    injected = optax.inject_hyperparams(outer, static_args=("every", "buckets"))
    with pytest.raises(ValueError, match=r"^momentum must be .*name it in static_args="):
        optax_ext.init_state(injected(every=2), {"w": jnp.ones(4)}, mesh(2))


@pytest.mark.parametrize("options", [{}, {"moments": "rows"}, {"every": 2}, {"moments": "factors"}])
@pytest.mark.parametrize("eps", [0.0, 1e-40])
@pytest.mark.one_in(4)
def test_an_entry_without_a_gradient_does_not_move_whatever_eps_is(eps, options):
    given = normal((4, 2, 6, 5))
    given[:, :, :, 2:4] = 0.0
    given[2:, :, :, 3] = 1.0
    tx = optax_ext.sparse_adamw(0.1, axis="w", eps=eps, weight_decay=0.0, density=1.0, **options)
    found = run(tx, given)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.last))
    assert not found.updates[..., 2].any()
    assert np.abs(found.updates).max() < 4
    assert found.last.skipped.tolist() == [0, 0]


def decayed(dtype, steps=200, workers=2, **options):
    """Parameters after weight decay alone, the mean residual, and where all decays lead."""
    params = {"a": jnp.ones((4, 8), dtype), "b": jnp.full((5,), 1.5, jnp.float32)}
    tx = ADAMW(1e-2, weight_decay=0.1, **options)
    step = optax_ext.make_train_step(lambda p, x: 0.0 * p["b"].sum() + x.mean(), tx, mesh(workers))
    state, batch = optax_ext.init_state(tx, params, mesh(workers)), np.ones((8, 1), np.float32)
    wanted = np.ones((4, 8))
    for _ in range(steps):
        wanted -= 1e-2 * 0.1 * np.asarray(params["a"].astype(jnp.float32), np.float64)
        params, state, _ = step(params, state, batch)
    residual = np.asarray(optax_ext.get_state(state).residual, np.float64).mean(0)[:32]
    after = np.asarray(params["a"].astype(jnp.float32), np.float64)
    return after, residual.reshape(4, 8), wanted


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.bfloat16, {}),
        slow(jnp.float16, {}),
        (jnp.bfloat16, {"density": 1.0, "allreduce": sc.allreduce.topk_a()}),
        slow(jnp.bfloat16, {"every": 4}),
        slow(jnp.bfloat16, {"residual": optax_ext.residual(jnp.bfloat16, step_ahead=1.0)}),
    ],
)
def test_weight_decay_that_16_bits_round_away_is_taken_later(dtype, options):
    """Each decay of 0.001 is less than half a unit in the last place of 1."""
    params, residual, wanted = decayed(dtype, **options)
    assert abs(params.mean() - 0.999**200) < 0.03
    # The rest waits in the residuals.
    in_expectation = "residual" in options
    np.testing.assert_allclose(params + residual, wanted, atol=5e-3 if in_expectation else 2e-5)


ROUNDS = {"every step": 1, "rounds": 4}


@pytest.mark.parametrize("name", [*ROUNDS, "local steps", "ok_topk_sgd"])
def test_steps_that_16_bits_round_away_are_taken_later(name):
    """Each step of 0.001 is less than half a unit in the last place of 1."""
    if name == "ok_topk_sgd":
        tx = optax_ext.ok_topk_sgd(1e-3, density=1.0, axis="data")
    elif name in ROUNDS:
        tx = optax_ext.sparse_sgd(1e-3, density=1.0, axis="data", every=ROUNDS[name])
    else:
        outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
        tx = optax_ext.local_steps(optax.sgd(1e-3), outer, every=2)
    params = {"a": jnp.ones(8, jnp.bfloat16), "b": jnp.ones(3)}
    state = optax_ext.init_state(tx, params, mesh(2))

    def loss_fn(params, x):
        return params["a"].astype(jnp.float32).sum() + params["b"].sum() + 0.0 * x.sum()

    step = optax_ext.make_train_step(loss_fn, tx, mesh(2))
    for _ in range(200):
        params, state, _ = step(params, state, np.ones(2, np.float32))
    waits = state.moved["a"] if name == "local steps" else state.residual[:, :8]
    taken = params["a"].astype(jnp.float32) + waits.mean(0)
    np.testing.assert_allclose(taken, 0.8, rtol=1e-5)
    np.testing.assert_allclose(params["b"], 0.8, rtol=1e-4)
    assert 0 < abs(waits).max() < 2.0**-8


def test_weight_decay_of_a_mask_or_of_float32_leaves_no_residual():
    where = {"a": False, "b": True}
    params, residual, _ = decayed(jnp.bfloat16, 5, mask=where)
    assert (params == 1.0).all()
    assert not residual.any()
    _, residual, _ = decayed(jnp.float32, 5)
    assert not residual.any()


@pytest.mark.parametrize("options", [{}, {"buckets": 1}, {"dtype": "float16"}])
def test_a_dense_mean_of_float16_does_not_overflow(options):
    tx = optax_ext.dense(axis="w", **options)
    step = sc.simulate(lambda g: tx.update(g, tx.init(g)), axis="w", axis_size=8)
    given = {"a": np.full((8, 3), 6e4, np.float16), "b": np.full((8, 2), 1e4, np.float32)}
    means, state = step(given)
    np.testing.assert_allclose(means["a"].astype(jnp.float32), 6e4, rtol=1e-3)
    np.testing.assert_allclose(means["b"], 1e4, rtol=1e-3)
    assert means["a"].dtype == np.float16
    assert state.skipped.tolist() == [0] * 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_dense_mean_that_is_not_finite_skips_the_step(bad):
    tx = optax_ext.dense(axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g)), axis="w", axis_size=3)
    given = normal((3, 4))
    given[:2, 1] = bad
    means, state = step(given)
    assert not means.any()
    assert (state.skipped[0], state.count[0], state.words[0]) == (1, 0, 0)
