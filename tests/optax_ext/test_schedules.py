"""Steps that are dense, and densities that change: in the same program, by a schedule.

test_contract.py checks that nothing is lost meanwhile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import select, traffic
from sparse_collectives.select import exponential_density, staged_density, strict_density
from tests.optax_ext.helpers import fails_in_the_step, mapped, mesh, normal, refused, run

WORKERS, SIZE, STEPS = 3, 40, 6
GIVEN = normal((STEPS, WORKERS, SIZE))


def topk_a(density, schedule, **options):
    selector = select.scheduled(select.topk(density=density), schedule)
    return optax_ext.topk_a(density, axis="w", selector=selector, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk_a", "ok_topk", "hitopk"])
def test_dense_steps_are_the_mean_and_keep_nothing(kind):
    """Dense steps at the end, as in MSTopK's run for DAWNBench, also deliver the residual."""
    given, axis = GIVEN, "w"
    make = getattr(optax_ext, kind, None)
    if kind == "hitopk":
        given, axis = GIVEN[:, :2, None].repeat(2, 2), ("n", "d")
        make = functools.partial(optax_ext.published.hitopk, inner_axis="d")
    found, last = (
        run(make(0.1, axis=axis, dense_steps=dense), given, axis)
        for dense in (3, lambda step: step >= 3)
    )
    assert (last.residuals[:3] != 0).any()
    assert (last.residuals[3:] == 0).all()
    assert (last.state.info.delivered[3:] == SIZE).all()
    mean = given[:3].reshape(3, -1, SIZE).mean(1, keepdims=True)
    updates = found.updates[:3].reshape(3, -1, SIZE)
    np.testing.assert_allclose(updates - mean, 0 * updates, atol=2e-6)
    info, count = found.state.info, given[0, ..., 0].size
    assert (found.residuals[:3] == 0).all()
    assert (found.residuals[3:] != 0).any()
    assert (info.delivered[:3] == SIZE).all()
    if axis == "w":
        np.testing.assert_allclose(info.words[:3], 2 * SIZE * (count - 1) / count)
        assert (info.selected[3:] == 4).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_dense_steps_of_one_worker(check_vma):
    tx = optax_ext.published.gtopk(density=0.1, axis="w", dense_steps=2)
    on, gradient = mesh(1, "w"), GIVEN[0, :1]
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), on)
    step = mapped(tx, on, state, check_vma=check_vma)
    for i in range(3):
        updates, state = step(gradient, state)
        assert np.count_nonzero(updates) == (SIZE if i < 2 else 4)
    np.testing.assert_array_equal(np.asarray(state.residual[0] + updates), gradient[0])


@pytest.mark.slow
def test_dense_steps_traffic():
    """Both branches are in the program: by default the meter takes the dense one, as the worst."""
    workers, dense_steps, steps = 8, 10, 1000

    def words(name="step", given=(), **options):
        # Without the word that agrees on skipping, n is 40 and k is 4.
        tx = optax_ext.topk_a(0.1, axis="w", nonfinite="propagate", **dict(given))

        def step(gradient):
            with jax.named_scope(name):
                return tx.update(gradient, tx.init(gradient))[0]

        how = {"axis": "w", "axis_size": workers, **options}
        like = jax.ShapeDtypeStruct((SIZE,), "float32")
        # A state compares the parameters of the workers when it is made.
        at_init = traffic.of_function(tx.init, like, axis="w", axis_size=workers).words
        return traffic.of_function(step, like, **how).words - at_init

    both = {"dense_steps": dense_steps}
    sparse, dense = words(), 2 * SIZE * (workers - 1) / workers
    assert sparse == 2 * 4 * (workers - 1)
    assert words(given=both) == dense
    assert words(given=both, conditional="best") == sparse
    # The name of a scope around the update gives the shares of sparse and dense steps.
    share = dense_steps / steps
    mean = words("warmup", both, frequencies={"warmup": (1 - share, share)})
    np.testing.assert_allclose(mean, (1 - share) * sparse + share * dense)


@pytest.mark.slow
@pytest.mark.parametrize("bad_step", [None, 3])
def test_scheduled_density_is_that_of_the_schedule_and_only_counts_selections(bad_step):
    """The schedule begins after the dense steps, and goes on after a skipped one."""
    given, counts = GIVEN.copy(), [0, 0, 20, 8, 2, 2]
    if bad_step is not None:
        given[bad_step, 1, 7] = np.nan
        counts = [0, 0, 20, 20, 8, 2]
    found = run(topk_a(0.5, staged_density(1, (0.5, 0.2, 0.05)), dense_steps=2), given)
    steps = [step for step in range(2, STEPS) if step != bad_step]
    for worker in range(WORKERS):
        selected = found.state.info.selected[steps, worker, 0].tolist()
        assert selected == [counts[step] for step in steps]
    assert found.last.selector.count.tolist() == [[len(steps)]] * WORKERS
    assert (found.last.selector.clipped == 0).all()


@pytest.mark.slow
def test_schedule_out_of_range_is_clipped_and_a_strict_one_in_range_is_the_same():
    tx = topk_a(0.1, lambda count: jnp.array([0.9, 0.1, 0.05, jnp.nan, -1.0, 0.1])[count])
    found = run(tx, GIVEN)
    assert found.state.info.selected[:, 0, 0].tolist() == [4, 4, 2, 1, 1, 4]
    assert found.last.selector.clipped.tolist() == [[3]] * WORKERS
    # All workers count the same, so it is counted once.
    assert float(optax_ext.metrics(found.last)["clipped"]) == 3

    def falling(count):
        return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))

    plain, strict = (run(topk_a(0.1, s), GIVEN) for s in (falling, strict_density(falling, 0.1)))
    jax.effects_barrier()
    np.testing.assert_array_equal(plain.updates, strict.updates)
    assert not strict.last.selector.clipped.any()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0.5, -1.0, np.nan])
def test_strict_schedule_out_of_range_raises_in_the_step_that_has_it(bad):
    values, on = jnp.array([0.1, 0.05, bad, 0.1]), mesh(4, "w")
    tx = topk_a(0.1, strict_density(lambda count: values[count], 0.1))
    state = optax_ext.init_state(tx, jnp.zeros(20), on)
    step, gradient = mapped(tx, on, state), normal((4, 20))
    for _ in range(2):
        _, state = step(gradient, state)
    jax.effects_barrier()
    assert np.asarray(state.info.selected).tolist() == [1] * 4
    fails_in_the_step(lambda: step(gradient, state), r"step 2: schedule is .* out of \(0, 0\.1\]")


RISING, STAGED = exponential_density(0.01, 0.2, 10), staged_density(5, (0.25, 0.1))
CONSTANT = strict_density(lambda count: 0.5, 0.1)
WRONG = [
    (lambda: run(topk_a(0.1, lambda t: 0.5), GIVEN), r"schedule is 0.5.*4 slots"),
    (lambda: topk_a(0.1, 1.5), r"density must be in \(0, 1\]"),
    (lambda: staged_density(5, ()), "densities is empty"),
    (lambda: strict_density(STAGED, 0.1), r"reaches 0.25, above maximum=0.1\. Give the selector"),
    (lambda: strict_density(RISING, 0.1), "reaches 0.2, above maximum=0.1"),
    (lambda: strict_density(0.1, 0.1), r"schedule must be a function.*got 0\.1"),
    (lambda: strict_density(RISING, 2), r"density must be in \(0, 1\], got 2"),
    (lambda: CONSTANT(jnp.int32(0)), r"schedule reaches 0\.5, above maximum=0\.1"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_schedule_known_to_be_out_of_range_is_an_error_at_once(call, message):
    refused(message, call, error=(TypeError, ValueError))


def test_schedules_that_are_there():
    dgc, falling = staged_density(5), exponential_density(0.4, 0.1, 2)
    assert np.allclose([dgc(t) for t in (0, 5, 10, 15, 99)], [0.25, 0.0625, 0.015625, 0.004, 0.001])
    assert np.allclose([falling(t) for t in range(4)], [0.4, 0.2, 0.1, 0.1])
    for schedule in (STAGED, RISING):
        # It is checked already, so a step has nothing left to check.
        assert strict_density(schedule, 0.25) is schedule


def test_schedule_is_named_in_a_checkpoint():
    def metadata(schedule):
        state = optax_ext.init_state(topk_a(0.5, schedule), jnp.zeros(40), {"w": 2})
        return optax_ext.checkpoint_metadata(state)["sparse"][""]["selector"]

    staged = metadata(staged_density(2, (0.5, 0.1)))
    assert "staged_density(densities=(0.5, 0.1), steps_per_stage=2)" in staged
    assert "topk(density=0.5)" in staged
    assert metadata(staged_density(3, (0.5, 0.1))) != staged
    assert metadata(0.25) != metadata(0.5)
    # The code of a function is not the same text in every program.
    assert metadata(lambda count: 0.1) == metadata(lambda count: 0.2)


@pytest.mark.slow
def test_selectors_by_layer_get_the_layout_of_the_parameters():
    """One layer has far larger gradients than the others: a global top-k leaves these out."""
    shapes = {"b": (9,), "e": (12, 6), "k": (20, 9)}
    given = {name: normal((1, 2, *s)) * (1000 if name == "e" else 1) for name, s in shapes.items()}

    def updates(selector):
        tx = optax_ext.sparse_allreduce(selector, sc.allreduce.dense(), axis="w")
        found = run(tx, given).updates
        return {name: leaf[0, 0] for name, leaf in found.items() if leaf[0, 0].any()}

    topk = select.topk(density=0.1)
    assert set(updates(topk)) == {"e"}
    assert set(updates(select.layerwise(topk))) == set(given)
    # Every row of the parameters has an update.
    for leaf in updates(select.published.adtopk(density=0.1)).values():
        assert (leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1) != 0).any(axis=0).all()
