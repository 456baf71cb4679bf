"""The dense mean: by leaf, and in buckets that the backward pass can overlap with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._step._dense import DenseState
from tests.optax_ext.helpers import mesh, same
from tests.sparse_collectives import helpers

WIDTHS = (8, 6, 7, 5, 3)
SHAPES = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))


def loss(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return jnp.mean(x**2)


def problem():
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES]
    return params, jnp.asarray(rng.standard_normal((4, 2, WIDTHS[0])), jnp.float32)


def mean_gradient(tx):
    def step(params, x):
        return tx.update(jax.grad(loss)(params, x), tx.init(params))[0]

    return step


@pytest.mark.parametrize("buckets", [None, 1, 2, 100])
def test_buckets_give_the_bits_of_one_allreduce_for_each_leaf(buckets):
    params, x = problem()
    means = [
        sc.simulate(mean_gradient(tx), axis="w", axis_size=4, in_axes=(None, 0))(params, x)
        for tx in (optax_ext.dense(axis="w", buckets=buckets), optax_ext.dense(axis="w"))
    ]
    same(*means)


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        (None, [[3], [2], [1], [0]]),
        (1, [[3, 2, 1, 0]]),
        (2, [[3, 2], [1, 0]]),
        (4, [[3, 2], [1], [0]]),
    ],
)
def test_a_bucket_waits_for_its_own_leaves_only(buckets, expected):
    """The last layers first; their exchange needs no gradient of an earlier layer."""
    params, _ = problem()
    tx = optax_ext.dense(axis="w", buckets=buckets)
    jaxpr = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g))[0], axis_env=[("w", 4)])(params).jaxpr
    sums = helpers.independent_psums(jaxpr)
    sizes = [sum(params[i].size for i in bucket) for bucket in expected]
    assert [variable.aval.size for variable in sums] == sizes


def test_leaves_of_different_dtypes_are_not_joined():
    params = [jnp.ones(4, jnp.bfloat16), jnp.ones(4), jnp.ones(4)]
    tx = optax_ext.dense(axis="w", buckets=1)
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2, in_axes=None)
    assert [leaf.dtype for leaf in step(params)] == [leaf.dtype for leaf in params]


@pytest.mark.parametrize("buckets", [0, 2.0])
def test_a_number_of_buckets(buckets):
    with pytest.raises(ValueError, match="buckets must be an integer of at least 1"):
        optax_ext.dense(axis="w", buckets=buckets)


@pytest.mark.slow
def test_get_info_of_a_chain_has_words_and_counts():
    params = [jnp.ones((3, 4)), jnp.ones(5, jnp.bfloat16)]
    on = mesh(4, "w")
    tx = optax.chain(optax.clip(10.0), optax_ext.dense(axis="w"), optax.adam(1e-3))
    state = optax_ext.init_state(tx, params, on)
    before = optax_ext.get_info(state)
    assert before is not None
    assert (int(before.words), int(before.delivered)) == (0, 0)

    def loss(params, x):
        return jnp.mean(x) * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in params)

    step = optax_ext.make_train_step(loss, tx, on, donate=False)
    for _ in range(3):
        params, state, _ = step(params, state, jnp.ones(4))
    info = optax_ext.get_info(state)
    assert info is not None
    # 12 entries of a word, and 5 of half a word.
    assert float(info.words) == 2 * (12 + 2.5) * 3 / 4
    assert np.asarray(info.useful).tolist() == [float(info.words)]
    for count in (info.delivered, info.selected, info.arrived):
        assert np.asarray(count).ravel().tolist() == [17]
    assert not np.asarray(info.overflow).any()
    assert isinstance(state[1], DenseState)
    assert (int(state[1].count), state[1].axis) == (3, "w")
    # A sparse one beside it: both are added up.
    labels = ["sparse", "dense"]
    both = optax.multi_transform(
        {"sparse": optax_ext.topk_a(0.5, axis="w"), "dense": optax_ext.dense(axis="w")}, labels
    )
    state = optax_ext.init_state(both, params, on)
    _, state, _ = optax_ext.make_train_step(loss, both, on)(params, state, jnp.ones(4))
    info = optax_ext.get_info(state)
    assert info is not None
    assert int(info.delivered) == 6 + 5
    assert np.asarray(info.selected).tolist() == [6 + 5] * 4
