"""The approximate, local and random selectors against NumPy, and their contracts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from tests import jax_internals
from tests.reference import more_selection, selection, windows
from tests.sparse_collectives.helpers import slow, slow_but

SIZE = 1003
# Above kth_magnitude.DIRECT_SIZE: candidates are compacted first.
LARGE = 140_001
DTYPES = ("float32", "bfloat16", "float16")
# Magnitudes that a CPU flushes to zero; MSTopK's search does not see them.
SUBNORMAL = ("subnormal", "smallest subnormals")
FACTORIES = {
    "bucketed": sc.select.bucketed,
    "mstopk": sc.select.mstopk,
    "random_k": sc.select.random_k,
    "threshold": functools.partial(sc.select.threshold, magnitude=1.0),
}


@pytest.fixture(params=FACTORIES)
def factory(request):
    return FACTORIES[request.param]


@functools.cache
def jitted(name, **options):
    selector = getattr(sc.select, name)(**options)
    return selector, jax.jit(selector.select)


def as_dtype(x, dtype):
    return np.asarray(jnp.asarray(x).astype(dtype))


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def k_of(density, size):
    return min(size, max(1, round(density * size)))


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def assert_same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def check(out, acc, capacity):
    """What holds for every selection; returns the selected indices."""
    coo, _, info = out
    assert coo.size == acc.size
    assert coo.indices.shape == coo.values.shape == (capacity,)
    assert (coo.indices.dtype, coo.values.dtype) == (jnp.int32, acc.dtype)
    assert (info.selected.dtype, info.overflow.dtype) == (jnp.int32, jnp.int32)
    assert info.threshold.dtype == jnp.float32
    indices, values = np.asarray(coo.indices), np.asarray(coo.values)
    used = int(info.selected)
    assert (indices[used:] == acc.size).all()
    assert not bits_of(values[used:]).any()
    assert (np.diff(indices[:used]) > 0).all()
    assert ((indices[:used] >= 0) & (indices[:used] < acc.size)).all()
    np.testing.assert_array_equal(bits_of(values[:used]), bits_of(acc[indices[:used]]))
    assert (acc[indices[:used]] != 0).all()
    return indices[:used]


class TestAll:
    @pytest.mark.parametrize(
        "factory", slow_but(("mstopk", "random_k", "threshold"), FACTORIES), indirect=True
    )
    @pytest.mark.parametrize("dtype", ["float32"])
    def test_density_one_takes_every_nonzero(self, factory, dtype):
        options = {"magnitude": 0.0} if "magnitude" in getattr(factory, "keywords", {}) else {}
        selector = factory(density=1.0, **options)
        select = jax.jit(selector.select)
        for x in selection.hard_vectors(SIZE).values():
            acc = as_dtype(x, dtype)
            out = select(acc, selector.init(SIZE))
            np.testing.assert_array_equal(check(out, acc, SIZE), np.flatnonzero(acc))
            assert out[2].overflow == 0

    @pytest.mark.parametrize(("size", "density"), [(1, 0.5), (33, 0.3)])
    def test_small_sizes(self, factory, size, density):
        acc = np.abs(selection.hard_vector("normal", size)) + 1
        selector = factory(density=density)
        out = jax.jit(selector.select)(acc, selector.init(size))
        assert len(check(out, acc, k_of(density, size))) == k_of(density, size)

    @pytest.mark.parametrize("factory", slow_but(("threshold",), FACTORIES), indirect=True)
    @pytest.mark.parametrize("size", [LARGE])
    def test_jit_and_vmap_give_the_same_bits(self, factory, size):
        names = ["normal", "ties at the top", "few nonzeros", "not finite", "all zero"]
        vectors = selection.hard_vectors(size)
        lanes = jnp.asarray(np.stack([vectors[name] for name in names]))
        selector = factory(density=0.02)
        state = selector.init(size)
        batched = jax.jit(jax.vmap(selector.select, in_axes=(0, None)))(lanes, state)
        select = jax.jit(selector.select)
        for lane, acc in enumerate(lanes):
            expected = select(acc, state)
            of_lane = jax.tree.map(lambda leaf, lane=lane: leaf[lane], (batched[0], batched[2]))
            assert_same_bits(of_lane, (expected[0], expected[2]))

    @pytest.mark.parametrize(
        "factory", slow_but(("random_k", "threshold"), FACTORIES), indirect=True
    )
    def test_state_keeps_its_type_and_steps_are_traced_once(self, factory):
        selector = factory(density=0.1)
        function, state = jax.jit(selector.select), selector.init(SIZE)
        types = types_of(state)
        for name in ("normal", "all zero", "not finite", "subnormal", "all equal"):
            _, state, _ = function(selection.hard_vector(name, SIZE), state)
            assert types_of(state) == types
        assert jax_internals.programs(function) == 1

    @pytest.mark.parametrize("factory", slow_but(("threshold",), FACTORIES), indirect=True)
    def test_runs_where_varying_types_are_checked(self, factory):
        size = LARGE
        selector = factory(density=0.02)

        def both(acc):
            return selector.select(acc, selector.init(size))[0].to_dense()

        acc = np.concatenate([selection.hard_vector("normal", size, seed) for seed in (0, 1)])
        mesh = jax.make_mesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec("workers")
        out = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec))(acc)
        expected = np.concatenate([jax.jit(both)(part) for part in acc.reshape(2, -1)])
        np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize("factory", slow_but(("threshold",), FACTORIES), indirect=True)
    def test_nothing_is_lost_over_steps(self, factory):
        selector = factory(density=0.05)
        select, state = jax.jit(selector.select), selector.init(SIZE)
        residual, sent, given = (np.zeros(SIZE, np.float32) for _ in range(3))
        for step in range(30):
            # Integers: sums are exact.
            gradient = np.random.default_rng(step).integers(-3, 4, SIZE).astype(np.float32)
            given += gradient
            residual = residual + gradient
            coo, state, info = select(residual, state)
            delivered = np.asarray(coo.to_dense())
            residual, sent = residual - delivered, sent + delivered
            passed = len(selection.passing(residual + delivered, float(info.threshold)))
            assert info.overflow == (
                passed - info.selected if factory is FACTORIES["threshold"] else 0
            )
        np.testing.assert_array_equal(sent + residual, given)
        assert sent.any()


class TestMstopk:
    def test_the_oracle_on_a_case_worked_by_hand(self):
        # Mean 3, maximum 10; thresholds 6.5 (1 entry), 4.75 (2), 3.875 (3).
        x = np.array([1, -1, 0, 2, 10, -5, 4, 1], np.float32)
        assert more_selection.mstopk(x, 1, 3, 0).tolist() == [4]
        assert more_selection.mstopk(x, 2, 2, 0).tolist() == [4, 5]
        # One is above 6.5, and three of the other nonzeros come along: another run at each step.
        others = np.array([0, 1, 3, 5, 6, 7])
        runs = [more_selection.mstopk(x, 4, 1, step).tolist() for step in range(5)]
        assert runs == [sorted([4, *windows.window(others, 3, step)]) for step in range(5)]
        assert len(set(map(tuple, runs))) > 1

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", *slow("float16")])
    @pytest.mark.parametrize(
        ("density", "samplings"), [(1e-9, 30), pytest.param(0.1, 4, marks=pytest.mark.slow)]
    )
    def test_small_vectors(self, dtype, density, samplings):
        self.follow(SIZE, density, samplings, dtype, selection.HARD_NAMES, steps=3)

    @pytest.mark.slow
    @pytest.mark.parametrize("samplings", [1, 5, 30])
    def test_large_vectors(self, samplings):
        self.follow(LARGE, 0.01, samplings, "float32", selection.HARD_NAMES, steps=2)

    @staticmethod
    def follow(size, density, samplings, dtype, names, steps):
        selector, select = jitted("mstopk", density=density, samplings=samplings)
        k = k_of(density, size)
        for name in names:
            acc = as_dtype(selection.hard_vector(name, size), dtype)
            state = selector.init(size)
            for step in range(steps):
                out = select(acc, state)
                state = out[1]
                indices = check(out, acc, k)
                assert len(indices) == min(k, np.count_nonzero(acc)), name
                # Where neighbors are one rounding apart, that of the threshold decides.
                if name not in SUBNORMAL and (samplings == 30 or name != "neighbors"):
                    expected = more_selection.mstopk(acc, k, samplings, step)
                    np.testing.assert_array_equal(indices, expected, err_msg=f"{name} {step}")

    @pytest.mark.parametrize("name", ["normal", "heavy tail"])
    @pytest.mark.parametrize("size", [SIZE, *slow(LARGE)])
    def test_thirty_samplings_find_the_exact_selection(self, name, size):
        selector, select = jitted("mstopk", density=0.01)
        for seed in range(5):
            acc = selection.hard_vector(name, size, seed)
            indices = check(select(acc, selector.init(size)), acc, k_of(0.01, size))
            assert np.isin(indices, selection.topk(acc, len(indices))).mean() >= 0.99

    @pytest.mark.slow
    def test_a_misleading_sample_changes_nothing(self):
        selector, select = jitted("mstopk", density=0.01)
        for seed in range(3):
            # A period that the strided sample sees only in part.
            acc = selection.hard_vector("normal", LARGE, seed)
            acc = np.where(np.arange(LARGE) % 3 == seed, acc, acc * 1e-3).astype(np.float32)
            indices = check(select(acc, selector.init(LARGE)), acc, 1400)
            np.testing.assert_array_equal(indices, selection.topk(acc, 1400))

    def test_entries_between_the_thresholds_take_turns(self):
        selector, select = jitted("mstopk", density=0.1)
        acc, state = np.full(SIZE, -0.75, np.float32), selector.init(SIZE)
        seen = np.zeros(SIZE, bool)
        for _ in range(windows.steps_for_all(100, SIZE)):
            out = select(acc, state)
            state = out[1]
            seen[check(out, acc, 100)] = True
        assert seen.all()

    @pytest.mark.parametrize("scale", [1e-37, 1e34])
    def test_extreme_scales(self, scale):
        selector, select = jitted("mstopk", density=0.1)
        acc = (selection.hard_vector("normal", SIZE) * scale).astype(np.float32)
        indices = check(select(acc, selector.init(SIZE)), acc, 100)
        np.testing.assert_array_equal(indices, selection.topk(acc, 100))


class TestBucketed:
    @pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32", "float16")])
    @pytest.mark.parametrize(
        ("density", "bucket"), [pytest.param(0.01, 512, marks=pytest.mark.slow), (0.5, 97)]
    )
    def test_every_bucket_is_exact(self, dtype, density, bucket):
        self.follow(SIZE, density, bucket, dtype)

    @pytest.mark.slow
    @pytest.mark.parametrize(("density", "bucket"), [(0.01, 512), (0.01, 2**17)])
    def test_large_vectors(self, density, bucket):
        self.follow(LARGE, density, bucket, "float32")

    @staticmethod
    def follow(size, density, bucket, dtype):
        selector, select = jitted("bucketed", density=density, bucket=bucket)
        capacity = size // bucket * k_of(density, bucket)
        capacity += k_of(density, size % bucket) if size % bucket else 0
        for name, x in selection.hard_vectors(size).items():
            acc = as_dtype(x, dtype)
            out = select(acc, selector.init(size))
            indices = check(out, acc, capacity)
            expected = more_selection.bucketed(acc, density, bucket)
            np.testing.assert_array_equal(indices, expected, err_msg=name)
            assert out[1] == ()
            assert out[2].overflow == 0

    @pytest.mark.parametrize("layout", ["one column", "ties in one bucket", *slow("one group")])
    def test_large_entries_that_crowd_one_group(self, layout):
        acc = selection.hard_vector("normal", 4096)
        if layout == "one group":
            acc[512::32] *= 100
        elif layout == "one column":
            acc[16:1024:32] = 7
        else:
            acc[512:1024] = -1
        selector, select = jitted("bucketed", density=0.01)
        indices = check(select(acc, selector.init(4096)), acc, 40)
        np.testing.assert_array_equal(indices, more_selection.bucketed(acc, 0.01, 512))

    def test_a_density_below_one_in_a_bucket_takes_one_of_each(self):
        selector, select = jitted("bucketed", density=1e-6, bucket=64)
        acc = selection.hard_vector("normal", 640)
        indices = check(select(acc, selector.init(640)), acc, 10)
        assert (indices // 64).tolist() == list(range(10))

    def test_a_bucket_larger_than_n_is_exact_topk(self):
        selector, select = jitted("bucketed", density=0.1, bucket=2**20)
        acc = selection.hard_vector("heavy tail", SIZE)
        indices = check(select(acc, selector.init(SIZE)), acc, 100)
        np.testing.assert_array_equal(indices, selection.topk(acc, 100))

    @pytest.mark.parametrize("bucket", [0, -32, 64.0, True, None])
    def test_a_bucket_that_is_no_positive_integer(self, bucket):
        with pytest.raises(ValueError, match="bucket must be"):
            sc.select.bucketed(density=0.1, bucket=bucket)


class TestThreshold:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("magnitude", [0, 1e-45, 1.0, 1e300])
    def test_all_that_reaches_the_magnitude(self, dtype, magnitude):
        selector, select = jitted("threshold", magnitude=magnitude, density=0.25)
        for name, x in selection.hard_vectors(SIZE).items():
            acc, state = as_dtype(x, dtype), selector.init(SIZE)
            with np.errstate(over="ignore"):
                passed = len(selection.passing(acc, float(np.float32(magnitude))))
                for step in range(3):
                    expected = more_selection.threshold(acc, magnitude, 251, step)
                    out = select(acc, state)
                    state, info = out[1:]
                    indices = check(out, acc, 251)
                    np.testing.assert_array_equal(indices, expected, err_msg=name)
                    assert info.selected + info.overflow == passed
                    assert bits_of(info.threshold) == bits_of(np.float32(magnitude))

    def test_overflowing_entries_take_turns_and_nothing_is_lost(self):
        selector, select = jitted("threshold", magnitude=0.5, density=0.1)
        residual, state = selection.hard_vector("normal", SIZE), selector.init(SIZE)
        fixed, seen = residual.copy(), np.zeros(SIZE, bool)
        passing = selection.passing(fixed, 0.5)
        for _ in range(windows.steps_for_all(100, len(passing))):
            out = select(fixed, state)
            state = out[1]
            seen[check(out, fixed, 100)] = True
            assert out[2].overflow == len(passing) - 100
        np.testing.assert_array_equal(np.flatnonzero(seen), passing)

    @pytest.mark.parametrize("magnitude", [-1, math.nan, "1", None, True])
    def test_a_magnitude_out_of_range(self, magnitude):
        with pytest.raises(ValueError, match=r"magnitude must be a number in \[0.0, inf\]"):
            sc.select.threshold(magnitude=magnitude, density=0.1)


def draws(size, density, steps, **options):
    """``i32[steps, k]``: the indices of consecutive steps on a vector of ones."""
    selector = sc.select.random_k(density=density, **options)

    def step(state, _):
        coo, state, _ = selector.select(jnp.ones(size), state)
        return state, coo.indices

    return np.asarray(jax.jit(lambda: jax.lax.scan(step, selector.init(size), length=steps)[1])())


class TestRandomK:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("density", [1e-9, 0.9])
    def test_zeros_are_drawn_and_not_sent(self, dtype, density):
        selector, select = jitted("random_k", density=density)
        k = k_of(density, SIZE)
        for x in selection.hard_vectors(SIZE).values():
            acc, state = as_dtype(x, dtype), selector.init(SIZE)
            for _ in range(3):
                drawn = check(select(np.ones_like(acc), state), np.ones_like(acc), k)
                assert len(drawn) == k
                out = select(acc, state)
                state = out[1]
                np.testing.assert_array_equal(check(out, acc, k), drawn[acc[drawn] != 0])

    @pytest.mark.parametrize(
        ("size", "density"),
        [(2, 0.5), (3, 0.3), (7, 0.3), (64, 0.02), (65, 0.95), (1000, 0.3), (4096, 0.02)],
    )
    def test_draws_are_distinct_and_uniform(self, size, density):
        steps = 1500
        indices = draws(size, density, steps)
        k = k_of(density, size)
        assert indices.shape == (steps, k)
        assert (np.diff(indices) > 0).all()
        assert (indices[:, 0] >= 0).all()
        assert (indices[:, -1] < size).all()
        if k < size:
            counts = np.bincount(indices.ravel(), minlength=size)
            # Without replacement the counts vary less, by 1 - k / n.
            spread = (counts - counts.mean()) / math.sqrt(1 - k / size)
            assert more_selection.chi_square(spread + counts.mean()) < 4

    def test_pairs_of_indices_are_uniform(self):
        indices = draws(64, 2 / 64, 40_000)
        counts = np.zeros((64, 64))
        np.add.at(counts, (indices[:, 0], indices[:, 1]), 1)
        assert abs(more_selection.chi_square(counts[np.triu_indices(64, 1)])) < 5

    def test_gaps_at_a_large_size_are_those_of_chance(self):
        # Gaps of a random subset are geometric: their deviation is their mean.
        gaps = np.diff(draws(LARGE, 0.01, 20)).ravel()
        assert abs(gaps.std() / gaps.mean() - 1) < 0.03

    def test_steps_and_seeds_differ(self):
        first, second = draws(SIZE, 0.1, 2)
        other = draws(SIZE, 0.1, 1, seed=1)[0]
        for left, right in ((first, second), (first, other), (second, other)):
            assert len(np.intersect1d(left, right)) < 40
        np.testing.assert_array_equal(draws(SIZE, 0.1, 2), [first, second])

    @pytest.mark.slow
    @pytest.mark.parametrize("same", [True, False])
    def test_workers_agree_or_differ_by_option(self, same):
        axis = None if same else "workers"
        selector = sc.select.random_k(density=0.1, same_on_all_workers=same, axis=axis)
        select = sc.simulate(selector.select, axis_size=4, in_axes=(0, None))
        indices = np.asarray(select(jnp.ones((4, SIZE)), selector.init(SIZE))[0].indices)
        for left in range(4):
            for right in range(left):
                shared = len(np.intersect1d(indices[left], indices[right]))
                assert shared == 100 if same else shared < 40

    def test_arguments_out_of_range(self):
        for seed in (-1, 2**31, 1.0, True, None):
            with pytest.raises(ValueError, match="seed must be"):
                sc.select.random_k(density=0.1, seed=seed)
        for same, axis in ((True, "workers"), (False, None)):
            with pytest.raises(ValueError, match="same_on_all_workers"):
                sc.select.random_k(density=0.1, same_on_all_workers=same, axis=axis)
        with pytest.raises(ValueError, match="same_on_all_workers must be True or False"):
            sc.select.random_k(density=0.1, same_on_all_workers=1)
        selector = sc.select.random_k(density=0.1, same_on_all_workers=False, axis="workers")
        with pytest.raises(ValueError, match="not bound"):
            selector.select(jnp.ones(10), selector.init(10))


class TestErrors:
    @pytest.mark.parametrize("density", [0, -1, 1.5, math.nan, math.inf])
    def test_a_density_out_of_range(self, factory, density):
        with pytest.raises(ValueError, match="density must be"):
            factory(density=density)

    @pytest.mark.parametrize("density", [True, "0.1", None])
    def test_a_density_that_is_no_number(self, factory, density):
        with pytest.raises(TypeError, match="density must be"):
            factory(density=density)

    @pytest.mark.parametrize("samplings", [0, -1, 1.5, True, None])
    def test_samplings_that_are_no_positive_integer(self, samplings):
        with pytest.raises(ValueError, match="samplings must be"):
            sc.select.mstopk(density=0.1, samplings=samplings)

    def test_an_accumulator_of_another_kind(self, factory):
        selector = factory(density=0.1)
        with pytest.raises(TypeError, match="acc must be"):
            selector.select(np.zeros(10, np.int32), selector.init(10))
        with pytest.raises(ValueError, match="acc must have one dimension"):
            selector.select(jnp.zeros((2, 5)), selector.init(10))
        with pytest.raises(ValueError, match="size must be at least 1"):
            selector.init(0)
