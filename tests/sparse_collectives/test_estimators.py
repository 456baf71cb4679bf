"""Selectors that estimate their threshold, against NumPy oracles."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_collectives.select import SIDCoState, dgc, gaussian_k, redsync, sidco, threshold_reuse
from tests import jax_internals
from tests.reference import estimators, selection, windows
from tests.sparse_collectives.helpers import slow, slow_but

SIZE = 10_007
K = 100
DENSITY = K / SIZE
# Below one row of the reductions, a multiple of it, and beside.
SIZES = ((1, 0.1), (2048, 0.1), (2051, 1e-9))
MOMENT_NAMES = ("normal", "half zeros", "ascending", "large at the end", "heavy tail", "not finite")

FACTORIES = {
    "gaussian_k": gaussian_k,
    "gaussian_k adjusted": functools.partial(gaussian_k, adjust=True),
    "redsync": redsync,
    "sidco exponential": sidco,
    "sidco gamma": functools.partial(sidco, distribution="gamma"),
    "sidco pareto": functools.partial(sidco, distribution="pareto"),
    "dgc": dgc,
}
WITHOUT_DGC = [name for name in FACTORIES if name != "dgc"]
SLOTS = {"redsync": 2.0, "dgc": 1.0}


@functools.cache
def selector(name, density=DENSITY):
    return FACTORIES[name](density=density)


@functools.cache
def select(name, density=DENSITY):
    return jax.jit(selector(name, density).select)


def capacity_of(name, k, size):
    return min(size, math.ceil(SLOTS.get(name, 1.25) * k))


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def laplace(size, seed=0):
    return np.random.default_rng(seed).laplace(size=size).astype(np.float32)


def check(out, acc, capacity, *, turn=None):
    """What holds for every selection; returns the selected indices."""
    coo, _, info = out
    assert coo.size == acc.size
    assert coo.indices.shape == coo.values.shape == (capacity,)
    assert coo.values.dtype == acc.dtype
    indices, values = np.asarray(coo.indices), np.asarray(coo.values)
    used = int(info.selected)
    assert (indices[used:] == acc.size).all()
    assert not bits_of(values[used:]).any()
    indices = indices[:used]
    assert (np.diff(indices) > 0).all()
    assert ((indices >= 0) & (indices < acc.size)).all()
    np.testing.assert_array_equal(bits_of(values[:used]), bits_of(acc[indices]))
    assert info.threshold.dtype == jnp.float32
    passed = selection.passing(acc, float(info.threshold))
    assert used == min(len(passed), capacity)
    assert info.overflow == len(passed) - used
    assert np.isin(indices, passed).all()
    if turn is not None:
        np.testing.assert_array_equal(indices, windows.window(passed, capacity, turn))
    # Conservation: what the buffer sends and what was not selected are the accumulator.
    kept = acc.copy()
    kept[indices] = 0
    sent = np.asarray(coo.to_dense())
    np.testing.assert_array_equal(np.where(np.isin(np.arange(acc.size), indices), sent, kept), acc)
    return indices


@pytest.fixture(params=FACTORIES)
def name(request):
    return request.param


class TestAll:
    @pytest.mark.parametrize("name", slow_but(("sidco exponential", "sidco pareto"), FACTORIES))
    def test_hard_vectors_step_after_step(self, name):
        state = selector(name).init(SIZE)
        types = types_of(state)
        for hard, acc in selection.hard_vectors(SIZE).items():
            out = select(name)(acc, state)
            indices = check(out, acc, capacity_of(name, K, SIZE))
            state = out[1]
            assert types_of(state) == types, hard
            # Something is selected wherever there is something to select.
            if name != "dgc":
                assert len(indices) >= min(1, np.count_nonzero(acc)), hard
        assert jax_internals.programs(select(name)) == 1

    @pytest.mark.parametrize(
        ("name", "size", "density"),
        [
            pytest.param(
                name, *each, marks=pytest.mark.slow if name == "dgc" and each[0] > 1 else ()
            )
            for name in FACTORIES
            for each in SIZES
        ],
    )
    def test_any_size(self, name, size, density):
        k = max(1, round(density * size))
        for hard in ("normal", "small integers", "not finite", "all zero"):
            acc = selection.hard_vector(hard, size)
            out = select(name, density)(acc, selector(name, density).init(size))
            check(out, acc, capacity_of(name, k, size), turn=None if name == "dgc" else 0)

    def test_density_one_takes_every_nonzero(self, name):
        state = selector(name, 1.0).init(1000)
        for acc in selection.hard_vectors(1000).values():
            out = select(name, 1.0)(acc, state)
            np.testing.assert_array_equal(check(out, acc, 1000), np.flatnonzero(acc))
            assert out[2].threshold == 0
            state = out[1]

    @pytest.mark.parametrize("dtype", ["bfloat16"])
    def test_sixteen_bit_values(self, name, dtype):
        acc = np.asarray(jnp.asarray(laplace(SIZE)).astype(dtype))
        check(select(name)(acc, selector(name).init(SIZE)), acc, capacity_of(name, K, SIZE))

    @pytest.mark.parametrize("name", [*WITHOUT_DGC, *slow("dgc")])
    @pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
    def test_the_scale_does_not_matter(self, name, scale):
        acc = laplace(SIZE)
        power = np.float32(2.0 ** round(math.log2(scale)))
        state = selector(name).init(SIZE)
        coo, _, _ = select(name)(acc, state)
        scaled, _, _ = select(name)(acc * power, state)
        np.testing.assert_array_equal(scaled.indices, coo.indices)

    def test_not_a_number_is_sent_and_hides_nothing(self, name):
        acc = laplace(SIZE)
        state = selector(name).init(SIZE)
        _, _, info = select(name)(acc, state)
        acc[17], acc[18], acc[SIZE - 1] = np.nan, np.inf, -np.inf
        out = select(name)(acc, state)
        check(out, acc, capacity_of(name, K, SIZE))
        if out[2].overflow == 0:
            assert np.isin([17, 18, SIZE - 1], out[0].indices).all()
        assert float(out[2].threshold) == pytest.approx(float(info.threshold), rel=0.1)
        assert int(out[2].selected) >= 0.9 * int(info.selected)

    @pytest.mark.slow
    def test_eager_jit_and_vmap_agree(self, name):
        names = ("normal", "few nonzeros", "not finite", "all equal")
        lanes = np.stack([selection.hard_vector(hard, SIZE) for hard in names])
        one = selector(name)
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), one.init(SIZE))
        batched, _, infos = jax.jit(jax.vmap(one.select))(lanes, state)
        for lane, acc in enumerate(lanes):
            out = select(name)(acc, one.init(SIZE))
            of_lane = (batched.indices[lane], infos.selected[lane], infos.overflow[lane])
            for a, b in zip(of_lane, (out[0].indices, out[2].selected, out[2].overflow)):
                np.testing.assert_array_equal(a, b, err_msg=names[lane])
        if name != "dgc":  # Its pieces are compiled one by one, for seconds.
            eager = one.select(jnp.asarray(lanes[0]), one.init(SIZE))
            np.testing.assert_array_equal(eager[0].indices, batched.indices[0])

    # Of `dgc` the k largest are selected, not a window.
    @pytest.mark.parametrize("name", slow_but({*WITHOUT_DGC} - {"sidco gamma"}, WITHOUT_DGC))
    def test_each_overflowing_entry_gets_its_turn(self, name):
        acc = selection.hard_vector("all equal", 500)
        state = selector(name, 0.1).init(500)
        seen = np.zeros(500, bool)
        # At some steps of sidco fewer than k = 50 have a slot.
        for _ in range(windows.steps_for_all(40, 500)):
            out = select(name, 0.1)(acc, state)
            state = out[1]
            seen[check(out, acc, capacity_of(name, 50, 500))] = True
        assert seen.all()


class TestThresholds:
    @pytest.mark.parametrize("hard", [*MOMENT_NAMES, "laplace"])
    def test_gaussian_k(self, hard):
        acc = laplace(SIZE) if hard == "laplace" else selection.hard_vector(hard, SIZE)
        expected = estimators.gaussian_k(acc, K)
        _, _, info = select("gaussian_k")(acc, jnp.int32(0))
        assert float(info.threshold) == pytest.approx(expected, rel=1e-4)
        _, _, info = select("gaussian_k adjusted")(acc, jnp.int32(0))
        expected = estimators.lowered(acc, expected, K)
        assert float(info.threshold) == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("hard", [*MOMENT_NAMES, "laplace"])
    def test_redsync(self, hard):
        acc = laplace(SIZE) if hard == "laplace" else selection.hard_vector(hard, SIZE)
        _, _, info = select("redsync")(acc, jnp.int32(0))
        assert float(info.threshold) == pytest.approx(estimators.redsync(acc, K), rel=1e-4)
        if hard != "not finite":
            assert K <= int(info.selected) <= 2 * K

    @pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
    @pytest.mark.parametrize("stages", [1, 2, 3, 4])
    @pytest.mark.parametrize("hard", ["normal", "half zeros", "laplace", "NaN"])
    def test_sidco(self, distribution, stages, hard):
        acc = selection.hard_vector(hard, SIZE) if hard in MOMENT_NAMES else laplace(SIZE)
        if hard == "NaN":
            acc[::1000] = np.nan
        state = SIDCoState(jnp.int32(0), jnp.int32(stages), jnp.float32(0))
        _, _, info = select(f"sidco {distribution}")(acc, state)
        expected = estimators.sidco(acc, K, distribution, stages)
        assert float(info.threshold) == pytest.approx(expected, rel=2e-3)

    @pytest.mark.slow
    def test_dgc_selects_the_largest_of_what_passes(self):
        size, k = 200_003, 2000
        acc = laplace(size)
        one = dgc(density=k / size, sample_share=0.05)
        function, state = jax.jit(one.select), one.init(size)
        thresholds = []
        for _ in range(8):
            out = function(acc, state)
            indices, state = check(out, acc, k), out[1]
            passed = selection.passing(acc, float(out[2].threshold))
            # 100 expected hits: five standard deviations.
            assert 0.5 * k < len(passed) < 1.6 * k
            if len(passed) > k:
                np.testing.assert_array_equal(indices, selection.topk(acc, k))
            thresholds.append(float(out[2].threshold))
        # A new sample at each step, and the same one for the same step.
        assert len(set(thresholds)) == 8
        assert float(function(acc, one.init(size))[2].threshold) == thresholds[0]

    def test_dgc_with_all_entries_as_the_sample_is_exact(self):
        for hard in selection.HARD_NAMES:
            acc = selection.hard_vector(hard, 1000)
            out = select("dgc", 0.01)(acc, jnp.int32(0))
            passed = selection.passing(acc, selection.kth_magnitude(acc, 10))
            assert int(out[2].selected) == min(10, len(passed)), hard
            if len(passed) <= 10:
                np.testing.assert_array_equal(check(out, acc, 10), selection.topk(acc, 10))


class TestFit:
    def test_gaussian_k_is_right_for_normal_entries(self):
        acc = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
        _, _, info = jax.jit(gaussian_k(density=0.01).select)(acc, jnp.int32(0))
        assert 800 < int(info.selected) < 1200

    @pytest.mark.slow
    def test_gaussian_k_selects_far_too_few_of_a_short_tail_and_threshold_reuse_does_not(self):
        # A wide body and no tail: two bumps at -1 and 1, and small entries.
        rng = np.random.default_rng(0)
        size, k = 100_000, 1000
        body = rng.choice([-1.0, 1.0], size) + 0.05 * rng.standard_normal(size)
        acc = np.where(rng.random(size) < 0.5, body, 0.01 * body).astype(np.float32)
        selected = {}
        for label, one in (
            ("gaussian_k", gaussian_k(density=0.01)),
            ("adjusted", gaussian_k(density=0.01, adjust=True)),
            ("threshold_reuse", threshold_reuse(density=0.01)),
        ):
            _, _, info = jax.jit(one.select)(acc, one.init(size))
            selected[label] = int(info.selected)
        assert selected["gaussian_k"] < k / 10
        assert selected["adjusted"] >= 3 * k / 4
        assert 0.9 * k < selected["threshold_reuse"] < 1.1 * k

    @pytest.mark.slow
    def test_the_stages_of_sidco_follow_the_count(self):
        # The tail of normal entries is shorter than exponential: one stage is not enough.
        one = sidco(density=0.01)
        function, state = jax.jit(one.select), one.init(100_000)
        acc = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
        stages, selected = [], []
        for _ in range(20):
            _, state, info = function(acc, state)
            stages.append(int(state.stages))
            selected.append(int(info.selected))
        assert stages[:4] == [1] * 4
        assert stages[4] == 2
        assert max(stages) <= 4
        assert abs(math.log(selected[-1] / 1000)) < abs(math.log(selected[0] / 1000))
        # And down again where far too many pass.
        function = jax.jit(sidco(density=0.01, period=1).select)
        crowded = np.where(np.arange(100_000) % 10 == 0, 1, 1e-6).astype(np.float32)
        state = SIDCoState(state.count, jnp.int32(3), jnp.float32(0))
        for expected in (2, 1, 1):
            _, state, _ = function(crowded, state)
            assert int(state.stages) == expected


class TestErrors:
    @pytest.mark.parametrize("density", [0, -1, 1.5, math.nan])
    def test_a_density_out_of_range(self, name, density):
        with pytest.raises(ValueError, match="density"):
            FACTORIES[name](density=density)

    @pytest.mark.parametrize(
        ("factory", "options"),
        [
            (gaussian_k, {"headroom": -0.1}),
            (gaussian_k, {"adjust": 1}),
            (redsync, {"headroom": math.nan}),
            (redsync, {"rounds": 0}),
            (sidco, {"headroom": None}),
            (sidco, {"distribution": "normal"}),
            (sidco, {"period": 0}),
            (sidco, {"tolerance": -1}),
            (sidco, {"max_stages": 1.5}),
            (dgc, {"sample_share": 0.0}),
            (dgc, {"sample_share": 1.5}),
            (dgc, {"seed": -1}),
        ],
    )
    def test_an_argument_out_of_range(self, factory, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            factory(density=0.1, **options)

    def test_an_accumulator_of_another_kind(self, name):
        one = selector(name)
        with pytest.raises(TypeError, match="acc"):
            one.select(np.zeros(10, np.int32), one.init(10))
        with pytest.raises(ValueError, match="acc"):
            one.select(np.zeros((2, 5), np.float32), one.init(10))
        with pytest.raises(ValueError, match="size"):
            one.init(0)
