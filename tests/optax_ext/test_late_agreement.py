"""Workers that agree to skip a step by the messages of its exchange, and not before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._step import _error_feedback
from sparse_collectives import extend, traffic

WORKERS, SIZE, DENSITY = 4, 600, 0.05


def selecting(allreduce, **options):
    selector = sc.select.topk(density=DENSITY)
    return optax_ext.sparse_allreduce(selector, allreduce, axis="w", **options)


CASES = {
    "ok_topk": lambda: selecting(sc.allreduce.ok_topk(density=DENSITY)),
    "ok_topk narrow8": lambda: selecting(
        sc.allreduce.ok_topk(density=DENSITY, codec=sc.wire.narrow8())
    ),
    "ok_topk balanced": lambda: selecting(
        sc.allreduce.ok_topk(density=DENSITY, regions="balanced")
    ),
    "agreed": lambda: selecting(sc.allreduce.agreed()),
    "agreed few": lambda: selecting(sc.allreduce.agreed(bits="few")),
    "momentum": lambda: selecting(
        sc.allreduce.agreed(), correction=optax_ext.momentum_correction(0.9)
    ),
    "decay, limit": lambda: selecting(
        sc.allreduce.agreed(),
        residual=optax_ext.residual(decay=0.5, step_ahead=0.01),
        local=optax_ext.scale_by_local_adam(),
        limit=0.01,
    ),
    "bfloat16 residual": lambda: selecting(
        sc.allreduce.ok_topk(density=DENSITY), residual=optax_ext.residual(dtype="bfloat16")
    ),
}


# With a transformation in front XLA may round its last product with the sum or before it, in one of
# the two programs and not in the other.
ROUNDED = ("decay, limit",)


def gradients(steps=6):
    rng = np.random.default_rng(0)
    given = rng.standard_normal((steps, WORKERS, SIZE)).astype(np.float32)
    given[1, 2, 17] = np.nan
    given[3, :, 5] = np.inf
    return given


def run(tx, given):
    mesh = jax.make_mesh((WORKERS,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh)
    specs = optax_ext.state_specs(state)

    def step(gradient, state):
        return tx.update(gradient[0], state, jnp.zeros(SIZE))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("w"), specs), out_specs=(P(), specs))
    step, seen = jax.jit(mapped), []
    for gradient in given:
        update, state = step(jnp.asarray(gradient), state)
        seen.append((np.asarray(update), jax.tree.map(np.asarray, state)))
    return seen


SLOW = ("ok_topk narrow8", "ok_topk balanced", "bfloat16 residual")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in CASES]
)
def test_it_has_the_bits_of_an_agreement_before(name, monkeypatch):
    late = run(CASES[name](), gradients())
    monkeypatch.setattr(_error_feedback, "_LATE_SIZE", 0)
    before = run(CASES[name](), gradients())
    same = np.testing.assert_array_equal
    if name in ROUNDED:
        # By a few units in the last place of the largest numbers.
        same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for (update, state), (expected, wanted) in zip(late, before, strict=True):
        same(update, expected)
        jax.tree.map(same, state, wanted)
    # Of the steps with something that is not finite nothing is left.
    assert int(late[-1][1].skipped) == 2
    assert not late[1][0].any()
    np.testing.assert_array_equal(late[1][1].residual, late[0][1].residual)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ok_topk", marks=pytest.mark.slow),
        "agreed",
        pytest.param("momentum", marks=pytest.mark.slow),
    ],
)
def test_what_is_traced_for_a_gpu_agrees_late_up_to_a_size_of_its_own(name, monkeypatch):
    before = run(CASES[name](), gradients())
    monkeypatch.setattr(_error_feedback, "_LATE_SIZE", 0)
    early = collectives_of(CASES[name]())
    with extend.traced_for("gpu"):
        assert collectives_of(CASES[name]()) == early - 1
        late = run(CASES[name](), gradients())
        monkeypatch.setattr(_error_feedback, "_LATE_ON_GPU", SIZE - 1)
        assert collectives_of(CASES[name]()) == early
    for (update, state), (expected, wanted) in zip(late, before, strict=True):
        np.testing.assert_array_equal(update, expected)
        jax.tree.map(np.testing.assert_array_equal, state, wanted)


def collectives_of(tx):
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {"w": WORKERS}), jnp.zeros(SIZE))
    specs = optax_ext.state_specs(state)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((WORKERS,), ("w",), axis_types=auto)

    def step(gradient, state):
        return tx.update(gradient[0], state)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("w"), specs), out_specs=(P(), specs))
    given = jax.ShapeDtypeStruct((WORKERS, SIZE), jnp.float32)
    found = traffic.of_traced(jax.jit(mapped).trace(given, state), conditional="best")
    return sum(row.weight for row in found.collectives)


@pytest.mark.parametrize(("name", "late", "before"), [("ok_topk", 3, 4), ("agreed", 2, 3)])
def test_a_step_takes_one_collective_less(name, late, before, monkeypatch):
    assert collectives_of(CASES[name]()) == late
    monkeypatch.setattr(_error_feedback, "_LATE_SIZE", 0)
    assert collectives_of(CASES[name]()) == before
