"""Rounds in every kind of mapped function, over workers of several devices, and in a step."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import shards
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    flat,
    loss_fn,
    mesh,
    normal,
    on_mesh,
    same,
    slow,
    train,
)

WORKERS, SIZE, EVERY = 3, 40, 3


def test_steps_of_a_round_return_the_mean_over_the_workers_of_a_process():
    given, options = batch_of(), {"density": 0.1, "axis": "data"}
    step, rounds = (
        train(optax_ext.sparse_sgd(0.1, every=h, **options), loss_fn, PARAMS, [given], mesh())[-1][
            2
        ]
        for h in (1, 2)
    )
    assert step.shape == rounds.shape == ()
    expected = [loss_fn(PARAMS, rows) for rows in given.reshape(4, 4, 6)]
    np.testing.assert_allclose(rounds, np.mean(expected), rtol=1e-6)
    np.testing.assert_allclose(rounds, step, rtol=1e-6)

    def with_aux(params, batch):
        return loss_fn(params, batch), {"first": batch[0, 0]}

    tx = optax_ext.sparse_sgd(0.1, every=2, **options)
    state = optax_ext.init_state(tx, PARAMS, mesh())
    aux = optax_ext.make_train_step(with_aux, tx, mesh(), has_aux=True)(PARAMS, state, given)[3]
    assert float(aux["first"]) == pytest.approx(float(given[::4, 0].mean()))


@pytest.mark.parametrize("loop", ["shard_map", slow("pmap"), slow("check_vma=False")])
def test_rounds_have_the_same_bits_in_every_mapped_function(loop):
    given = normal((WORKERS, 7, SIZE))
    given[1, 3, 5] = np.nan
    tx = optax_ext.sparse_adamw(0.1, density=0.1, axis="w", every=EVERY, weight_decay=0.0)

    def all_steps(given):
        start = tx.init(np.zeros(SIZE, np.float32))
        state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], start, given)
        return updates, state.residual, state.missed

    expected = sc.simulate(all_steps, axis="w", axis_size=WORKERS)(given)
    if loop == "pmap":
        found = jax.pmap(all_steps, axis_name="w", devices=jax.devices()[:WORKERS])(given)
    else:
        found = on_mesh(
            lambda given: all_steps(given[0]),
            mesh(WORKERS, "w"),
            P("w"),
            (P(), P("w"), P("w")),
            loop == "shard_map",
        )(given)
        found = found[0][None], *(x[:, None] for x in found[1:])
        assert (expected[0] == expected[0][:1]).all()
        expected = expected[0][:1], *expected[1:]
    same(found, expected)
    assert expected[2].ravel().tolist() == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("manual", [True, False])
def test_sharded_parameters_have_the_bits_of_their_parts(manual):
    """The devices of a worker leave out a step together; the workers do not agree on it."""
    on = mesh((2, 4), ("data", "model"))
    given = shards.gradients_of(2, steps=5)
    given["columns"][1, 1, 2, 3] = np.nan
    tx = optax_ext.topk_a(0.1, axis="data", every=2, local=optax.scale(-1.0))
    updates, state = shards.run(tx, on, given, manual=manual)
    assert state.missed.tolist() == [0, 1]
    for leaf in given.values():
        leaf[1, 1] = 0.0
    expected, other = shards.run(tx, on, given, manual=manual)
    same(updates, expected)
    np.testing.assert_array_equal(state.residual, other.residual)
    shards.same_on_devices(state)
    waiting, _ = optax_ext.consolidate(jax.tree.map(lambda g: g[0, 0], given), state)
    total = 2 * (flat(waiting) + sum(map(flat, updates)))
    np.testing.assert_allclose(total, -flat(given, (5, 2)).sum((0, 1)), atol=4e-5)


@pytest.mark.slow
def test_rounds_train_with_fsdp_inside_of_a_site():
    on = mesh((2, 2), ("data", "model"))
    specs = {"w": P(None, "model"), "b": P("model")}
    tx = optax_ext.sparse_adamw(0.03, density=0.2, axis="data", every=4)
    params = shards.placed(PARAMS, on, specs)
    found = train(tx, loss_fn, params, [batch_of()] * 40, on)
    losses = [float(loss.mean()) for _, _, loss in found[1:]]
    assert losses[-1] < 0.5 * losses[0]
    assert found[-1][0]["w"].sharding.spec == specs["w"]
    shards.same_on_devices(found[-1][:2])
