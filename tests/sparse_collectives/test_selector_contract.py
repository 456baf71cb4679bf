"""The contract of every selector, over the table of all of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from tests import jax_internals
from tests.reference import selection
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.helpers import slow_but, slow_rows
from tests.sparse_collectives.selecting import (
    LARGE,
    SMALL,
    as_dtype,
    assert_same_bits,
    check,
    hard_vectors,
    k_of,
    laplace,
    types_of,
)
from tests.sparse_collectives.table import SELECTOR_VARIANTS, SELECTORS

ALL = SELECTORS | SELECTOR_VARIANTS
# Selectors with estimated thresholds; all of them compile fast.
ESTIMATED = {"gaussian_k", "redsync", "sidco", *SELECTOR_VARIANTS}
# For selectors by layer; two layers have the same shape.
LAYOUTS = {SMALL: sc.Layout(((4, 100), (4, 100), (203,))), LARGE: sc.Layout(((350, 400), (1,)))}


# Selectors of k entries, whatever the distribution.
EXACT = ("topk", "threshold_reuse", "mstopk", "random_k", "threshold", "adtopk", "layerwise")
QUICK_STATES = ESTIMATED | {"topk", "threshold_reuse", "random_k", "threshold"}


def test_every_public_selector_is_in_the_table():
    found = table.public(sc.select, sc.Selector)
    assert found == SELECTORS.keys(), "add a row to tests/sparse_collectives/table.py"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, SMALL) for name in sorted(QUICK_STATES)),
        ("topk", LARGE),
        *slow_rows(*((name, SMALL) for name in ALL if name not in QUICK_STATES)),
    ],
)
@pytest.mark.one_in(3)
def test_state_keeps_its_type_and_steps_are_traced_once(name, size):
    selector = ALL[name](0.1)
    function, state = jax.jit(selector.select), selector.init(LAYOUTS[size])
    types = types_of(state)
    for case in ("normal", "all zero", "not finite", "subnormal", "all equal"):
        acc = hard_vectors(size)[case]
        out = function(acc, state)
        check(out, acc)
        state = out[1]
        assert types_of(state) == types
    assert jax_internals.programs(function) == 1


@pytest.mark.parametrize("name", slow_but(("bucketed", "mstopk", "threshold"), ALL))
@pytest.mark.one_in(3)
def test_few_entries_and_values_of_sixteen_bits(name):
    for size, density in ((1, 0.5), (33, 0.3)):
        acc, selector = np.abs(selection.hard_vector("normal", size)) + 1, ALL[name](density)
        number = len(check(jax.jit(selector.select)(acc, selector.init(size)), acc))
        assert number == k_of(density, size) if name in EXACT else number >= 1
    selector = ALL[name](0.1)
    for dtype in ("bfloat16", "float16"):
        function, state = jax.jit(selector.select), selector.init(SMALL)
        for seed in range(2):
            acc = as_dtype(laplace(SMALL, seed), dtype)
            out = function(acc, state)
            state = out[1]
            assert len(check(out, acc)) >= 1


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("topk", SMALL),
        ("threshold", LARGE),
        *slow_rows(*((name, SMALL) for name in ALL if name != "topk")),
        *slow_rows(*((name, LARGE) for name in ("topk", "bucketed", "mstopk", "random_k"))),
    ],
)
def test_jit_vmap_and_eager_select_the_same(name, size):
    cases = ["normal", "ties at the top", "few nonzeros", "not finite", "all zero"]
    lanes = jnp.asarray(np.stack([hard_vectors(size)[case] for case in cases]))
    selector = ALL[name](0.02)
    state = selector.init(LAYOUTS[size])
    batched = jax.jit(jax.vmap(selector.select, in_axes=(0, None)))(lanes, state)
    select, later = jax.jit(selector.select), state
    for lane, acc in enumerate(lanes):
        expected = select(acc, state)
        coo, info = jax.tree.map(lambda leaf, lane=lane: leaf[lane], (batched[0], batched[2]))
        assert_same_bits(coo, expected[0])
        # Without optimizations, XLA sums the data of a threshold's fit in another order in a batch.
        np.testing.assert_allclose(info.threshold, expected[2].threshold, rtol=1e-6)
        assert_same_bits(info._replace(threshold=()), expected[2]._replace(threshold=()))
        if (size == LARGE) == (name == "topk") and lane != 2:
            eager, expected = selector.select(acc, later), select(acc, later)
            assert_same_bits(eager[0], expected[0])
            later = expected[1]


@pytest.mark.parametrize("name", slow_but(("threshold", "topk"), SELECTORS))
def test_runs_where_varying_types_are_checked(name):
    selector = SELECTORS[name](0.02)

    def selected(acc):
        return selector.select(acc, selector.init(LAYOUTS[LARGE]))[0].to_dense()

    acc = np.concatenate([selection.hard_vector("normal", LARGE, seed) for seed in (0, 1)])
    spec = PartitionSpec("w")
    mapped = jax.shard_map(selected, mesh=helpers.mesh(2), in_specs=spec, out_specs=spec)
    expected = np.concatenate([jax.jit(selected)(part) for part in np.split(acc, 2)])
    np.testing.assert_array_equal(jax.jit(mapped)(acc), expected)


# A schedule's density falls, and a threshold from another step does not select everything.
OF_EVERYTHING = sorted(ALL.keys() - {"scheduled", "adtopk_interleaved", "adtopk_threshold"})


@pytest.mark.parametrize(
    "name",
    slow_but(
        ESTIMATED | {"dgc", "threshold_reuse", "mstopk", "random_k", "threshold"}, OF_EVERYTHING
    ),
)
def test_density_one_takes_every_nonzero(name):
    selector = ALL[name](1.0)
    if name == "threshold":
        selector = sc.select.threshold(magnitude=0.0, density=1.0)
    function, state = jax.jit(selector.select), selector.init(SMALL)
    for acc in hard_vectors(SMALL).values():
        out = function(acc, state)
        state = out[1]
        np.testing.assert_array_equal(check(out, acc), np.flatnonzero(acc))
        assert out[2].overflow == 0
        if name in ESTIMATED | {"dgc"}:
            assert out[2].threshold == 0


@pytest.mark.parametrize("name", slow_but(("threshold",), SELECTORS))
def test_selectors_lose_nothing_over_steps(name):
    selector = SELECTORS[name](0.05)
    select, state = jax.jit(selector.select), selector.init(SMALL)
    residual, sent, given = (np.zeros(SMALL, np.float32) for _ in range(3))
    for step in range(30):
        # Integers: sums are exact.
        gradient = np.random.default_rng(step).integers(-3, 4, SMALL).astype(np.float32)
        given += gradient
        residual = residual + gradient
        out = select(residual, state)
        state, indices = out[1], check(out, residual)
        passed = len(selection.passing(residual, float(out[2].threshold)))
        if name == "threshold":
            assert out[2].overflow == passed - len(indices)
        elif name in ("bucketed", "mstopk", "random_k"):
            assert out[2].overflow == 0
        delivered = np.asarray(out[0].to_dense())
        residual, sent = residual - delivered, sent + delivered
    np.testing.assert_array_equal(sent + residual, given)
    assert sent.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_lowers_for_cuda(name):
    selector = ALL[name](0.1)
    state = selector.init(sc.Layout(((30, 8), (5,))))
    traced = jax.jit(selector.select).trace(np.zeros(245, np.float32), state)
    assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()


# Errors in a call: the message names the argument, its value and the fix.


def refused(error, words, function, *args):
    with pytest.raises(error) as raised:
        function(*args)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ALL)
def test_density_is_a_real_number_in_range(name):
    factory = ALL[name]
    for density in (0, 0.0, -1, 1.5, math.nan, math.inf, -math.inf):
        refused(ValueError, ("density", repr(density), "density=0.01"), factory, density)
    # An integer 1 may mean everything or 1 percent.
    for density in (1, np.int32(1)):
        words = ("density", repr(density), "density=1.0", "density=0.01")
        refused(ValueError, words, factory, density)
    for density in (True, "0.1", None, 1j, [0.1], np.array([0.1])):
        words = ("density", repr(density), type(density).__name__, "density=0.01")
        refused(TypeError, words, factory, density)
    for density in (1.0, np.float32(1), np.float64(0.5), 1e-300):
        assert factory(density).init(10) is not None

    def traced(density, acc):
        selector = factory(density)
        return selector.select(acc, selector.init(10))

    refused(TypeError, ("density", "traced", "static"), jax.jit(traced), 0.1, np.ones(10))


@pytest.mark.parametrize("name", ALL)
def test_accumulator_is_a_vector_of_floats(name):
    selector = ALL[name](0.1)
    state = selector.init(10)
    for dtype in ("int32", "uint8", "bool", "float64", "complex64"):
        acc = np.zeros(10, dtype)
        refused(TypeError, ("acc", dtype, "float32"), selector.select, acc, state)
    for shape in ((), (2, 5), (1, 10)):
        words = ("acc", str(shape), "Ravel")
        refused(ValueError, words, selector.select, jnp.zeros(shape), state)
    refused(ValueError, ("0",), selector.select, jnp.zeros((0,)), selector.init(1))
    for size in (0, -1, 2**31):
        refused(ValueError, ("size", str(size)), selector.init, size)
