"""A mean as leaves of several dtypes hold it: the values, and the length of the program."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import optax_ext
import sparse_collectives as sc
from optax_ext._step import _layout, _narrow

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Above what float16 holds, above what bfloat16 does, what both round, and what is not finite.
HARD = np.array([1e5, -7e4, 65510.0, 3.4e38, -3.4e38, 1e-9, 1 / 3, 0.0, np.inf, np.nan], np.float32)


def layout_of(dtypes, sizes):
    tree = {f"leaf{i:04}": jnp.zeros(n, d) for i, (d, n) in enumerate(zip(dtypes, sizes))}
    return _layout.layout_of(tree, "params")


def oracle(mean, index, dtypes, sizes, saturate):
    """Entry by entry."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    kept, large = mean.copy(), np.zeros(mean.shape, bool)
    for i, place in enumerate(index):
        dtype = NARROW.get(dtypes[owner[place]]) if 0 <= place < owner.size else None
        if dtype is None:
            continue
        most = np.float32(ml_dtypes.finfo(dtype).max)
        value = mean[i]
        large[i] = abs(value) > most
        if saturate and np.isfinite(value):
            value = np.clip(value, -most, most)
        with np.errstate(over="ignore"):
            kept[i] = np.float32(dtype(value))
    return kept, large


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_entry_is_held_as_its_leaf_does(seed, saturate):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, 30)
    dtypes = rng.choice(["float32", *NARROW], sizes.size)
    layout, n = layout_of(dtypes, sizes), int(sizes.sum())

    def draw(size):
        usual = rng.standard_normal(size).astype(np.float32)
        return np.where(rng.random(size) < 0.3, rng.choice(HARD, size), usual)

    whole = draw(n)
    found = jax.jit(lambda x: _narrow.held(x, None, layout, saturate=saturate))(whole)
    for mine, right in zip(found, oracle(whole, range(n), dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)
    # In any order, several times, and with slots that are empty.
    index = rng.integers(-1, n, 50).astype(np.int32)
    some = np.where(index < 0, np.float32(0), draw(50))
    found = jax.jit(lambda x, i: _narrow.held(x, i, layout, saturate=saturate))(some, index)
    for mine, right in zip(found, oracle(some, index, dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)


def test_runs_are_those_of_leaves_with_entries_that_are_not_dense():
    tree = [jnp.zeros(s, d) for s, d in ((2, "float32"), (0, "float16"), (3, "float32"))]
    tree += [jnp.zeros(s, d) for s, d in ((4, "bfloat16"), (5, "float16"), (6, "float16"))]
    layout = _layout.layout_of(tree, "params", (False, False, False, False, True, False))
    runs = [(stop, jnp.dtype(dtype).name) for stop, dtype in _layout.dtype_runs(layout)]
    assert runs == [(5, "float32"), (9, "bfloat16"), (15, "float16")]
    assert _narrow.narrows(layout)
    assert not _narrow.narrows(_layout.layout_of(tree[:3:2], "params"))


def over_all(function, m, *arguments):
    """Operations on arrays of m entries, in the program with all that it calls."""

    def count(jaxpr):
        return sum(
            any(m in getattr(out.aval, "shape", ()) for out in equation.outvars)
            + sum(count(inner) for inner in jaxprs_in_params(equation.params))
            for equation in jaxpr.eqns
        )

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_operations_on_all_entries_do_not_grow_with_the_runs_of_dtypes(indexed):
    def operations(leaves):
        size, m = 840 // leaves, 840 if not indexed else 333
        layout = layout_of(("bfloat16", "float32") * (leaves // 2), [size] * leaves)
        index = jnp.zeros(m, jnp.int32) if indexed else None
        return over_all(
            lambda x: _narrow.held(x, index, layout, saturate=True), m, jnp.zeros(m, jnp.float32)
        )

    few, many = operations(4), operations(420)
    # A binary search takes a few for each doubling: log2(105) of them, and no more.
    assert many <= few + (7 * 8 if indexed else 0)


@pytest.mark.parametrize("exchange", ["topk_a", "agreed", "dsar_split_allgather"])
def test_a_step_of_leaves_whose_dtypes_take_turns_loses_nothing(exchange):
    workers, rng = 4, np.random.default_rng(5)
    dtypes = ["bfloat16", "float32", "float16"] * 8
    gradients = [jnp.asarray(rng.standard_normal((workers, 7)), d) for d in dtypes]
    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.25), getattr(sc.allreduce, exchange)(), axis="data"
    )

    def step(gradients):
        updates, state = tx.update(gradients, tx.init(gradients))
        return updates, state.residual[0]

    updates, residual = sc.simulate(step, axis="data", axis_size=workers)(gradients)
    applied = np.concatenate([np.asarray(u, np.float64)[0] for u in updates])
    given = np.concatenate([np.asarray(g, np.float64) for g in gradients], axis=1).sum(0)
    np.testing.assert_allclose(
        workers * applied + np.asarray(residual, np.float64).sum(0), given, rtol=2e-6, atol=2e-6
    )
    assert [u.dtype for u in updates] == [jnp.dtype(d) for d in dtypes]
