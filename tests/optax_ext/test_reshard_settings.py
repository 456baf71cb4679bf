"""Reshard to other settings of an optimizer: what both have in common goes on."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from sparse_collectives import select
from tests.optax_ext.helpers import PARAMS, batch_of, loss_fn, mesh, train

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 50)
STEPS = 7
ADAMW = functools.partial(optax_ext.sparse_adamw, axis="data")
SGD = functools.partial(optax_ext.sparse_sgd, axis="data")
OK_TOPK = functools.partial(optax_ext.ok_topk_sgd, axis="data", density=0.25)
OPTIMIZER = functools.partial(optax_ext.sparse_optimizer, axis="data")
ADAM, YOGI = optax.scale_by_adam(b1=0.0), optax.scale_by_yogi(b1=0.0)


def moved(tx, then, workers=(4, 4)):
    """States of STEPS steps and of none, and the first one as a state of the other optimizer."""
    params, old, _ = train(tx, loss_fn, PARAMS, [batch_of()] * STEPS, mesh(workers[0]))[-1]
    fresh = optax_ext.init_state(then, params, mesh(workers[1]))
    return optax_ext.get_state(old), fresh, optax_ext.reshard(old, fresh)


def of_local(state, name):
    """The arrays of that name in the local state, one row for each worker."""
    paths = jax.tree_util.tree_leaves_with_path(optax_ext.get_state(state).local)
    return [np.asarray(x) for path, x in paths if f".{name}" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize(
    ("tx", "then", "counts"),
    [
        (ADAMW(1e-2), ADAMW(SCHEDULE), 2),
        (ADAMW(SCHEDULE), ADAMW(1e-2), 1),
        (ADAMW(SCHEDULE), ADAMW(SCHEDULE, density=0.5, every=4), 2),
        (ADAMW(SCHEDULE, density=0.5, every=4), ADAMW(SCHEDULE), 2),
        (ADAMW(SCHEDULE), ADAMW(SCHEDULE, residual=optax_ext.residual(jnp.bfloat16)), 2),
        (OPTIMIZER(YOGI, SCHEDULE), OPTIMIZER(ADAM, 1e-2), 1),
        (SGD(0.1), SGD(SCHEDULE), 1),
        (OK_TOPK(0.1), OK_TOPK(SCHEDULE), 1),
        (ADAMW(SCHEDULE), SGD(SCHEDULE), 1),
    ],
)
@pytest.mark.parametrize("workers", [(4, 4), (4, 3)])
@pytest.mark.one_in(2)
def test_counts_and_second_moments_go_on(tx, then, counts, workers):
    old, _, new = moved(tx, then, workers)
    assert [x.tolist() for x in of_local(new, "count")] == [[STEPS] * workers[1]] * counts
    for before, after in zip(of_local(old, "nu"), of_local(new, "nu")):
        np.testing.assert_array_equal(after, before[: workers[1]])


@pytest.mark.parametrize(
    ("tx", "then", "begins"),
    [
        (ADAMW(SCHEDULE), ADAMW(SCHEDULE, moments="factors"), "(count, nu, columns)"),
        (SGD(SCHEDULE), ADAMW(SCHEDULE), "(count, nu)"),
    ],
)
def test_second_moments_that_can_not_go_on_begin_again_with_their_count(tx, then, begins):
    with pytest.warns(UserWarning, match=re.escape(f"kind and shapes: local[0] {begins}.")):
        _, _, new = moved(tx, then)
    adam, schedule = of_local(new, "count")
    assert (adam.tolist(), schedule.tolist()) == ([0] * 4, [STEPS] * 4)
    assert not any(x.any() for x in of_local(new, "nu"))


class Model(NamedTuple):
    """Parameters with names of attributes, as a state has them."""

    w: Any
    b: Any


@pytest.mark.parametrize(
    ("tx", "then"),
    [
        (OPTIMIZER(optax.scale_by_adam(), 1e-2), OPTIMIZER(optax.scale_by_rms(), 1e-2)),
        (SGD(SCHEDULE), OPTIMIZER(optax.scale_by_adam(b1=0.0), 1e-2)),
    ],
)
def test_first_moments_never_become_second_moments(tx, then):
    params = Model(**PARAMS)
    steps = [batch_of()] * STEPS
    loss = lambda params, batch: loss_fn(params._asdict(), batch)  # noqa: E731
    params, old, _ = train(tx, loss, params, steps, mesh())[-1]
    with pytest.warns(UserWarning, match=r"begin again.* local\[0\] \("):
        new = optax_ext.reshard(old, optax_ext.init_state(then, params, mesh()))
    assert not any(x.any() for x in of_local(new, "nu"))
    assert not any(x.any() for x in of_local(new, "count"))


@pytest.mark.parametrize("before", ["topk", "threshold_reuse", "scheduled"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_schedule_of_the_density_goes_on(before, every):
    low = select.exponential_density(0.5, 0.02, 4)
    top = {"topk": select.topk, "threshold_reuse": select.threshold_reuse}.get(before)
    scheduled = select.scheduled(select.topk(0.5), low)
    first = scheduled if top is None else top(0.5)
    old, then = (SGD(0.1, selector=x, density=0.5, every=every) for x in (first, scheduled))
    count = of_selector(moved(old, then, (4, 3))[2])
    assert count.tolist() == [STEPS // every] * 3


def of_selector(state):
    return np.asarray(optax_ext.get_state(state).selector.count)


def test_a_rate_that_is_written_as_a_schedule_changes_no_step():
    before = train(ADAMW(1e-2), loss_fn, PARAMS, [batch_of()] * STEPS, mesh(4))[-1]
    then = ADAMW(optax.constant_schedule(1e-2))
    state = optax_ext.reshard(before[1], optax_ext.init_state(then, before[0], mesh(4)))
    states = (before[1], state)
    ends = [
        train(tx, loss_fn, before[0], [batch_of()] * 3, mesh(4), state=x)[-1]
        for tx, x in zip((ADAMW(1e-2), then), states, strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, ends[0][0], ends[1][0])
