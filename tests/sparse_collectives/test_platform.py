"""The GPU forms have the same bits as the portable forms; a CPU runs both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import _platform
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._sparse_ops._bits import running_sum
from tests.sparse_collectives import helpers, table

RNG = np.random.default_rng(0)


def of_both(function, *args):
    """The result of each form, compiled."""
    results = []
    for form in ("cpu", "cuda"):
        with helpers.traced_for(form):
            results.append(jax.jit(lambda *a: function(*a))(*args))
    return results


def same(function, *args):
    portable, gpu = of_both(function, *args)
    jax.tree.map(np.testing.assert_array_equal, portable, gpu)
    return portable


@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
@pytest.mark.parametrize("capacity", [7, 100, 2000])
def test_positions_of_set_bits_by_form_and_window(share, capacity):
    chosen = RNG.random(1603) < share
    words = np.packbits(np.pad(chosen, (0, -chosen.size % 32)), bitorder="little").view(np.uint32)
    expected = np.flatnonzero(chosen)
    for turn in (None, jnp.uint32(3)):
        found, count = same(
            lambda x, turn=turn: _compaction.set_positions(x, capacity, chosen.size, turn), words
        )
        assert count == expected.size
        taken = np.asarray(found)[: min(capacity, expected.size)]
        assert np.isin(taken, expected).all()
        assert (np.diff(taken) > 0).all()
        if turn is None or expected.size <= capacity:
            np.testing.assert_array_equal(taken, expected[:capacity])
        assert (np.asarray(found)[expected.size :] == chosen.size).all()


VECTORS = {
    "normal": RNG.standard_normal(5000),
    "ties": RNG.integers(-3, 4, 5000),
    "zeros": np.zeros(5000),
    "few": np.where(np.arange(5000) % 700 == 3, 2.0, 0.0),
    "wide": np.exp(20 * RNG.standard_normal(5000)),
    "not finite": np.where(np.arange(5000) % 900 == 1, np.inf, RNG.standard_normal(5000)),
    # More entries take fewer bits at a time.
    "many": RNG.standard_normal(600_000),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("share", [0, 0.01, 1])
@pytest.mark.one_in(3)
def test_kth_magnitude_and_how_many_reach_it(name, share):
    k = max(1, round(share * len(VECTORS[name])))
    bits = _bits.magnitude_bits(jnp.asarray(VECTORS[name], jnp.float32))
    pattern, count = same(lambda b: _kth_magnitude.bisect_and_count(b, k), bits)
    assert pattern == np.sort(np.asarray(bits))[-k]
    if pattern:
        assert count == np.sum(np.asarray(bits) >= np.asarray(pattern))


@pytest.mark.parametrize("shape", [(5,), (1 << 14,), (40_000,), (3, 20_001)])
def test_running_sums(shape):
    counts = RNG.integers(0, 40, shape)
    found = same(running_sum, jnp.asarray(counts, jnp.int32))
    np.testing.assert_array_equal(found, np.cumsum(counts, axis=-1))
    found = same(running_sum, jnp.asarray(counts > 20))
    np.testing.assert_array_equal(found, np.cumsum(counts > 20, axis=-1))


def test_running_sums_of_several_vectors_under_vmap():
    counts = jnp.asarray(RNG.integers(0, 3, (2, 20_000)), jnp.int32)
    np.testing.assert_array_equal(jax.vmap(running_sum)(counts), np.cumsum(counts, axis=-1))


@pytest.mark.parametrize("worth", [True, False])
def test_once_gives_what_the_other_branch_does_where_it_is_not_worth_it(worth):
    def of_positive(x, flag):
        return _platform.once(flag, lambda y: jnp.maximum(y, 0), jnp.zeros_like, x)

    x = jnp.asarray(np.linspace(-1, 2 if worth else 0, 20_000), jnp.float32)
    found = same(of_positive, x, jnp.asarray(worth))
    np.testing.assert_array_equal(found, np.maximum(x, 0))


@pytest.mark.parametrize("k", [1, 2, 30, 31, 32, 999, 1000])
@pytest.mark.parametrize("kind", ["apart", "two", "padded", "subnormal", "largest"])
@pytest.mark.one_in(3)
def test_kth_magnitude_by_interpolation_of_what_is_not_straight(kind, k):
    """Values far apart, at two places, after padding, and with patterns that are no logarithms."""
    values = {
        "apart": np.float32(10.0) ** RNG.integers(-37, 38, 1000),
        "two": np.where(np.arange(1000) < 31, 1e30, 1e-30),
        "padded": np.where(np.arange(1000) < 600, 0.0, 1 + RNG.random(1000)),
        "subnormal": RNG.integers(0, 2000, 1000).astype(np.int32).view(np.float32),
        "largest": np.full(1000, np.finfo(np.float32).max),
    }[kind]
    bits = _bits.magnitude_bits(jnp.asarray(values, jnp.float32))
    pattern, count = same(lambda b: _kth_magnitude.bisect_and_count(b, k), bits)
    assert pattern == np.sort(np.asarray(bits))[-k]
    if pattern:
        assert count == np.sum(np.asarray(bits) >= np.asarray(pattern))


@pytest.mark.parametrize("shape", [(1,), (32,), (1, 1003), (0,)])
def test_all_below_a_bound(shape):
    def finite(x):
        return _bits.all_below((x, np.inf))

    def small_as_well(x):
        return _bits.all_below((x, np.inf), (x, 0.5))

    x = RNG.standard_normal(shape).astype(np.float32)
    assert same(finite, jnp.asarray(x))
    assert same(small_as_well, jnp.asarray(x)) == np.all(np.abs(x) < 0.5)
    assert same(small_as_well, jnp.asarray(x / 100))
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, -1) if x.size else ():
            spoilt = x.copy()
            spoilt.flat[place] = bad
            assert not same(finite, jnp.asarray(spoilt))


@pytest.mark.parametrize(
    "name", helpers.slow_but(("adtopk",), ("topk", "threshold_reuse", "dgc", "adtopk"))
)
@pytest.mark.slow
def test_selectors_step_after_step(name):
    size = 200_000
    steps = [RNG.standard_normal(size) * (1 + 0.2 * step) for step in range(3)]
    # Then more entries at the k-th magnitude than slots, and fewer than k entries.
    steps += [np.round(steps[0]), np.where(np.arange(size) < 900, 1.0, 0.0)]
    selector = table.SELECTORS[name](0.01)
    states = [selector.init(size)] * 2
    for x in steps:
        x = jnp.asarray(x, jnp.float32)
        found = []
        for i, form in enumerate(("cpu", "cuda")):
            with helpers.traced_for(form):
                coo, states[i], info = jax.jit(lambda *a: selector.select(*a))(x, states[i])
            found.append((coo, info))
        jax.tree.map(np.testing.assert_array_equal, *found)


OPTIONS = {
    "ok_topk": {},
    "ok_topk, narrow8": {"codec": sc.wire.narrow8()},
    "ok_topk, balanced": {"regions": "balanced"},
    "partitioned_topk, few": {"bits": None},
    "spardl": {},
    "row_topk": {},
    "ssar_split_allgather": {},
}


@pytest.mark.parametrize("name", helpers.slow_but(("partitioned_topk, few",), OPTIONS))
@pytest.mark.slow
def test_allreduces_of_hard_data(name):
    cases, found = helpers.hard_accumulators(4, 600), {}
    for form in ("cpu", "cuda"):
        # Each form has its own, since the programs of an instance are compiled once.
        selector = sc.select.topk(density=0.05)
        allreduce = table.make(name.partition(",")[0], 0.05, **OPTIONS[name])
        with helpers.traced_for(form):
            for case, acc in cases.items():
                found[form, case] = helpers.run_once(selector, allreduce, acc)
    for case in cases:
        for field in ("total", "kept"):
            portable, gpu = found["cpu", case][field], found["cuda", case][field]
            np.testing.assert_array_equal(portable, gpu, case)


@pytest.mark.parametrize("name", ["partitioned_topk", "ok_topk"])
@pytest.mark.slow
def test_steps_of_an_optimizer(name):
    shapes = {"matrix": (40, 30), "other": (7, 100), "vector": (33,)}
    params = {k: jnp.asarray(RNG.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    params["matrix"] = params["matrix"].astype(jnp.bfloat16)
    steps = [
        {k: jnp.asarray(RNG.standard_normal((4, *x.shape)), x.dtype) for k, x in params.items()}
        for _ in range(3)
    ]
    found = []
    for form in ("cpu", "cuda"):
        allreduce = table.make(name, 0.05)
        tx = optax_ext.sparse_adamw(0.01, density=0.05, allreduce=allreduce, axis="workers")
        with helpers.traced_for(form):
            state = jax.vmap(lambda _, tx=tx: tx.init(params), axis_name="workers")(jnp.zeros(4))
            step = sc.simulate(lambda g, s, tx=tx: tx.update(g, s, params), axis_size=4)
            updates = []
            for gradients in steps:
                update, state = step(gradients, state)
                updates.append(update)
        found.append((updates, state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_program_holds_the_form_of_its_platform():
    selector = sc.select.topk(density=0.01)
    x = jax.ShapeDtypeStruct((300_000,), jnp.float32)
    state = jax.eval_shape(lambda: selector.init(300_000))
    traced = jax.jit(selector.select).trace(x, state)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "rocm", "tpu")
    }
    assert texts["cuda"].count("stablehlo.while") < texts["cpu"].count("stablehlo.while")
    assert texts["rocm"].count("stablehlo.while") == texts["cuda"].count("stablehlo.while")
    # Any other platform uses the portable form.
    assert texts["tpu"].count("stablehlo.while") == texts["cpu"].count("stablehlo.while")
    assert not any("stablehlo.case" in text and "platform" in text for text in texts.values())


def test_offsets_are_operands_of_one_kernel_for_all_parts_of_a_size():
    def parts(x):
        offsets = _platform.operands(range(0, 4000, 100))
        return [jnp.sqrt(jax.lax.dynamic_slice_in_dim(x, start, 100)) for start in offsets]

    x = jnp.arange(4000.0)
    compiled = jax.jit(parts).lower(x).compile()
    np.testing.assert_array_equal(jnp.concatenate(compiled(x)), jnp.sqrt(x))
    # Constants would be parts of the kernels: slices of 40 places.
    assert "slice={[" not in compiled.as_text()
    assert compiled.as_text().count("dynamic-slice(") == 40
    for form in ("cpu", "cuda"):
        with helpers.traced_for(form):
            assert [int(x) for x in _platform.operands(range(20))] == list(range(20))


def test_what_is_written_is_computed_once_on_a_cpu():
    """Two gathers read it; XLA would compute each entry that they read again."""

    def read_twice(x, at):
        found = _platform.written(jnp.sin, x)
        return found[at] + found[at[::-1]]

    x, at = jnp.linspace(0, 9, 4096), jnp.asarray(RNG.integers(0, 4096, 20_000))
    np.testing.assert_array_equal(same(read_twice, x, at), jnp.sin(x)[at] + jnp.sin(x)[at[::-1]])
    traced = jax.jit(read_twice).trace(x, at)
    cpu, cuda = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))
    assert "optimization_barrier" in cpu
    assert "optimization_barrier" not in cuda
    compiled = traced.lower().compile().as_text()
    of_sines = [line for line in compiled.splitlines() if " sine(" in line]
    assert len(of_sines) == 1
    assert "[4096]" in of_sines[0]


@pytest.mark.parametrize("bits", [None, 32])
@pytest.mark.one_in(2)
@pytest.mark.slow
def test_partitioned_topk_in_a_step_that_is_large_enough_to_have_branches(bits):
    size, workers = 300_000, 2
    allreduce, selector = sc.allreduce.partitioned_topk(bits=bits), sc.select.topk(density=0.06)

    def step(acc):
        state = allreduce.init(size, workers)
        mine = allreduce.local_view(acc, state, axis="workers")
        coo, _, _ = selector.select(mine, selector.init(mine.shape[0]))
        coo = allreduce.to_global(coo, size, state, axis="workers")
        total, undelivered, _, _ = allreduce.reduce(coo, state, axis="workers", acc=acc)
        return total.to_dense(), undelivered.residual(acc, coo)

    acc = jnp.asarray(RNG.standard_normal((workers, size)) ** 3, jnp.float32)
    total, residual = same(sc.simulate(step, axis="workers", axis_size=workers), acc)
    np.testing.assert_allclose(total[0] + np.sum(residual, 0), np.sum(acc, 0), atol=1e-4)
    # Apart from ties at the last magnitude, each of the two workers has chosen its share.
    assert np.count_nonzero(total[0]) == pytest.approx(0.06 * size, rel=0.01)
