"""Several buffers: the same numbers as one at a time, and programs that can overlap."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._state import _find
from tests.optax_ext.helpers import mesh, normal, run, same

WORKERS, STEPS = 4, 4
PARAMS = {"a": jnp.zeros((6, 20)), "b": jnp.zeros(120), "c": jnp.zeros((30, 4)), "d": jnp.zeros(5)}


def gradients():
    return {key: normal((STEPS, WORKERS, *x.shape), i) for i, (key, x) in enumerate(PARAMS.items())}


def only(names, tree):
    return {name: leaf for name, leaf in tree.items() if name in names}


@pytest.mark.slow
def test_each_bucket_is_a_buffer_of_its_own_the_last_leaves_first():
    tx = optax_ext.topk_a(0.1, axis="w")
    found = run(optax_ext.bucketed(tx, 3), gradients())
    buckets = found.states.buckets
    assert [bucket.layout.size for bucket in buckets] == [125, 120, 120]
    for names, bucket in zip(("cd", "b", "a"), buckets, strict=True):
        alone = run(tx, only(names, gradients()))
        for name, leaf in alone.updates.items():
            np.testing.assert_array_equal(leaf, found.updates[name])
        np.testing.assert_array_equal(bucket.residual, alone.state.residual)
        np.testing.assert_array_equal(bucket.info.selected, alone.state.info.selected)


@pytest.mark.slow
def test_one_bucket_is_no_bucket():
    for tx in (optax_ext.topk_a(0.1, axis="w"), optax_ext.dense(axis="w")):
        plain, bucketed = (run(x, gradients()).updates for x in (tx, optax_ext.bucketed(tx, 1)))
        same(bucketed, plain)


@pytest.mark.slow
def test_a_bucket_with_a_gradient_that_is_not_finite_is_skipped_alone():
    given = gradients()
    given["b"][2, 1, 7] = np.nan
    found = run(optax_ext.bucketed(optax_ext.topk_a(0.1, axis="w"), 3), given)
    skipped = [bucket.skipped[-1].tolist() for bucket in found.states.buckets]
    assert skipped == [[0] * 4, [1] * 4, [0] * 4]
    assert (found.updates["b"][2] == 0).all()
    assert all((found.updates[name][2] != 0).any() for name in "acd")


def test_behind_multi_transform_and_with_consolidate():
    sparse = optax_ext.bucketed(optax_ext.topk_a(0.1, axis="w"), 2)
    labels = {"a": "sparse", "b": "dense", "c": "sparse", "d": "sparse"}
    tx = optax.multi_transform({"sparse": sparse, "dense": optax.identity()}, labels)
    state = optax_ext.init_state(tx, PARAMS, {"w": WORKERS})
    states = _find.get_states(state)
    assert [s.layout.size for s in states] == [125, 120]
    filled = jax.tree.map(
        lambda s: s._replace(residual=jnp.ones_like(s.residual)),
        state,
        is_leaf=lambda s: isinstance(s, optax_ext.SparseAllreduceState),
    )
    gradient, left = optax_ext.consolidate(PARAMS, filled)
    assert float(gradient["a"].mean()) == float(gradient["d"].mean()) == 1.0
    assert float(gradient["b"].mean()) == 0.0
    assert all((np.asarray(s.residual) == 0).all() for s in _find.get_states(left))


def program(tx, layers=6, width=32):
    """The scheduled program of a training step: name, operands and text of each instruction."""
    on = mesh(4, "w")
    params = [jnp.full((width, width), 0.01)] * layers

    def loss(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    tx = optax.chain(tx, optax.sgd(0.1))
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(loss, tx, on)
    text = step.lower(params, state, jnp.ones((8, width))).compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY") :].split("\n}")[0].splitlines()[2:]
    found = []
    for line in entry:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        found.append((name, set(re.findall(r"%[\w.\-]+", rest)) - {name}, line))
    return found


def ancestors(instructions, name):
    operands = {at: needs for at, needs, _ in instructions}
    seen, todo = set(), [name]
    while todo:
        for needed in operands.get(todo.pop(), ()):
            if needed not in seen:
                seen.add(needed)
                todo.append(needed)
    return seen


def collectives_and_backward(instructions):
    exchange = r"\b(all-gather|all-reduce|collective-permute|all-to-all)(-start)?\("
    # The all-reduce of the loss is none of the exchange.
    sent = [
        name
        for name, _, line in instructions
        if re.search(exchange, line) and re.search(r"topk|cond|psum", line)
    ]
    backward = [
        name for name, _, line in instructions if re.search(r"transpose.*dot_general", line)
    ]
    return sent, backward


@pytest.mark.slow
@pytest.mark.parametrize("alias", [optax_ext.topk_a, optax_ext.ok_topk])
def test_the_exchange_of_a_bucket_needs_only_the_backward_pass_of_its_layers(alias):
    """So XLA can overlap it with the rest; in one buffer everything waits for everything."""

    def waits(tx):
        instructions = program(tx)
        sent, backward = collectives_and_backward(instructions)
        assert len(backward) >= 5
        gathers = [at for at in sent if "gather" in at]
        return [len(set(backward) & ancestors(instructions, at)) for at in gathers], len(backward)

    counts, whole = waits(alias(0.1, axis="w"))
    assert set(counts) == {whole}
    counts, whole = waits(optax_ext.bucketed(alias(0.1, axis="w"), 3))
    # In the order of the schedule, a third of the layers after the other.
    assert counts == sorted(counts)
    assert len(set(counts)) == 3
    assert counts[0] <= whole // 3 + 1
    assert counts[-1] == whole


def test_wrong_buckets():
    with pytest.raises(ValueError, match="buckets must be an integer of at least 1, got 0"):
        optax_ext.bucketed(optax_ext.dense(axis="w"), 0)
