"""Allreduces with lossy codecs: what a codec loses is kept, and what is delivered is decoded."""

import functools
import math

import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table

LOSSY = helpers.lossy_codec()
K, DENSITY = 40, 0.2
# Of 40 of 200 entries of 7 workers the sums of SparCML go dense on the way.
ROUNDED = [
    *(("topk_a", 4, {}), ("sparse_allgather", 4, {}), ("gtopk", 3, {}), ("spardl", 3, {})),
    *(("ok_topk", 3, {}), ("ok_topk", 8, {})),
    *(("ssar_recursive_double", 6, {"capacity": 50}), ("ssar_recursive_double", 7, {})),
    *((name, p, {}) for name in ("ssar_split_allgather", "ring_sparse") for p in (3, 7)),
    ("dsar_split_allgather", 4, {}),
    ("dsar_split_allgather", 4, {"codec": None, "slack": math.inf, "dense_codec": LOSSY}),
]
QUICK = ROUNDED[1:2]


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [*QUICK, *helpers.slow_rows(*(row for row in ROUNDED if row not in QUICK))],
)
def test_what_a_codec_loses_is_kept(name, workers, options):
    allreduce = table.make(name, DENSITY, **{"codec": LOSSY, **options})
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
            if name in ("topk_a", "sparse_allgather"):
                assert (overflow >= K // 7).all()
            assert overflow.sum() > 0 or name not in ("gtopk", "spardl")
    if workers < 7 and "dense_codec" not in options:
        assert (totals[0] != totals[1]).any()  # another seed


SIZE = 403
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
def ok_topk(codec):
    return table.make("ok_topk", codec=OF_OK_TOPK[codec])


@pytest.mark.parametrize("codec", helpers.slow_but(("bf16",), OF_OK_TOPK))
def test_the_total_is_close_to_the_exact_one(codec):
    """All workers have the same indices, so what is selected does not depend on rounding."""
    workers, rng = ONE[codec], np.random.default_rng(0)
    acc, k = np.zeros((workers, SIZE), np.float32), round(SIZE * table.DENSITY)
    chosen = np.sort(rng.choice(SIZE, k, replace=False))
    acc[:, chosen] = 1 + rng.random((workers, k), np.float32)
    out = helpers.run_once(SELECTOR, ok_topk(codec), acc)
    exact, total = acc.sum(axis=0), np.asarray(out["total"])[0]
    tolerance = {"bf16": 0.01, "narrow16": 0.01, "narrow8": 0.03, "qsgd": 0.5}[codec]
    arrived = total != 0
    if codec != "narrow8":
        assert (arrived == (exact != 0)).all()
        assert (np.asarray(out["info"].overflow) == 0).all()
    np.testing.assert_allclose(total[arrived], exact[arrived], rtol=tolerance)
    assert (out["kept"] != 0).any()


@pytest.mark.slow
def test_errors_are_independent_over_workers_and_steps():
    """The same selection everywhere: still no two workers make the same errors."""
    workers, k = ONE["qsgd"], round(SIZE * table.DENSITY)
    acc = np.zeros((workers, SIZE), np.float32)
    acc[:, 5 : 5 + 3 * k : 3] = np.linspace(1, 2, k, dtype=np.float32)
    first = helpers.run_once(SELECTOR, ok_topk("qsgd"), acc)
    later = helpers.run_once(SELECTOR, ok_topk("qsgd"), acc, helpers.next_state(first))
    rows = [*first["kept"], *later["kept"]]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (row != other).any()
