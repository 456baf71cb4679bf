"""A mean as leaves of several dtypes hold it.

What they round off stays in the residuals: test_contract.py and tests/fuzz.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._step import _applied, _layout
from tests.optax_ext.helpers import run

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
    found = jax.jit(lambda x: _applied.held(x, None, layout, saturate=saturate))(whole)
    for mine, right in zip(found, oracle(whole, range(n), dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)
    # In any order, several times, and with slots that are empty.
    index = rng.integers(-1, n, 50).astype(np.int32)
    some = np.where(index < 0, np.float32(0), draw(50))
    found = jax.jit(lambda x, i: _applied.held(x, i, layout, saturate=saturate))(some, index)
    for mine, right in zip(found, oracle(some, index, dtypes, sizes, saturate), strict=True):
        np.testing.assert_array_equal(mine, right)


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
