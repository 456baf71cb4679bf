"""Optimizers of this library in a chain with others, which increases the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext import helpers
from tests.optax_ext.helpers import mesh, normal, refused, slow, train

# As in users' programs: optax adds floats to integers.
pytestmark = pytest.mark.usefixtures("default_promotion")
WORKERS = 4
PARAMS = {"kernel": np.full((6, 4), 0.1, np.float32), "bias": np.zeros(4, np.float32)}
KERNEL, BIAS = {"kernel": True, "bias": False}, {"kernel": False, "bias": True}
EXACT = {"axis": "data", "density": 0.2}
BF16 = {"residual": optax_ext.residual(jnp.bfloat16), "weight_decay": 0.0}
WARM_UP = optax.linear_schedule(0.0, 0.1, 20)
WHOLE = {
    "sparse_adamw": optax_ext.sparse_adamw(0.01, **EXACT),
    "sparse_adamw, bfloat16": optax_ext.sparse_adamw(0.01, **BF16, **EXACT),
    "sparse_sgd": optax_ext.sparse_sgd(0.1, **EXACT),
    "sparse_sgd, warm-up": optax_ext.sparse_sgd(WARM_UP, weight_decay=0.1, **EXACT),
    "ok_topk_sgd": optax_ext.ok_topk_sgd(0.1, **EXACT),
    "ok_topk_sgd, schedule": optax_ext.ok_topk_sgd(lambda step: 0.1 / (1 + step), **EXACT),
}
# Each ends in a step against its input, which it takes for a gradient.
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(0.1),
    "sgd, momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lars": lambda: optax.lars(0.1),
    "sgd, schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 10)),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "moments alone": optax.scale_by_adam,
    "momentum alone": lambda: optax.trace(0.9),
    "rprop": lambda: optax.rprop(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "dowg": optax.contrib.dowg,
    "prodigy": optax.contrib.prodigy,
    "momo": optax.contrib.momo,
    "cocob": optax.contrib.cocob,
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "a chain of chains": lambda: optax.chain(optax.sgd(0.1), optax.clip(1.0)),
    "in a mask": lambda: optax.masked(optax.contrib.ademamix(0.1), KERNEL),
}
LEGITIMATE = {
    "clip": lambda: optax.clip(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "scale(0.5)": lambda: optax.scale(0.5),
    "ema": lambda: optax.ema(0.9),
    "clipping, then an average": lambda: optax.chain(optax.clip(1.0), optax.ema(0.9)),
    "a schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)),
    "keep_params_nonnegative": optax.keep_params_nonnegative,
    "zero_nans": optax.zero_nans,
    "apply_if_finite": lambda: optax.apply_if_finite(optax.identity(), 3),
    "masked": lambda: optax.masked(optax.set_to_zero(), BIAS),
    "weight decay by hand": lambda: optax.add_decayed_weights(-1e-3),
    "noise": lambda: optax.add_noise(0.1, 0.5, key=0),
    "trust ratio": optax.scale_by_trust_ratio,
    "on a plateau": optax.contrib.reduce_on_plateau,
}
LEGITIMATE |= {
    "injected": lambda: optax.inject_hyperparams(optax.clip)(0.1),
    "of the user": lambda: optax.stateless(lambda updates, params: updates),
}
MESSAGE = "increases the loss: their updates include the learning rate and its sign"


def init(tx, params=PARAMS):
    return optax_ext.init_state(tx, params, {"data": WORKERS})


refuses = functools.partial(refused, MESSAGE, init)


def loss_fn(params, x):
    return jnp.mean((x @ params["kernel"] + params["bias"][None] - 1) ** 2)


# All of these after one complete optimizer, and a few of them after each complete optimizer.
PAIRS = [("ok_topk_sgd", behind) for behind in (*OPTIMIZERS, *LEGITIMATE)]
PAIRS += [(name, x) for name in WHOLE for x in ("adamw", "sgd", "clip", "scale(0.5)")]


@pytest.mark.parametrize(("name", "behind"), dict.fromkeys(PAIRS))
@pytest.mark.one_in(3)
def test_what_is_behind_a_whole_one(name, behind):
    check = refuses if behind in OPTIMIZERS else init
    check(optax.chain(WHOLE[name], (OPTIMIZERS | LEGITIMATE)[behind]()))


def made(factory):
    """What a function of optax makes from a learning rate or from nothing, or None."""
    for given in ((0.1,), ()):
        try:
            tx = factory(*given)
            tx.init(PARAMS)
        except Exception:  # It needs something else.
            continue
        return tx
    return None


def test_every_optimizer_of_optax_behind_a_whole_one():
    of_optax = [
        *(f for f in vars(optax).values() if getattr(f, "__module__", "") == optax.sgd.__module__),
        *(getattr(optax.contrib, name) for name in dir(optax.contrib) if name[0] != "_"),
    ]
    legitimate = (optax.contrib.reduce_on_plateau, getattr(optax.contrib, "normalize", None))
    found = {f.__name__: made(f) for f in of_optax if callable(f) and f not in legitimate}
    found = {name: tx for name, tx in found.items() if isinstance(tx, optax.GradientTransformation)}
    assert len(found) > 40
    for tx in found.values():
        refuses(optax.chain(WHOLE["sparse_sgd"], tx))


@pytest.mark.parametrize("name", WHOLE)
def test_a_chain_in_front_that_turns_gradients_round(name):
    refuses(optax.chain(optax.sgd(0.1), WHOLE[name]))
    init(optax.chain(optax.chain(optax.clip(1.0), optax.zero_nans()), WHOLE[name]))


def test_the_order_of_a_named_chain():
    whole = WHOLE["sparse_sgd"]
    # In the order of its parts, and not of their names, which JAX sorts.
    refuses(optax.named_chain(("z", whole), ("a", optax.adam(0.1))))
    refuses(optax.chain(optax.identity(), optax.named_chain(("z", whole), ("a", optax.sgd(0.1)))))
    init(optax.named_chain(("z", optax.scale_by_adam()), ("a", whole)))
    init(optax.named_chain(("z", whole), ("a", optax.clip(1.0))))
    sparse, twice = optax_ext.ok_topk(0.1, axis="data"), optax_ext.dense(axis="data")
    refused("two allreduces", init, optax.named_chain(("z", twice), ("a", sparse)))


CLIP = optax_ext.local_clip_by_global_norm(1.0, axis="data")
AROUND = {
    "chain": lambda tx: optax.chain(CLIP, tx),
    "multi_steps": lambda tx: optax_ext.multi_steps(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
    "delayed": optax_ext.delayed,
    "bucketed": lambda tx: tx,
    "masked": lambda tx: optax.masked(tx, KERNEL),
    "multi_transform": lambda tx: optax.multi_transform(
        {"one": tx, "other": optax_ext.dense(axis="data")}, {"kernel": "one", "bias": "other"}
    ),
    "plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
}


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.one_in(3)
def test_inside_of_wrappers(kind):
    around, whole = AROUND[kind], WHOLE["sparse_sgd"]
    if kind == "bucketed":
        whole = optax_ext.bucketed(whole, 2)
    refuses(around(optax.chain(whole, optax.sgd(0.1))))
    refuses(optax.chain(around(whole), optax.adam(0.1)))
    init(around(optax.chain(whole, optax.clip(1.0))))
    init(around(whole))


def test_other_leaves_may_have_another_optimizer_and_an_exchange_of_gradients_is_no_whole_one():
    for behind in (optax.adam(1e-3), optax.scale(0.1)):
        other = optax.chain(optax_ext.dense(axis="data"), behind)
        tx = optax.chain(optax.masked(WHOLE["sparse_adamw"], KERNEL), optax.masked(other, BIAS))
        init(tx)
        refuses(optax.chain(tx, optax.sgd(0.1)))
        refuses(optax.chain(tx, optax.masked(optax.adam(0.1), KERNEL)))
        init(optax.chain(tx, optax.masked(optax.ema(0.1), BIAS)))
    for local in (None, optax.clip(1.0), optax.scale(0.5)):
        init(optax.chain(optax_ext.ok_topk(0.1, axis="data", local=local), optax.adamw(1e-3)))


def test_a_step_refuses_a_state_that_was_made_elsewhere_and_so_does_a_trace():
    parts, on = (WHOLE["sparse_sgd"], optax.adamw(1e-3)), mesh(WORKERS)
    bad, good = optax.chain(*parts), optax.chain(parts[0], optax.clip(1.0))
    state = init(parts[0]), parts[1].init(PARAMS)
    lower = optax_ext.make_train_step(loss_fn, bad, on).lower
    refused(MESSAGE, lower, PARAMS, state, np.ones((8, 6), np.float32))
    refused(MESSAGE, jax.eval_shape, lambda params: init(bad, params), PARAMS)
    refused(MESSAGE, jax.jit(lambda params: init(bad, params)).lower, PARAMS)
    refused(MESSAGE, optax_ext.abstract_state, bad, PARAMS, on)
    jax.eval_shape(lambda params: init(good, params), PARAMS)
    optax_ext.abstract_state(good, PARAMS, on)


@pytest.mark.parametrize("name", ["sparse_adamw", slow("sparse_sgd"), slow("ok_topk_sgd")])
def test_with_something_legitimate_behind_it_trains_downhill(name):
    tx = optax.chain(WHOLE[name], optax.clip(0.05))
    results = train(tx, loss_fn, PARAMS, [normal((16, 6))] * 12, mesh(WORKERS))
    assert float(results[-1][2]) < float(results[1][2])


def test_masks_of_whole_subtrees():
    """A mask that leaves out a subtree leaves no paths of its leaves."""
    params = {"a": {"w": jnp.zeros(4), "b": jnp.zeros(2)}, "c": {"w": jnp.zeros(3)}}
    outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    rounds = optax_ext.local_steps(optax.adam(0.1), outer, every=2)
    for mask in ({"a": True, "c": False}, {"a": {"w": True, "b": False}, "c": False}):
        first = optax.masked(WHOLE["sparse_sgd"], mask)
        others = jax.tree.map(lambda x: not x, mask)
        init(optax.chain(first, optax.masked(rounds, others)), params)
        for inside in (mask, {"a": {"w": True, "b": True}, "c": True}):
            refuses(optax.chain(first, optax.masked(rounds, inside)), params)


def test_what_ok_topk_sgd_has_not_sent_is_added_to_the_parameters():
    """As the messages of flush say; then all gradients have been applied, as SGD would."""
    tx, sums = optax_ext.ok_topk_sgd(0.1, axis="data", density=0.25), {"w": 0.0, "b": 0.0}
    params = jax.tree.map(jnp.asarray, helpers.PARAMS)
    steps = train(
        tx,
        helpers.loss_fn,
        helpers.PARAMS,
        [helpers.batch_of(seed=i) for i in range(8)],
        helpers.mesh(),
    )
    for (params, *_), seed in zip(steps, range(8), strict=False):
        gradient = jax.grad(helpers.loss_fn)(params, helpers.batch_of(seed=seed))
        sums = jax.tree.map(lambda s, g: s - 0.1 * np.asarray(g, np.float64), sums, gradient)
    params, state, _ = steps[-1]
    refused("take their gradients at params, and flush has nothing", optax_ext.flush, params, state)
    updates, state = optax_ext.consolidate(params, state)
    assert np.abs(helpers.flat(updates)).max() > 1e-3
    wanted = jax.tree.map(np.add, helpers.PARAMS, sums)
    np.testing.assert_allclose(
        helpers.flat(optax.apply_updates(params, updates)), helpers.flat(wanted), atol=1e-6
    )
