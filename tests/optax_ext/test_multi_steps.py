"""Accumulation or a delay before an allreduce, and the wrappers that can't be used there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import flat, mesh, normal, refused, run, slow, train

PARAMS = {"kernel": jnp.zeros((5, 4)), "bias": jnp.zeros((4,))}
SIZE = 24
reduce = functools.partial(optax_ext.topk_a, 0.1, axis="data")


def optaxs(tx, k):
    return optax.MultiSteps(tx, k).gradient_transformation()


def loss_fn(params, batch):
    """Linear, so that its gradient is the mean of the batch, whatever the parameters."""
    weights = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])
    return jnp.sum(jnp.mean(batch, axis=0) * weights)


def gradients(workers, steps):
    return normal((steps, workers, SIZE))


def trained(tx, workers, batches, params=PARAMS, state=None):
    return train(tx, loss_fn, params, batches, mesh(workers), state=state)[-1][:2]


def accumulated(state, workers):
    """The sum of the accumulated gradients over workers and mini-steps, flat."""
    wait = jax.tree.map(
        lambda x, p: np.asarray(x).reshape(workers, *p.shape).sum(0), state.acc_grads, PARAMS
    )
    mean = isinstance(state, optax.MultiStepsState)
    return flat(wait) * (float(state.mini_step) if mean else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [optax_ext.multi_steps, optaxs], ids=["optax_ext", "optax"])
@pytest.mark.parametrize("new_workers", [None, 2, 6])
def test_nothing_is_lost_between_accumulations_also_with_other_workers(wrapper, new_workers):
    """Seven mini-steps, three of them for each exchange; `reshard` with two in the accumulators."""
    k, tx = 3, wrapper(optax.chain(reduce(), optax.sgd(1.0)), 3)
    batches = gradients(4, 5)
    params, state = trained(tx, 4, batches)
    assert int(state.mini_step) == 2
    workers = new_workers or 4
    if new_workers is not None:
        state = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(workers)))
    more = gradients(workers, 2)
    first = flat(params)
    params, state = trained(tx, workers, more, jax.device_get(params), state)
    assert (int(state.mini_step), int(state.gradient_step)) == (1, 2)
    # An update is the negative of the mean.
    delivered = -4 * first - workers * (flat(params) - first)
    residual = np.asarray(optax_ext.get_state(state).residual).sum(0)
    np.testing.assert_allclose(
        batches.sum((0, 1)) + more.sum((0, 1)),
        k * (delivered + residual) + accumulated(state, workers),
        atol=2e-5,  # sums of some 40 numbers of about 1
    )


@pytest.mark.slow
def test_a_mini_step_exchanges_nothing():
    def words(tx):
        state = optax_ext.init_state(tx, PARAMS, mesh(4))
        step = optax_ext.make_train_step(loss_fn, tx, mesh(4))
        traced = step.trace(PARAMS, state, gradients(4, 1)[0])
        return sc.traffic.of_traced(traced).words

    chain = optax.chain(reduce(), optax.sgd(1.0))
    loss = 2 * 3 / 4  # the mean of one word over 4 workers
    assert words(optax_ext.multi_steps(chain, 5)) == pytest.approx((words(chain) - loss) / 5 + loss)
    assert words(optaxs(chain, 5)) == words(chain)


def test_it_is_optaxs_with_any_schedule_sums_and_a_dense_allreduce():
    schedule = lambda step: jnp.where(step < 1, 1, 2)  # noqa: E731
    ends = []
    for make in (optax_ext.multi_steps, optax.MultiSteps):
        chain = optax.chain(optax_ext.dense(axis="data"), optax.adam(0.1))
        tx = make(chain, schedule, use_grad_mean=False)
        ends.append(flat(trained(tx, 4, gradients(4, 4))[0]))
    assert np.abs(ends[0]).max() > 0.1
    np.testing.assert_allclose(*ends, rtol=1e-5)


def test_a_scalar_parameter_is_an_error_around_optaxs():
    message = r"params\['scale'\] is a scalar.*optax_ext.multi_steps"
    params = {"scale": jnp.zeros(()), "rest": jnp.zeros(3)}
    refused(message, optax_ext.init_state, optaxs(reduce(), 2), params, mesh(4))


def test_optaxs_around_the_allreduce_is_warned_of():
    after = optax.chain(reduce(), optaxs(optax.adam(0.1), 2))
    optax_ext.init_state(after, PARAMS, mesh(4))
    with pytest.warns(UserWarning, match=r"every mini-step.*optax_ext\.multi_steps\(tx, k\)") as w:
        optax_ext.init_state(optaxs(after, 2), PARAMS, mesh(4))
    assert w[0].filename == __file__


AROUND = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step > 1),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step > 1),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("inside", [reduce(), optax_ext.dense(axis="data")])
def test_a_wrapper_that_must_not_be_around(name, inside):
    around, message = AROUND[name](inside), "is around the allreduce.*Put it after"
    beside = optax.apply_if_finite(optax.chain(optax.clip(1.0), around), 1)
    of_name = f"optax.{name} is around .*optax.{name}\\(optimizer"
    for text, tx in ((message, around), (message, beside), (of_name, optaxs(around, 2))):
        refused(text, optax_ext.init_state, tx, PARAMS, mesh(4))


LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=1.0)


@pytest.mark.parametrize("skip", [optax.skip_not_finite, LARGE])
def test_skipping_by_the_gradients_of_one_worker(skip):
    around, behind = (
        optax.MultiSteps(tx, 2, should_skip_update_fn=skip) for tx in (reduce(), optax.sgd(1.0))
    )
    message = r"should_skip_update_fn.*nonfinite='skip'"
    refused(message, optax_ext.init_state, around, PARAMS, mesh(4))
    optax_ext.init_state(optax.chain(reduce(), behind.gradient_transformation()), PARAMS, mesh(4))


@pytest.mark.parametrize("before", [optax.trace(0.9), optax.zero_nans(), optax.apply_every(2)])
def test_a_state_that_differs_between_the_workers_is_named(before):
    tx = optax.chain(before, reduce(), optax.sgd(1.0))
    # Some of optax's transformations multiply a float by a bool.
    with jax.numpy_dtype_promotion("standard"):
        message = r"opt_state\[0\]\..* differs between the workers"
        refused(message, trained, tx, 4, gradients(4, 1))


@pytest.mark.slow
def test_accumulators_of_one_worker_where_those_of_all_belong():
    state = optax_ext.init_state(optaxs(reduce(), 2), PARAMS, {"data": 4})
    message = r"acc_grads\['bias'\].*\(4,\), expected \(16,\).*init_st"
    refused(message, optax_ext.state_specs, state._replace(acc_grads=PARAMS))


REDUCING = {"ok_topk": optax_ext.ok_topk(0.1, axis="w"), "dense": optax_ext.dense(axis="w")}


def trajectory(tx, given):
    """Parameters after each step, of one worker, and the last state."""
    found = run(tx, given)
    return 1 + found.updates[:, 0].cumsum(0), jax.tree.map(lambda x: x[-1], found.states)


@pytest.mark.parametrize("name", [slow("ok_topk"), "dense"])
def test_a_delay_is_the_training_on_gradients_of_the_step_before(name):
    given, tx = normal((5, 4, 60)), optax.chain(REDUCING[name], optax.adam(0.1))
    late, state = trajectory(optax_ext.delayed(tx), given)
    expected, _ = trajectory(tx, np.concatenate([np.zeros_like(given[:1]), given[:-1]]))
    # Equal up to rounding: the two programs may fuse Adam's step in different ways.
    np.testing.assert_allclose(late, expected, atol=1e-6)
    # The last gradient waits; a step with zeros delivers it.
    np.testing.assert_array_equal(np.asarray(state.acc_grads).reshape(4, 60), given[-1])
    assert state.gradient_step.tolist() == [5] * 4


def test_what_is_delayed_moves_to_other_workers():
    tx = optax_ext.delayed(optax.chain(reduce(), optax.sgd(0.05)))
    _, state = trained(tx, 4, gradients(4, 2))
    again = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, {"data": 2}))
    for name, leaf in state.acc_grads.items():
        assert again.acc_grads[name].shape == (2, *PARAMS[name].shape)
        totals = (np.asarray(x, np.float64).sum(0) for x in (leaf, again.acc_grads[name]))
        np.testing.assert_allclose(*totals, rtol=1e-5, atol=1e-6)
    assert type(again) is type(state)


def test_a_state_made_without_the_delay_is_refused():
    tx = REDUCING["ok_topk"]
    for made, message in (
        (tx, r"made without the delay of one step.*init_state"),
        (optax_ext.multi_steps(tx, 2), "MultiStepsState, made without the delay"),
    ):
        wrong = optax.GradientTransformation(made.init, optax_ext.delayed(tx).update)
        refused(message, run, wrong, np.zeros((1, 2, 60), np.float32), error=TypeError)


@pytest.mark.parametrize("mean", [True, False])
def test_sums_that_16_bits_can_not_hold_are_handed_over_later(mean):
    """A sum of two gradients of 40,000 is too large, and a fourth of the smallest too small."""
    tx = optax_ext.multi_steps(
        optax_ext.topk_a(1.0, axis="w"), lambda n: 2 + n % 2 * 2, use_grad_mean=mean
    )
    given = np.zeros((30, 2, 3), np.float16)
    given[:3, :, 0] = 4e4
    given[0, :, 1] = np.finfo(np.float16).smallest_subnormal
    given[2, :, 2] = 1e4 + 8
    found = run(tx, {"a": given})
    updates = found.updates["a"][:, 0].astype(np.float64)
    sizes = np.array([2, 4] * 5)
    counts = np.zeros(30)
    counts[np.cumsum(sizes) - 1] = sizes if mean else 1
    wanted = given[:, 0].astype(np.float64).sum(0)
    kept = found.states.acc_grads["a"][-1, 0, 0]
    np.testing.assert_allclose((counts[:, None] * updates).sum(0) + kept, wanted, rtol=1e-6)
    assert np.isfinite(updates).all()
    assert found.last.skipped.tolist() == [0, 0]
    if not mean:
        assert updates.max() == np.finfo(np.float16).max


@pytest.mark.parametrize("every", [1, slow(2)])
def test_what_16_bits_can_not_hold_of_a_sum_is_skipped_with_it(every):
    """All workers skip it, or in rounds the one that leaves out its step."""
    tx = optax_ext.multi_steps(
        optax_ext.topk_a(1.0, axis="w", every=every, local=optax.identity()),
        2,
        use_grad_mean=False,
    )
    given = np.ones((8, 2, 3), jnp.bfloat16)
    # 257 has too many digits, and the rest of 1e33 would be 1e30.
    given[0, :, 0], given[0, 0, 1], given[0, 0, 2] = 256, 1e33, np.nan
    bad, good = run(tx, {"a": given}), run(tx, {"a": given[2:]})
    left = np.asarray(bad.states.acc_grads["a"], np.float32)
    worker = np.array([0.0, 0.0]) if every == 1 else np.array([0.0, 1.0])
    np.testing.assert_array_equal(left[1, ..., 0].ravel(), worker)
    assert not left[1, 0].any()
    if every == 1:
        np.testing.assert_array_equal(bad.updates["a"][2:], good.updates["a"])
        assert bad.states.gradient_step[-1].tolist() == [3, 3]
        np.testing.assert_array_equal(bad.states.acc_grads["a"][2:], good.states.acc_grads["a"])
