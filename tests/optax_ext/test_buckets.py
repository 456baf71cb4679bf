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


@pytest.mark.slow
def test_each_bucket_is_a_buffer_of_its_own_the_last_leaves_first():
    tx, given = optax_ext.topk_a(0.1, axis="w"), gradients()
    given["b"][2, 1, 7] = np.nan
    found = run(optax_ext.bucketed(tx, 3), given)
    # Of which one with a gradient that is not finite is skipped alone.
    assert [bucket.skipped[-1].max() for bucket in found.states.buckets] == [0, 1, 0]
    for names, bucket in zip(("cd", "b", "a"), found.states.buckets, strict=True):
        alone = run(tx, {name: given[name] for name in names})
        same({name: found.updates[name] for name in names}, alone.updates)
        np.testing.assert_array_equal(bucket.residual, alone.state.residual)
        np.testing.assert_array_equal(bucket.info.selected, alone.state.info.selected)


@pytest.mark.slow
def test_one_bucket_is_no_bucket():
    for tx in (optax_ext.topk_a(0.1, axis="w"), optax_ext.dense(axis="w")):
        plain, bucketed = (run(x, gradients()).updates for x in (tx, optax_ext.bucketed(tx, 1)))
        same(bucketed, plain)


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


def waits(tx, layers=6, width=32):
    """How many products of the backward pass each exchange needs, and how many there are."""
    on = mesh(4, "w")
    params = [jnp.full((width, width), 0.01)] * layers

    def loss(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    tx = optax.chain(tx, optax.sgd(0.1))
    step = optax_ext.make_train_step(loss, tx, on)
    lowered = step.lower(params, optax_ext.init_state(tx, params, on), jnp.ones((8, width)))
    text = lowered.compile().as_text()
    assert "is_scheduled=true" in text
    # Of each instruction all that it needs, the operands of its operands too.
    needs, exchanges, backward = {}, [], set()
    for line in text[text.index("\nENTRY") :].split("\n}")[0].splitlines()[2:]:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        operands = set(re.findall(r"%[\w.\-]+", rest)) & needs.keys()
        needs[name] = operands.union(*(needs[operand] for operand in operands))
        # The all-reduce of the loss is none of the exchange.
        if re.search(r"\ball-gather(-start)?\(", line) and re.search(r"topk|cond|psum", line):
            exchanges.append(name)
        if re.search(r"transpose.*dot_general", line):
            backward.add(name)
    return [len(backward & needs[name]) for name in exchanges], len(backward)


@pytest.mark.slow
@pytest.mark.parametrize("alias", [optax_ext.topk_a, optax_ext.ok_topk])
def test_the_exchange_of_a_bucket_needs_only_the_backward_pass_of_its_layers(alias):
    """So XLA can overlap it with the rest; in one buffer everything waits for everything."""
    counts, whole = waits(alias(0.1, axis="w"))
    assert whole >= 5
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
