"""Other workers in the middle of a round: the mean movement, the parameters and the loss stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._error_feedback._roles import Role
from optax_ext._state import _index
from tests.optax_ext.helpers import mesh, normal, same, slow

PARAMS = {"a": np.zeros((6, 5), np.float32), "b": np.zeros(7, np.float32)}
INNER, NUMBERS = optax.adam(3e-2), range(1, 9)
OPTIMIZERS = {
    "every": lambda: optax_ext.sparse_adamw(3e-2, axis="w", density=0.5, every=40),
    "every, bfloat16": lambda: optax_ext.sparse_sgd(
        0.1, axis="w", every=40, residual=optax_ext.residual(jnp.bfloat16, step_ahead=float("inf"))
    ),
    "diloco": lambda: optax_ext.published.diloco(INNER, axis="w", every=40),
    "streaming": lambda: optax_ext.published.streaming_diloco(
        INNER, axis="w", every=40, fragments=2, delay=2
    ),
    "sparse_loco": lambda: optax_ext.published.sparse_loco(INNER, density=0.1, axis="w", every=40),
    "local_steps": lambda: optax_ext.local_steps(
        INNER, optax_ext.sparse_sgd(1.0, density=0.1, axis="w"), every=40
    ),
    "in a group": lambda: optax.partition(
        {
            "rounds": optax_ext.published.diloco(INNER, axis="w", every=40),
            "frozen": optax.set_to_zero(),
        },
        {"a": "rounds", "b": "frozen"},
    ),
}


def state_of(name, workers):
    return optax_ext.init_state(OPTIMIZERS[name](), PARAMS, {"w": workers})


def own(state):
    """The arrays of which each worker has its own, ``f32[P, m]``, and the others."""
    leaves, structure = jax.tree.flatten(state)
    index = _index.index_of(structure)
    pairs = list(zip(index.leaves, leaves, strict=True))
    sums = [
        np.asarray(x, np.float64).reshape(len(x), -1)
        for known, x in pairs
        if known.role in (Role.SUMMED, Role.MOVED) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    counts = [
        int(np.sum(x))
        for known, x in pairs
        if known.role is Role.SUMMED and jnp.issubdtype(x.dtype, jnp.integer)
    ]
    return sums, counts, [np.asarray(x) for known, x in pairs if known.role is Role.SHARED]


def filled(state):
    """The state with numbers of its own for each worker, as in the middle of a round."""
    leaves, structure = jax.tree.flatten(state)
    known = _index.index_of(structure).leaves

    def fill(i, leaf):
        if known[i].role in (Role.SUMMED, Role.MOVED):
            return jnp.asarray(5 * normal(leaf.shape, i)).astype(leaf.dtype)
        return jnp.full_like(leaf, 3) if known[i].role is Role.SHARED else leaf

    return structure.unflatten([fill(i, leaf) for i, leaf in enumerate(leaves)])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [3, *map(slow, (1, 2, 4, 5, 6, 7, 8))])
def test_the_mean_stays_and_every_worker_goes_on_from_it(name, before):
    state = filled(state_of(name, before))
    old, counts, shared = own(state)
    assert old
    rounding = 2.0**-8 if "bfloat16" in name else 2.0**-23
    for after in NUMBERS:
        moved = optax_ext.reshard(state, state_of(name, after))
        new, new_counts, still = own(moved)
        same(still, shared)
        assert new_counts == counts
        for rows, expected in zip(new, old, strict=True):
            assert len(rows) == after
            if after == before:
                np.testing.assert_array_equal(rows, expected)
                continue
            mean, scale = expected.mean(0), np.abs(expected).max(0)
            # One rounding of the row that takes what the others have left.
            assert (np.abs(rows.mean(0) - mean) <= rounding * np.abs(mean) / after + 1e-12).all()
            assert (np.abs(rows - mean) <= 2 * after * rounding * scale).all()


def test_between_exchanges_of_gradients_the_sum_stays():
    tx = optax_ext.multi_steps(optax.chain(optax_ext.dense(axis="w"), optax.sgd(0.1)), 4)
    old, new = (optax_ext.init_state(tx, PARAMS, {"w": n}) for n in (4, 2))
    (rows, *_), *_ = own(filled(old))
    (got, *_), *_ = own(optax_ext.reshard(filled(old), new))
    np.testing.assert_allclose(got.sum(0), rows.sum(0), rtol=1e-6)


def test_a_group_of_gradients_beside_rounds_keeps_its_sum():
    groups = {"r": OPTIMIZERS["every"](), "g": optax_ext.sparse_sgd(0.1, axis="w")}
    tx = optax.partition(groups, {"a": "r", "b": "g"})
    old, new = (optax_ext.init_state(tx, PARAMS, {"w": n}) for n in (4, 2))
    moved = optax_ext.reshard(filled(old), new).inner_states
    for name, total in (("r", np.mean), ("g", np.sum)):
        rows = [
            optax_ext.get_state(state[name]).residual for state in (filled(old).inner_states, moved)
        ]
        np.testing.assert_allclose(*(total(x, axis=0) for x in rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "around", [lambda tx: optax_ext.multi_steps(tx, 2), optax_ext.delayed], ids=["multi", "delayed"]
)
def test_accumulators_around_rounds_keep_the_mean_and_others_the_sum(around):
    groups = {"r": OPTIMIZERS["every"](), "g": optax_ext.sparse_sgd(0.1, axis="w")}
    mixed = optax.partition(groups, {"a": "r", "b": "g"})
    for tx, kept in (
        (OPTIMIZERS["diloco"](), {"a": np.mean, "b": np.mean}),
        (OPTIMIZERS["every"](), {"a": np.mean, "b": np.mean}),
        (mixed, {"a": np.mean, "b": np.sum}),
        (groups["g"], {"a": np.sum, "b": np.sum}),
    ):
        for before, after in ((8, 1), (2, 8), (8, 3)):
            states = [optax_ext.init_state(around(tx), PARAMS, {"w": n}) for n in (before, after)]
            old = filled(states[0])
            new = optax_ext.reshard(old, states[1])
            for name, total in kept.items():
                pair = [total(x.acc_grads[name], axis=0) for x in (new, old)]
                np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["diloco", "local_steps", "multi_steps", "MultiSteps"])
def test_movements_and_accumulators_of_other_parameters_are_refused(name):
    tx = OPTIMIZERS["every"]() if "ulti" in name else OPTIMIZERS[name]()
    if name == "multi_steps":
        tx = optax_ext.multi_steps(tx, 2)
    elif name == "MultiSteps":
        tx = optax.MultiSteps(tx, 2).gradient_transformation()
    old = optax_ext.init_state(tx, PARAMS, {"w": 2})
    for shape in ((5, 6), (6, 4)):
        new = optax_ext.init_state(tx, {**PARAMS, "a": np.zeros(shape, np.float32)}, {"w": 3})
        with pytest.raises(ValueError, match=r"has shape \(6, 5\)"):
            optax_ext.reshard(old, new)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - x[:, :4]) ** 2)


@pytest.mark.parametrize("name", ["every", slow("diloco"), slow("sparse_loco"), slow("streaming")])
@pytest.mark.slow
def test_the_loss_stays_where_it_was(name):
    tx = OPTIMIZERS[name]()
    for before, after in ((8, 4), (8, 1), (2, 8)):
        params = {"w": np.full((16, 4), 0.01, np.float32), "b": np.zeros(4, np.float32)}
        on, losses = mesh(before, "w"), []
        state = optax_ext.init_state(tx, params, on)
        step = optax_ext.make_train_step(loss_fn, tx, on)
        for i in range(32):
            if i == 30:
                on, params = mesh(after, "w"), jax.device_get(params)
                fresh = optax_ext.init_state(tx, params, on)
                state = optax_ext.reshard(jax.device_get(state), fresh)
                step = optax_ext.make_train_step(loss_fn, tx, on)
            params, state, loss = step(params, state, normal((48, 16), i))
            losses.append(float(np.mean(loss)))
        assert losses[29] < 0.5 * losses[0]
        assert max(losses[30:]) < 1.3 * losses[29]


@pytest.mark.parametrize(
    "mask", [{"a": True, "c": False}, {"a": {"w": True, "b": False}, "c": False}]
)
def test_accumulators_of_masked_subtrees_are_in_rounds_where_their_exchange_is(mask):
    params = {
        "a": {"w": jnp.zeros(4), "b": jnp.zeros(2)},
        "c": {"w": jnp.zeros(3), "b": jnp.zeros(1)},
    }
    rounds = optax_ext.sparse_sgd(0.1, density=0.5, axis="data", every=2)
    steps = optax.chain(optax_ext.topk_a(0.5, axis="data"), optax.sgd(0.1))
    others = jax.tree.map(lambda x: not x, mask)
    tx = optax_ext.multi_steps(
        optax.chain(optax.masked(rounds, mask), optax.masked(steps, others)), 2
    )
    state = optax_ext.init_state(tx, params, {"data": 2})
    acc_grads = jax.tree.map(jnp.ones_like, state.acc_grads)
    fresh = optax_ext.init_state(tx, params, {"data": 1})
    moved = optax_ext.reshard(state._replace(acc_grads=acc_grads), fresh).acc_grads
    in_rounds = {"a": jax.tree.map(lambda _: mask["a"], params["a"]), "c": {"w": False, "b": False}}
    if isinstance(mask["a"], dict):
        in_rounds["a"] = mask["a"]
    # The mean in rounds, and the sum elsewhere.
    expected = jax.tree.map(lambda x, mean: jnp.full_like(x, 1 if mean else 2), moved, in_rounds)
    same(moved, expected)
