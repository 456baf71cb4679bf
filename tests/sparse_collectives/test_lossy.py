"""Allreduces with lossy codecs: what a codec loses is kept, and what is delivered is decoded."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table

LOSSY = helpers.lossy_codec()
K, DENSITY = 40, 0.2
# Of 40 of 200 entries of 7 workers the sums go dense on the way.
STREAMS = ("ssar_recursive_double", "ssar_split_allgather", "ring_sparse")
ROUNDED = {
    "topk_a": (table.make("topk_a", codec=LOSSY), 4),
    "sparse_allgather": (table.make("sparse_allgather", codec=LOSSY), 4),
    "gtopk": (table.make("gtopk", DENSITY, LOSSY), 3),
    "spardl": (table.make("spardl", DENSITY, LOSSY), 3),
    "ssar_recursive_double": (table.make("ssar_recursive_double", capacity=50, codec=LOSSY), 6),
    "ssar_split_allgather": (table.make("ssar_split_allgather", codec=LOSSY), 3),
    "dsar_split_allgather": (table.make("dsar_split_allgather", codec=LOSSY), 4),
    "dsar_split_allgather, dense only": (
        table.make("dsar_split_allgather", slack=math.inf, dense_codec=LOSSY),
        4,
    ),
    "ring_sparse": (table.make("ring_sparse", codec=LOSSY), 3),
    **{f"{name}, dense": (table.make(name, codec=LOSSY), 7) for name in STREAMS},
}


@pytest.mark.parametrize("name", helpers.slow_but(("sparse_allgather",), ROUNDED))
def test_what_a_codec_loses_is_kept(name):
    allreduce, workers = ROUNDED[name]
    selector = sc.select.topk(density=DENSITY)
    accs = helpers.hard_accumulators(workers, 200)
    state, totals = allreduce.init(200, workers), []
    for case in ("normal", "normal", "one worker", "same on all", "one region", "disjoint"):
        out = helpers.run_once(selector, allreduce, accs[case], state)
        helpers.check_conserved(out, case, rounds=True)
        state = helpers.next_state(out)
        total = np.asarray(out["total"])[0]
        if case == "normal":
            totals.append(total)
            assert np.abs(total).max() > 1
            assert np.asarray(out["kept"]).any()
            # Also a worker's own values are the decoded ones.
            np.testing.assert_array_equal(total * 256, np.round(total * 256))
            overflow = np.asarray(out["info"].overflow)
            if name in ("gtopk", "spardl"):
                assert overflow.sum() > 0
            elif name in ("topk_a", "sparse_allgather"):
                assert (overflow >= K // 7).all()
    if "dense" not in name:
        assert (totals[0] != totals[1]).any()  # another seed
    assert state.count == 6


SIZE, STEPS = 403, 3
SELECTOR = sc.select.topk(density=table.DENSITY)
OF_OK_TOPK = {
    "bf16": sc.wire.bf16(),
    "narrow16": sc.wire.narrow16(),
    # Too little room for escapes: some entries are not sent in every phase.
    "narrow8": sc.wire.narrow8(block=8, escapes=0.0),
    "qsgd": sc.wire.qsgd(bits=4, bucket=32),
}
# A step takes seconds to compile: one number of workers for each in most tests.
ONE = {"bf16": 5, "narrow16": 3, "narrow8": 8, "qsgd": 6}


@functools.cache
def ok_topk(codec, **options):
    return table.make("ok_topk", codec=OF_OK_TOPK[codec], **options)


def check_step(allreduce, acc, state=None):
    """One step on ``acc``: the residuals, and what it gave."""
    out = helpers.run_once(SELECTOR, allreduce, acc, state)
    helpers.check_conserved(out, tolerance=2e-6, rounds=True)
    for field in (out["indices"], out["info"].delivered, out["info"].threshold, out["info"].words):
        assert (np.asarray(field) == np.asarray(field)[0]).all()
    counts = np.bincount(np.asarray(out["indices"][0]), minlength=SIZE + 1)[:SIZE]
    assert counts.max() <= 1
    assert out["info"].delivered[0] == counts.sum()
    sent, kept = np.asarray(out["sent"]), out["kept"]
    # What is not in the total stays as it is with all who had it.
    np.testing.assert_array_equal(kept[:, counts == 0], sent[:, counts == 0])
    return acc - sent + kept, out


@pytest.mark.parametrize(
    ("codec", "workers"),
    [
        ("bf16", 5),
        *(
            pytest.param(codec, workers, marks=pytest.mark.slow)
            for codec in OF_OK_TOPK
            for workers in (1, 4, 7, ONE[codec])
            if (codec, workers) != ("bf16", 5)
        ),
    ],
)
def test_ok_topk_loses_nothing_over_steps_and_all_workers_agree(codec, workers):
    for case, acc in helpers.hard_accumulators(workers, SIZE).items():
        state = None
        for _ in range(STEPS):
            residual, out = check_step(ok_topk(codec), acc, state)
            state = helpers.next_state(out)
            acc = np.roll(acc, 7, axis=1) + (residual if case != "subnormal" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("balance", "codec"), [("always", "qsgd"), ("never", "narrow8")])
def test_other_ways_to_balance_lose_nothing_either(balance, codec):
    for acc in helpers.hard_accumulators(5, SIZE).values():
        check_step(ok_topk(codec, balance=balance), acc)


@pytest.mark.slow
def test_one_worker_encodes_nothing():
    acc = helpers.hard_accumulators(1, SIZE)["normal"]
    residual, out = check_step(ok_topk("qsgd"), acc)
    total = np.asarray(out["total"])[0]
    np.testing.assert_array_equal(residual[0], np.where(total != 0, 0, acc[0]))
    np.testing.assert_array_equal(residual[0] + total, acc[0])


@pytest.mark.parametrize("codec", helpers.slow_but(("bf16",), OF_OK_TOPK))
def test_the_total_is_close_to_the_exact_one(codec):
    """All workers have the same indices, so what is selected does not depend on rounding."""
    workers, rng = ONE[codec], np.random.default_rng(0)
    acc, k = np.zeros((workers, SIZE), np.float32), round(SIZE * table.DENSITY)
    chosen = np.sort(rng.choice(SIZE, k, replace=False))
    acc[:, chosen] = 1 + rng.random((workers, k), np.float32)
    residual, out = check_step(ok_topk(codec), acc)
    exact, total = acc.sum(axis=0), np.asarray(out["total"])[0]
    tolerance = {"bf16": 0.01, "narrow16": 0.01, "narrow8": 0.03, "qsgd": 0.5}[codec]
    arrived = total != 0
    if codec != "narrow8":
        assert (arrived == (exact != 0)).all()
        assert (np.asarray(out["info"].overflow) == 0).all()
    np.testing.assert_allclose(total[arrived], exact[arrived], rtol=tolerance)
    assert np.abs(residual).max() > 0


@pytest.mark.slow
def test_errors_are_independent_over_workers_and_steps():
    """The same selection everywhere: still no two workers make the same errors."""
    workers, k = ONE["qsgd"], round(SIZE * table.DENSITY)
    acc = np.zeros((workers, SIZE), np.float32)
    acc[:, 5 : 5 + 3 * k : 3] = np.linspace(1, 2, k, dtype=np.float32)
    _, first = check_step(ok_topk("qsgd"), acc)
    _, later = check_step(ok_topk("qsgd"), acc, helpers.next_state(first))
    rows = [*first["kept"], *later["kept"]]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (row != other).any()


@pytest.mark.parametrize("name", ["topk_a", "sparse_allgather", *helpers.slow("ok_topk")])
def test_an_exact_codec_answers_slot_by_slot(name):
    """With the indices of the selection itself: error feedback then needs one scatter only."""
    allreduce = table.make(name)

    def step(values, indices):
        coo = sc.PaddedCOO(values, indices, SIZE)
        undelivered = allreduce.reduce(coo, allreduce.init(SIZE, 3), axis="workers")[1]
        assert undelivered.others.capacity == 0
        return undelivered.slots

    shapes = [jax.ShapeDtypeStruct((3, 20), dtype) for dtype in (jnp.float32, jnp.int32)]
    jax.eval_shape(sc.simulate(step, axis_size=3), *shapes)
