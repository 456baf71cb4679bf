"""All entries in few bits: against NumPy, their words and units, and optimizers after them.

test_contract.py checks that nothing is lost, all agree, a skipped step changes nothing and a step
lowers for GPUs; tests/fuzz does so with any policy, decay, precision of the residual and wrapper.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import extend, traffic
from tests.optax_ext.helpers import flat, mesh, normal, refused, run, slow, slow_but, train
from tests.reference import quantized as reference

PAIRS = [(2, 4), *(slow(pair) for pair in ((1, 3), (3, 5), (8, 8)))]


@pytest.mark.parametrize("bits", [(2, 4), slow((1, 3))])
def test_a_step_is_what_the_docstring_says(bits):
    workers, size, steps = 3, 700, 5
    # Entries of unlike sizes, which have units of their own.
    given = {"w": normal((steps, workers, size)) * np.geomspace(1, 1e-3, size, dtype=np.float32)}
    found = run(optax_ext.quantized(bits, axis="w"), given)
    square, kept = np.zeros(size), np.zeros((workers, size))
    for step in range(steps):
        acc = kept + given["w"][step]
        update, _, square = reference.step(acc, square, step, bits)
        got = np.asarray(found.updates["w"][step, 0], np.float64)
        # A value between two codes may take the other one; most take the same.
        same = np.isclose(got, update, rtol=2e-2)
        assert same.mean() > 0.97, step
        # From here on with the numbers that were found, since such an entry goes on.
        kept = np.asarray(found.residuals[step], np.float64)
        square = np.asarray(found.state.allreduce.mean_square[step, 0, 0], np.float64)


@pytest.mark.parametrize("bits", PAIRS)
@pytest.mark.parametrize(("size", "workers"), [(1000, 4), (9, 8), slow(70_000, 8), slow(1000, 64)])
def test_residuals_stay_small_and_the_mean_arrives(bits, size, workers):
    steps = 60
    steady = normal((1, 1, size))
    given = {"w": steady + normal((steps, workers, size), 1)}
    found = run(optax_ext.quantized(bits, axis="w"), given)
    updates = np.asarray(found.updates["w"], np.float64)
    assert (updates == updates[:, :1]).all()
    arrived = updates[:, 0].sum(0) + found.residuals[-1].astype(np.float64).mean(0)
    np.testing.assert_allclose(arrived, given["w"].astype(np.float64).mean(1).sum(0), atol=1e-3)
    # Nothing waits longer for more steps.
    largest = np.abs(found.residuals).max((1, 2))
    assert largest[-20:].max() < 1.5 * largest[20:40].max() + 1


@pytest.mark.parametrize("first", [0, 20])
def test_a_large_entry_drains_and_its_neighbors_go_on(first):
    """In the first step, when no entry has a unit, or later."""
    workers, size, steps = 4, 600, 60
    given = np.ones((steps, workers, size), np.float32)
    given[first, 1, 100] = 1e6
    found = run(optax_ext.quantized((1, 3), axis="w"), {"w": given})
    updates = np.asarray(found.updates["w"][:, 0], np.float64).sum(0)
    assert updates[100] * workers > 0.9e6
    others = np.delete(updates, 100)
    np.testing.assert_allclose(others, steps, atol=8)


def test_a_spike_does_not_spoil_the_unit_of_its_entry():
    """With a unit of the spike, codes of all later gradients would be noise of its size."""
    given = normal((50, 4, 512))
    given[20, 1, 100] = 1e5
    found = run(optax_ext.quantized(axis="w"), {"w": given})
    updates = np.abs(np.asarray(found.updates["w"][:, 0]))
    assert updates[20:30, 100].max() > 2e4
    assert updates[30:, 100].max() < 3 * updates[30:].max(0).mean()


@pytest.mark.parametrize("size", [0.4, 0.8, 1.6, 3.2])
def test_an_update_counts_for_four_units_of_any_size(size):
    """Also for a unit of 1, as it is before the first update, which counts as it is."""
    given = np.full((21, 4, 512), size, np.float32)
    given[20, :, 100] = 1e5
    found = run(optax_ext.quantized(axis="w"), {"w": given})
    before, after = found.state.allreduce.mean_square[[19, 20], 0, 0]
    # The unit is at most 1.125 times the root.
    assert (after <= before + 16 * 1.125**2 * before / 32).all()
    assert (before > 0.1 * size**2).all()


def test_small_entries_of_a_block_have_units_of_their_own():
    """Without units, a code of 4 bits would round them to 0 for many steps at once."""
    workers, size, steps = 4, 512, 120
    sizes = np.where(np.arange(size) % 2, 1.0, 1e-1).astype(np.float32)
    given = {"w": sizes * (1 + normal((steps, workers, size)))}
    found = run(optax_ext.quantized((2, 4), axis="w"), given)
    error = np.asarray(found.updates["w"][40:, 0]) - given["w"][40:].mean(1)
    root = np.sqrt((error**2).mean(0))
    small, large = root[::2].mean(), root[1::2].mean()
    assert small < 0.25 * large


def test_entries_that_never_moved_have_no_unit_and_arrive():
    steps, size = 4, 300
    given = np.zeros((steps, 3, size), np.float32)
    given[2:, :, 7] = 1e-30
    given[2:, :, 270] = 1e30
    found = run(optax_ext.quantized(axis="w"), {"w": given})
    updates = np.asarray(found.updates["w"][:, 0], np.float64)
    assert np.isfinite(found.residuals).all()
    assert (updates[:2] == 0).all()
    arrived = updates.sum(0) + found.residuals[-1].astype(np.float64).mean(0)
    np.testing.assert_allclose(arrived, given.mean(1).sum(0), rtol=1e-5)


@pytest.mark.parametrize(("size", "workers"), [(5_000, 4), (100_000, 8), (100_000, 64), (3, 4)])
@pytest.mark.parametrize("bits", [(1, 3), (2, 4)])
def test_words_are_a_few_bits_of_each_entry(size, workers, bits):
    tx, params = optax_ext.quantized(bits, axis="w", nonfinite="propagate"), jnp.zeros(size)
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {"w": 1}), params)
    state = state._replace(settings=dataclasses.replace(state.settings, workers=workers))
    measured = traffic.of_function(tx.update, params, state, axis="w", axis_size=workers)
    words = extend.words_of_sum_of_all(size, workers, bits)
    assert measured.words == pytest.approx(words)
    assert len(measured.collectives) == 2
    if size > 256 * 10 * workers:
        each = 32 * words / size * workers / (workers - 1)
        scales = sum(16 / 256 * (1 if x == 1 else 2) for x in bits)
        assert sum(bits) <= each <= 1.01 * (sum(bits) + scales)


@pytest.mark.parametrize("bits", PAIRS)
@pytest.mark.slow
def test_its_bits_do_not_depend_on_what_a_compiler_fuses(bits):
    """Where XLA rounds a product and a sum together differs between programs that hold a step."""
    workers, size = 4, 700
    tx = optax_ext.quantized(bits, axis="w")
    given = normal((3, workers, size)) * np.geomspace(1, 1e-3, size, dtype=np.float32)
    one = sc.simulate(tx.update, axis="w", axis_size=workers)
    states = [sc.simulate(tx.init, axis="w", axis_size=workers)(jnp.zeros((workers, size)))] * 2
    for gradients in given:
        fused = jax.jit(one)(gradients, states[0])
        with jax.disable_jit():
            single = one(gradients, states[1])
        jax.tree.map(np.testing.assert_array_equal, fused, single)
        states = [fused[1], single[1]]


OPTIMIZERS = {
    "adam": optax.adam(0.03),
    "lion": optax.lion(0.01),
    "muon": optax.contrib.muon(0.03),
    "lamb": optax.lamb(0.1),
    "nadam": optax.nadam(0.03),
    "adabelief": optax.adabelief(0.03),
    "adafactor": optax.adafactor(0.3, min_dim_size_to_factor=2),
    "momentum": optax.sgd(0.03, momentum=0.9),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
}


LAYER = {"b": np.zeros(12, np.float32), "w": np.zeros((16, 12), np.float32)}


def loss_fn(params, x):
    y = x @ normal((16, 12), 100) + 1
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


@pytest.mark.parametrize("name", slow_but(["muon", "lion"], OPTIMIZERS))
def test_any_optimizer_trains_as_behind_a_dense_exchange(name):
    batches = [normal((32, 16), seed) for seed in range(80)]
    steps = []
    for exchange in (optax_ext.dense(axis="data"), optax_ext.quantized(axis="data")):
        found = train(optax.chain(exchange, OPTIMIZERS[name]), loss_fn, LAYER, batches, mesh())
        losses = np.array([float(loss) for _, _, loss in found[1:]])
        assert losses[-1] < losses[0] / 3
        steps.append(np.argmax(losses < losses[0] / 3))
    dense, few = steps
    assert few <= 1.25 * dense + 1


def test_it_goes_over_several_axes_and_groups():
    tx = optax.partition(
        {
            "few": optax.chain(optax_ext.quantized(axis=("a", "b")), optax.lion(0.1)),
            "all": optax.chain(optax_ext.dense(axis=("a", "b")), optax.sgd(0.1)),
        },
        {"w": "few", "b": "all"},
    )
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
    on = mesh((2, 2), ("a", "b"))
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(
        lambda p, x: jnp.mean((x @ p["w"] + p["b"][None]) ** 2), tx, on
    )
    batch = jnp.asarray(normal((8, 6)))
    before = jax.tree.map(np.asarray, params)
    params, state, _ = step(params, state, batch)
    assert all((flat({k: params[k]}) != flat({k: before[k]})).any() for k in before)


def test_in_rounds_it_exchanges_the_movement():
    outer = optax.chain(optax_ext.quantized(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.contrib.muon(0.1), outer, every=4)
    batches = [normal((32, 16), seed) for seed in range(40)]
    found = train(tx, loss_fn, LAYER, batches, mesh())
    assert float(found[-1][2]) < 0.3 * float(found[1][2])


@pytest.mark.parametrize("bits", [2, (2,), (0, 3), (1, 2), (9, 9), (1.0, 3), (True, 3), "24", None])
def test_bits_out_of_range_are_refused(bits):
    for make in (
        lambda: optax_ext.quantized(bits, axis="w"),
        lambda: extend.words_of_sum_of_all(100, 4, bits),
        lambda: extend.words_of_sum_of_all(100, 1, bits),
        lambda: sc.simulate(
            lambda x: extend.sum_of_all(x, 0, axis="w", bits=bits), axis="w", axis_size=1
        )(jnp.zeros((1, 8))),
    ):
        refused(r"bits must be a pair: .* Write for example bits=\(2, 4\)", make)


def test_a_sum_that_overflows_stays_with_the_workers():
    most = float(np.finfo(np.float32).max)
    given = np.full((3, 2, 300), 1.0, np.float32)
    given[1, :, 5] = 0.6 * most / 2**25
    found = run(optax_ext.quantized(axis="w"), {"w": given})
    assert np.isfinite(np.asarray(found.updates["w"])).all()
    assert np.isfinite(found.residuals).all()


def test_one_worker_rounds_nothing():
    given = {"w": normal((3, 1, 50))}
    found = run(optax_ext.quantized((1, 3), axis="w"), given)
    np.testing.assert_allclose(found.updates["w"], given["w"], rtol=1e-6)
    assert sc.extend.words_of_sum_of_all(50, 1, (1, 3)) == 0
