"""Faults that show only when a program runs: found by an error, or by a count in the state."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from sparse_collectives import traffic
from sparse_collectives.select import exponential_density, staged_density, strict_density
from tests import jax_internals

SIZE = 20


def mesh(workers=4):
    return jax.make_mesh(
        (workers,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def topk_a(**options):
    return optax_ext.topk_a(**{"density": 0.1, "axis": "w", **options})


def scheduled(schedule):
    selector = sc.select.scheduled(sc.select.topk(density=0.1), schedule)
    return topk_a(selector=selector)


def mapped(tx, in_specs, out_specs, check_vma=True, workers=4):
    return jax.jit(
        jax.shard_map(
            lambda gradient, state: tx.update(gradient[0], state),
            mesh=mesh(workers),
            in_specs=(P("w"), in_specs),
            out_specs=(P(), out_specs),
            check_vma=check_vma,
        )
    )


def gradient(workers=4):
    return np.random.default_rng(0).standard_normal((workers, SIZE)).astype(np.float32)


def state_and_specs(tx, workers=4):
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh(workers))
    return state, optax_ext.state_specs(state)


# A density schedule above the selector's density.


def test_known_densities_above_the_maximum_are_an_error_at_once():
    staged = staged_density(5, (0.25, 0.1))
    with pytest.raises(ValueError, match=r"reaches 0.25, above maximum=0.1\. Give the selector"):
        strict_density(staged, 0.1)
    rising = exponential_density(0.01, 0.2, 10)
    with pytest.raises(ValueError, match=r"reaches 0.2, above maximum=0.1"):
        strict_density(rising, 0.1)
    for schedule in (staged, rising):
        # Checked already: nothing is left to do in a step.
        assert strict_density(schedule, 0.25) is schedule


def test_what_strict_density_does_not_take():
    with pytest.raises(TypeError, match=r"schedule must be a function.*got 0\.1"):
        strict_density(0.1, 0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2"):
        strict_density(lambda count: 0.1, 2)
    constant = strict_density(lambda count: 0.5, 0.1)
    with pytest.raises(ValueError, match=r"schedule reaches 0\.5, above maximum=0\.1"):
        constant(jnp.int32(0))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0.5, -1.0, np.nan])
def test_a_density_out_of_range_raises_in_the_step_that_has_it(bad):
    values = jnp.array([0.1, 0.05, bad, 0.1])
    schedule = strict_density(lambda count: values[count], 0.1)
    tx = scheduled(schedule)
    state, specs = state_and_specs(tx)
    step = mapped(tx, specs, specs)
    for _ in range(2):
        _, state = step(gradient(), state)
    jax.effects_barrier()
    assert np.asarray(state.info.selected).tolist() == [1] * 4
    try:
        with pytest.raises(Exception, match=r"step 2: schedule is .* out of \(0, 0\.1\]"):  # noqa: B017, PT012
            jax.block_until_ready(step(gradient(), state))
            jax.effects_barrier()
    finally:
        jax_internals.forget_failed_callbacks()


@pytest.mark.slow
def test_a_strict_schedule_in_range_changes_nothing_also_under_vmap():
    def falling(count):
        return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))

    def steps(schedule):
        tx = scheduled(schedule)

        def train(gradient):
            state = tx.init(gradient)
            for _ in range(2):
                updates, state = tx.update(gradient, state)
            return updates, state.selector.clipped

        return sc.simulate(train, axis="w", axis_size=3)(gradient(3))

    (plain, _), (strict, clipped) = steps(falling), steps(strict_density(falling, 0.1))
    jax.effects_barrier()
    np.testing.assert_array_equal(plain, strict)
    assert clipped.tolist() == [[0]] * 3


# Specs that leave the axis out.


def test_a_residual_that_all_workers_share_is_named():
    tx = topk_a()
    _, specs = state_and_specs(tx)
    shared = optax_ext.init_state(tx, jnp.zeros(SIZE), {"w": 1})
    shared = shared._replace(settings=dataclasses.replace(shared.settings, workers=4))
    step = mapped(tx, jax.tree.map(lambda _: P(), shared), specs)
    with pytest.raises(ValueError, match=r"one row that all 4 workers of axis 'w' share.*specs"):
        step.lower(gradient(), shared)


def test_out_specs_without_the_axis():
    """Types find it; without them one residual of four is left, and the next step fails."""
    tx = topk_a()
    state, specs = state_and_specs(tx)
    wrong = specs._replace(residual=P())
    with pytest.raises(ValueError, match=r"residual is P\(\) which implies.*replicated"):
        mapped(tx, specs, wrong).lower(gradient(), state)
    _, lost = mapped(tx, specs, wrong, check_vma=False)(gradient(), state)
    assert lost.residual.shape == (1, SIZE)
    with pytest.raises(ValueError, match=r"(?s)not evenly divisible.*residual"):
        mapped(tx, specs, specs, check_vma=False).lower(gradient(), lost)
    with pytest.raises(ValueError, match=r"the residual of 1 of 4 workers"):
        optax_ext.check_metadata(optax_ext.checkpoint_metadata(state), lost)


# Parameters that are not finite.


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.mark.parametrize("bad", [pytest.param(np.nan, marks=pytest.mark.slow), np.inf])
def test_with_bad_parameters_every_step_is_skipped_and_counted(bad):
    params = {"w": jnp.ones((SIZE,)).at[3].set(bad)}
    tx = optax.chain(topk_a(), optax.sgd(0.1, momentum=0.9))
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    after = params
    for i in range(3):
        after, state, loss = step(after, state, np.ones((8, SIZE), np.float32))
        found = optax_ext.get_state(state)
        assert found is not None
        assert (int(found.skipped), int(found.count)) == (i + 1, 0)
        assert not np.isfinite(loss)
    np.testing.assert_array_equal(after["w"], params["w"])
    assert not np.asarray(found.residual).any()


def test_with_bad_parameters_nonfinite_raise_says_so():
    params = {"w": jnp.full((SIZE,), jnp.nan)}
    tx = optax.chain(topk_a(nonfinite="raise"), optax.sgd(0.1))
    state = optax_ext.init_state(tx, params, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    try:
        with pytest.raises(Exception, match="step 0: the gradient of some worker"):  # noqa: B017, PT012
            jax.block_until_ready(step(params, state, np.ones((8, SIZE), np.float32)))
            jax.effects_barrier()
    finally:
        jax_internals.forget_failed_callbacks()


# The dense warm-up.


@pytest.mark.parametrize(
    "alias", [pytest.param(optax_ext.topk_a, marks=pytest.mark.slow), optax_ext.gtopk]
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_one_worker_with_dense_steps(alias, check_vma):
    tx = alias(density=0.1, axis="w", dense_steps=2)
    state, specs = state_and_specs(tx, 1)
    step = mapped(tx, specs, specs, check_vma, workers=1)
    for i in range(3):
        updates, state = step(gradient(1), state)
        assert np.count_nonzero(updates) == (SIZE if i < 2 else 2)
    np.testing.assert_array_equal(np.asarray(state.residual[0] + updates), gradient(1)[0])


@pytest.mark.slow
def test_the_traffic_of_a_step_with_dense_steps():
    """Both branches are in the program: by default the meter takes the dense one, as the worst."""
    workers, dense_steps, steps = 8, 10, 1000

    def words(tx, name, **options):
        make = lambda p: optax_ext.init_state(tx, p, {"w": workers})  # noqa: E731
        state = jax.eval_shape(make, jnp.zeros(SIZE))
        specs = optax_ext.state_specs(state)

        def step(gradient, state):
            with jax.named_scope(name):
                return tx.update(gradient[0], state)

        return traffic.of_function(
            step,
            jax.ShapeDtypeStruct((workers, SIZE), "float32"),
            state,
            axis="w",
            axis_size=workers,
            in_specs=(P("w"), specs),
            out_specs=(P(), specs),
            **options,
        ).words

    # Without the word that agrees on skipping, n is 20 and k is 2.
    quiet = {"nonfinite": "propagate"}
    both = topk_a(dense_steps=dense_steps, **quiet)
    sparse, dense = words(topk_a(**quiet), "step"), 2 * SIZE * (workers - 1) / workers
    assert sparse == 2 * 2 * (workers - 1)
    assert words(both, "step") == dense
    assert words(both, "step", conditional="best") == sparse
    # By the name of a scope around the update: the share of sparse and of dense steps.
    share = dense_steps / steps
    mean = words(both, "warmup", frequencies={"warmup": (1 - share, share)})
    np.testing.assert_allclose(mean, (1 - share) * sparse + share * dense)


@pytest.mark.slow
def test_the_programs_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    *programs, words = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # The last one leaves arguments out.
    assert "..." in words
    assert len(programs) == 4
    on_mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((SIZE,))}
    start = optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.sgd(0.1))
    names = {
        "jax": jax,
        "optax": optax,
        "optax_ext": optax_ext,
        "params": params,
        "opt_state": optax_ext.init_state(start, params, on_mesh),
        "batches": [np.eye(8, SIZE, dtype=np.float32)] * 2,
    }
    for program in programs[:3]:
        exec(program, names)
    assert names["state"].skipped == 0
    tx = names["tx"]
    names["opt_state"] = optax_ext.init_state(tx, params, on_mesh)
    names["step"] = optax_ext.make_train_step(loss_fn, tx, on_mesh, donate=False)
    exec(programs[3], names)
    jax.effects_barrier()
    assert int(optax_ext.get_state(names["opt_state"]).count) == 2
    assert "exponential_density(end=0.01, start=0.1, steps=1000)" in str(names["selector"].spec)
