"""The rounding errors of codecs are kept, and sums of finite numbers are finite.

Delivered values are decoded ones, and nothing is lost if a sum would not have been finite.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._parts import _frame
from tests.sparse_collectives import helpers, table


@pytest.mark.slow
@pytest.mark.parametrize("name", table.ENCODED)
def test_errors_are_independent_over_steps_and_workers_of_ok_topk(name):
    """The same selection everywhere: still no two workers of Ok-Topk make the same errors."""
    workers, size, density = 6, 403, 0.05
    k = round(size * density)
    acc = np.zeros((workers, size), np.float32)
    acc[:, 5 : 5 + 3 * k : 3] = np.linspace(1, 2, k, dtype=np.float32)
    allreduce = table.make(name, density, sc.wire.qsgd(bits=4, bucket=32))
    selector = sc.select.topk(density=density)
    first = helpers.run_once(selector, allreduce, acc)
    later = helpers.run_once(selector, allreduce, acc, helpers.next_state(first))
    assert (first["kept"] != later["kept"]).any()
    rows = [*first["kept"], *later["kept"]] if name == "ok_topk" else []
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (row != other).any()


# The largest numbers.

SIZE, OF_RANGE = 48, 0.25
SELECTOR = sc.select.topk(density=OF_RANGE)
CODECS = {
    **{name: make() if name != "raw" else None for name, make in table.CODECS.items()},
    "qsgd, 2 bits, l2": sc.wire.qsgd(bits=2, norm="l2"),
}
OPTIONS = {
    **{name: {} for name in table.ENCODED},
    "ring_sparse": {"slack": 1.0, "fill": 1.0},
    "ssar_recursive_double, bounded": {"capacity": 4},
}
CASES = {
    f"{name}, {codec}": table.make(name.partition(",")[0], OF_RANGE, made, **options)
    for codec, made in CODECS.items()
    for name, options in OPTIONS.items()
} | {name: table.make(name) for name in ("dense", "dense_bucketed")}


def extremes(dtype, workers):
    """Numbers near the largest finite one, many of one sign at one index."""
    largest = float(jnp.finfo(dtype).max)
    rng = np.random.default_rng(workers)
    acc = rng.choice([1, -1, 0.9, 0.6, -0.3, 1e-3, 0], (workers, SIZE)) * largest
    acc[:, ::4] = np.abs(acc[:, ::4])
    return np.asarray(jnp.asarray(acc, dtype))


def step(allreduce, acc, state):
    """One selection and reduction."""
    workers = len(acc)
    coo, selected = helpers.simulated_select(SELECTOR, workers)(acc, np.zeros(workers, np.float32))
    return selected | helpers.simulated_reduce(allreduce, workers)(coo, state)


def steps(allreduce, acc, number):
    """The accumulator, the total and the residual of each step, in float64."""
    workers, largest = acc.shape[0], float(jnp.finfo(acc.dtype).max)
    state = allreduce.init(SIZE, workers)
    for _ in range(number):
        out = step(allreduce, acc, state)
        state = helpers.next_state(out)
        kept = np.zeros((workers, SIZE + 1))
        values = np.asarray(out["kept"].values).astype(np.float64)
        np.add.at(kept, (np.arange(workers)[:, None], np.asarray(out["kept"].indices)), values)
        before = acc.astype(np.float64)
        residual = before - np.asarray(out["sent"]).astype(np.float64) + kept[:, :-1]
        total = np.asarray(out["total"]).astype(np.float64)
        assert (total == total[0]).all()
        yield before, total[0], residual
        # A dropped sum may meet the worker's own entry, so the sum here may be larger.
        acc = np.asarray(jnp.asarray(np.clip(residual, -largest, largest), acc.dtype))


def all_cases():
    """Exact pairs in each dtype, codecs in one; numbers of workers and dtypes take turns."""
    dtypes = ("float32", "bfloat16", "float16")
    for i, name in enumerate(CASES):
        exact = "raw" in name or name == "dense"
        # The next codec has another dtype.
        turn = i + i // len(OPTIONS)
        for j, dtype in enumerate(dtypes if exact else (dtypes[turn % 3],)):
            workers = (4, 7)[(turn + j) % 2]
            quick = name == "dense" and dtype == "float32"
            yield pytest.param(name, workers, dtype, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "workers", "dtype"), list(all_cases()))
def test_sums_are_finite_and_nothing_is_lost(name, workers, dtype):
    epsilon = float(jnp.finfo(dtype).eps)
    for before, total, residual in steps(CASES[name], extremes(dtype, workers), 3):
        assert np.isfinite(total).all()
        assert np.isfinite(residual).all()
        assert (total != 0).any()
        np.testing.assert_allclose(
            total + residual.sum(0),
            before.sum(0),
            rtol=0,
            atol=workers**2 * epsilon * np.abs(before).max(),
        )


@pytest.mark.parametrize("name", ["dense", *helpers.slow("topk_a, raw", "gtopk, raw")])
def test_what_is_not_finite_is_passed_on(name):
    acc = np.zeros((3, SIZE), np.float32)
    acc[0, 3], acc[1, 5], acc[2, 7] = np.inf, -np.inf, np.nan
    out = step(CASES[name], acc, CASES[name].init(SIZE, 3))
    np.testing.assert_array_equal(out["total"][0, jnp.array([3, 5, 7])], [np.inf, -np.inf, np.nan])
    assert not helpers.added_up(out["kept"]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("workers", [2, 3, 64, 1000])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_cut_off_is_exact(workers, dtype, exact):
    share = _frame.largest_share(dtype, workers, exact=exact)
    largest = float(jnp.finfo(dtype).max)
    assert workers * share <= largest / 2 * (1 + 1e-2)
    with np.errstate(over="ignore"):
        values = np.asarray(jnp.asarray(share * 2.0 ** np.linspace(0, 8, 999), dtype))
    values = values[np.isfinite(values.astype(np.float32))]
    rest = (values - np.asarray(share, values.dtype)).astype(np.float64)
    np.testing.assert_array_equal(rest + share, values.astype(np.float64))
