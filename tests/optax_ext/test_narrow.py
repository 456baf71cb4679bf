"""A mean as leaves of several dtypes hold it: the values, and the length of the program."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import optax_ext
import sparse_collectives as sc
from optax_ext._step import _applied, _layout
from tests.optax_ext.helpers import flat, normal, run, slow

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TOPK = sc.select.topk(density=0.1)
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
    found = jax.jit(lambda x: _applied.held(x, None, layout, saturate=saturate))(whole)
    for mine, right in zip(found, oracle(whole, range(n), dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)
    # In any order, several times, and with slots that are empty.
    index = rng.integers(-1, n, 50).astype(np.int32)
    some = np.where(index < 0, np.float32(0), draw(50))
    found = jax.jit(lambda x, i: _applied.held(x, i, layout, saturate=saturate))(some, index)
    for mine, right in zip(found, oracle(some, index, dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)


def test_runs_are_those_of_leaves_with_entries_that_are_not_dense():
    tree = [jnp.zeros(s, d) for s, d in ((2, "float32"), (0, "float16"), (3, "float32"))]
    tree += [jnp.zeros(s, d) for s, d in ((4, "bfloat16"), (5, "float16"), (6, "float16"))]
    layout = _layout.layout_of(tree, "params", (False, False, False, False, True, False))
    runs = [(stop, jnp.dtype(dtype).name) for stop, dtype in _layout.dtype_runs(layout)]
    assert runs == [(5, "float32"), (9, "bfloat16"), (15, "float16")]
    assert _applied.narrows(layout)
    assert not _applied.narrows(_layout.layout_of(tree[:3:2], "params"))


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
            lambda x: _applied.held(x, index, layout, saturate=True), m, jnp.zeros(m, jnp.float32)
        )

    few, many = operations(4), operations(420)
    # A binary search takes a few for each doubling: log2(105) of them, and no more.
    assert many <= few + (7 * 8 if indexed else 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "drop", "raise", "propagate"])
def test_a_float16_leaf_whose_residual_grows_beyond_it(policy):
    """Of 16 equal entries one is sent at each step, so that the last has waited for 15."""
    given = np.full((20, 2, 16), 2e4, np.float16)
    found = run(optax_ext.ok_topk(1 / 16, axis="w", nonfinite=policy), given)
    updates, withheld = found.updates, found.last.withheld.tolist()
    jax.effects_barrier()
    assert updates.dtype == np.float16
    assert np.isfinite(found.residuals).all()
    if policy == "propagate":
        assert np.isinf(updates).any()
        assert withheld == [0, 0]
        return
    assert updates.max() == np.finfo(np.float16).max
    # Integers, of which nothing is rounded.
    applied = 2 * updates[:, 0].astype(np.float64).cumsum(0)
    kept = found.residuals.astype(np.float64).sum(1)
    np.testing.assert_array_equal(applied + kept, given.astype(np.float64).sum(1).cumsum(0))
    assert withheld == [(updates[:, 0] == np.finfo(np.float16).max).sum()] * 2
    assert found.last.skipped.tolist() == [0, 0]


MIXED = ("float16", "float32", "bfloat16", "bfloat16")


TURNS = ("bfloat16", "float32", "float16") * 8


@pytest.mark.parametrize(
    ("dtypes", "exchange"),
    [
        (TURNS, sc.allreduce.topk_a()),
        (TURNS, sc.allreduce.agreed()),
        (TURNS, sc.allreduce.published.dsar_split_allgather()),
        slow(("float16",), sc.allreduce.topk_a()),
        slow(("bfloat16",), sc.allreduce.published.dsar_split_allgather()),
        slow(MIXED, sc.allreduce.ok_topk(density=0.1)),
        slow(
            ("float32", "bfloat16", "float16"),
            sc.allreduce.ok_topk(density=0.1, codec=sc.wire.bf16()),
        ),
        slow(MIXED, sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())),
    ],
    ids=lambda x: str(x.spec) if hasattr(x, "spec") else f"{len(x)}",
)
def test_what_a_narrow_leaf_rounds_off_stays_in_the_residuals(dtypes, exchange):
    steps, size = 6, 23
    nodes = bool(exchange.shard_axis)
    shape, axis = ((3, 2), ("node", "device")) if nodes else ((3,), "w")
    given = {
        f"{i}": np.clip(2e4 * normal((steps, *shape, size), i), -6e4, 6e4).astype(jnp.dtype(dtype))
        for i, dtype in enumerate(dtypes)
    }
    found = run(optax_ext.sparse_allreduce(TOPK, exchange, axis=axis), given, axis)
    for key, leaf in found.updates.items():
        assert leaf.dtype == given[key].dtype
    workers, n = int(np.prod(shape)), size * len(dtypes)
    applied, gradients = flat(found.updates, (steps, workers)), flat(given, (steps, workers))
    assert np.isfinite(applied).all()
    assert (applied == applied[:, :1]).all()
    # The shards of a node side by side.
    kept = found.residuals.astype(np.float64).reshape(steps, shape[0], -1)[..., :n].sum(1)
    before = np.concatenate([np.zeros((1, n)), kept[:-1]])
    acc, scale = before + gradients.sum(1), np.abs(before) + np.abs(gradients).sum(1)
    # Of float32; what bfloat16 rounds off is up to 2**-9 of an update.
    assert (np.abs(workers * applied[:, 0] + kept - acc) <= 1e-6 * scale).all()
    assert ((applied[:, 0] != 0) & (np.abs(kept) > 0)).any()
    assert np.abs(acc).max() > 2e4


@pytest.mark.parametrize(
    ("policy", "expected"), [("skip", np.finfo(np.float16).max), ("propagate", np.inf)]
)
def test_a_narrow_leaf_that_is_dense_saturates(policy, expected):
    tx = optax_ext.topk_a(
        0.5, axis="w", dense_leaves="dense", local=optax.scale(2.0), nonfinite=policy
    )
    found = run(tx, np.full((1, 2, 4), 6e4, np.float16))
    np.testing.assert_array_equal(found.updates, np.full((1, 2, 4), expected, np.float16))
    assert found.last.skipped.tolist() == [0, 0]
