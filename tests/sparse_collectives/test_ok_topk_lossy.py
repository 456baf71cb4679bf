"""Ok-Topk with lossy codecs: workers agree, and nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers

SIZE, DENSITY, STEPS = 403, 0.05, 3
K = round(SIZE * DENSITY)

CODECS = {
    "bf16": sc.wire.bf16(),
    "narrow16": sc.wire.narrow16(),
    # Too little room for escapes: some entries are not sent in every phase.
    "narrow8": sc.wire.narrow8(block=8, escapes=0.0),
    "qsgd": sc.wire.qsgd(bits=4, bucket=32),
}
# A step takes seconds to compile: one number of workers for each in most tests.
ONE = {"bf16": 5, "narrow16": 3, "narrow8": 8, "qsgd": 6}
CASES = [
    pytest.param(name, workers, marks=() if name == "bf16" and workers == 5 else pytest.mark.slow)
    for name in CODECS
    for workers in (1, 4, 7, ONE[name])
]


@functools.cache
def reducer(codec_name, workers, **options):
    allreduce = sc.allreduce.ok_topk(density=DENSITY, codec=CODECS[codec_name], **options)

    def step(values, indices, state):
        coo = sc.PaddedCOO(values, indices, SIZE)
        total, undelivered, state, info = allreduce.reduce(coo, state, axis="workers")
        return total, helpers.as_coo(coo, undelivered), state, info

    return allreduce, sc.simulate(step, axis_size=workers, in_axes=(0, 0, None))


def selections(acc):
    """The k largest of each row, as ascending padded entries."""
    values = np.zeros((len(acc), K), np.float32)
    indices = np.full((len(acc), K), SIZE, np.int32)
    for row, (value, index) in zip(acc, zip(values, indices, strict=True), strict=True):
        chosen = np.sort(np.argsort(-np.abs(row), kind="stable")[:K])
        chosen = chosen[row[chosen] != 0]
        index[: chosen.size], value[: chosen.size] = chosen, row[chosen]
    return values, indices


def check_step(acc, allreduce, step, state):
    """One step on ``acc``: the residuals, the state, the total and the info."""
    values, indices = selections(acc)
    total, undelivered, state, info = step(values, indices, state)
    for field in (total.values, total.indices, info.delivered, info.threshold, info.words):
        bits = np.asarray(field)
        np.testing.assert_array_equal(
            bits.view(np.int32), np.broadcast_to(bits[:1], bits.shape).view(np.int32)
        )
    counts = np.bincount(np.asarray(total.indices[0]), minlength=SIZE + 1)[:SIZE]
    assert counts.max() <= 1
    assert info.delivered[0] == counts.sum()
    sent = np.zeros_like(acc)
    np.add.at(sent, (np.arange(len(acc))[:, None], np.minimum(indices, SIZE - 1)), values)
    kept = helpers.added_up(undelivered)
    total = helpers.added_up(jax.tree.map(lambda x: x[:1], total))[0]
    sent64, kept64 = sent.astype(np.float64), kept.astype(np.float64)
    scale = np.abs(sent64).sum(axis=0) + np.abs(kept64).sum(axis=0) + 1e-30
    lost = sent64.sum(axis=0) - kept64.sum(axis=0) - total
    assert (np.abs(lost) / scale).max() < 2e-6
    # What is not in the total stays as it is with all who had it.
    np.testing.assert_array_equal(kept[:, counts == 0], sent[:, counts == 0])
    return acc - sent + kept, jax.tree.map(lambda x: x[0], state), total, info


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_nothing_is_lost_and_all_workers_agree(name, workers):
    allreduce, step = reducer(name, workers)
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        state = allreduce.init(SIZE, workers)
        for _ in range(STEPS):
            residual, state, _, _ = check_step(acc, allreduce, step, state)
            acc = np.roll(acc, 7, axis=1) + (residual if name != "subnormal" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [("always", "qsgd"), ("never", "narrow8")])
def test_other_ways_to_balance_lose_nothing_either(mode, name):
    allreduce, step = reducer(name, 5, balance=mode)
    for acc in helpers.hard_accumulators(5, SIZE).values():
        check_step(acc, allreduce, step, allreduce.init(SIZE, 5))


@pytest.mark.slow
def test_one_worker_encodes_nothing():
    allreduce, step = reducer("qsgd", 1)
    acc = helpers.hard_accumulators(1, SIZE)["normal"]
    residual, _, total, _ = check_step(acc, allreduce, step, allreduce.init(SIZE, 1))
    np.testing.assert_array_equal(residual[0], np.where(total != 0, 0, acc[0]))
    np.testing.assert_array_equal(residual[0] + total, acc[0])


@pytest.mark.parametrize("name", helpers.slow_but(("bf16",), CODECS))
def test_the_total_is_close_to_the_exact_one(name):
    """All workers have the same indices, so what is selected does not depend on rounding."""
    workers, rng = ONE[name], np.random.default_rng(0)
    acc = np.zeros((workers, SIZE), np.float32)
    chosen = np.sort(rng.choice(SIZE, K, replace=False))
    acc[:, chosen] = 1 + rng.random((workers, K), np.float32)
    allreduce, step = reducer(name, workers)
    residual, _, total, info = check_step(acc, allreduce, step, allreduce.init(SIZE, workers))
    exact = acc.sum(axis=0)
    tolerance = {"bf16": 0.01, "narrow16": 0.01, "narrow8": 0.03, "qsgd": 0.5}[name]
    arrived = total != 0
    if name != "narrow8":
        assert (arrived == (exact != 0)).all()
        assert (np.asarray(info.overflow) == 0).all()
    np.testing.assert_allclose(total[arrived], exact[arrived], rtol=tolerance)
    assert np.abs(residual).max() > 0


@pytest.mark.slow
def test_errors_are_independent_over_workers_and_steps():
    """The same selection everywhere: still no two workers make the same errors."""
    workers = ONE["qsgd"]
    acc = np.zeros((workers, SIZE), np.float32)
    acc[:, 5 : 5 + 3 * K : 3] = np.linspace(1, 2, K, dtype=np.float32)
    allreduce, step = reducer("qsgd", workers)
    state = allreduce.init(SIZE, workers)
    values, indices = selections(acc)
    first = step(values, indices, state)
    later = step(values, indices, jax.tree.map(lambda x: x[0], first[2]))
    errors = [np.asarray(out[1].values)[:, :K] for out in (first, later)]
    rows = [*errors[0], *errors[1]]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (row != other).any()


@functools.cache
def traced(name, check_vma):
    workers = ONE[name]
    allreduce = reducer(name, workers)[0]
    mesh = jax.sharding.AbstractMesh((workers,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(values, indices, state):
        coo = sc.PaddedCOO(values[0], indices[0], SIZE)
        total, undelivered, state, info = allreduce.reduce(coo, state, axis="w")
        return total, undelivered.slots[None], state, info.delivered

    split, whole = jax.sharding.PartitionSpec("w"), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(split, split, whole),
        out_specs=(whole, split, whole, whole),
        check_vma=check_vma,
    )
    shapes = [jax.ShapeDtypeStruct((workers, K), t) for t in (jnp.float32, jnp.int32)]
    state = jax.eval_shape(lambda: allreduce.init(SIZE, workers))
    return jax.jit(mapped).trace(*shapes, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_info_reports_the_words_that_the_program_moves(name):
    workers = ONE[name]
    allreduce, step = reducer(name, workers)
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    words = check_step(acc, allreduce, step, allreduce.init(SIZE, workers))[3].words[0]
    balances = [{"balance": tuple(float(i == branch) for i in range(4))} for branch in range(4)]
    # What the windows show may be all that it takes.
    ways = [{"delivery": (0.0, 1.0), **balance} for balance in balances[:1]] + balances
    assert sum(
        round(float(words)) == round(sc.traffic.of_traced(traced(name, False), way).words)
        for way in ways
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_lowers_for_a_gpu_under_shard_map_that_checks_what_varies(name):
    lowered = traced(name, True).lower(lowering_platforms=("cuda",))
    assert "stablehlo" in lowered.as_text()


@pytest.mark.slow
def test_exact_codecs_answer_slot_by_slot():
    """The error feedback then needs one scatter only."""
    allreduce = sc.allreduce.ok_topk(density=DENSITY)

    def step(values, indices, state):
        coo = sc.PaddedCOO(values, indices, SIZE)
        undelivered = allreduce.reduce(coo, state, axis="workers")[1]
        assert undelivered.others.capacity == 0
        return undelivered.slots

    shapes = (jax.ShapeDtypeStruct((3, K), jnp.float32), jax.ShapeDtypeStruct((3, K), jnp.int32))
    state = allreduce.init(SIZE, 3)
    jax.eval_shape(sc.simulate(step, axis_size=3, in_axes=(0, 0, None)), *shapes, state)
