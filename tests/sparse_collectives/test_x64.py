"""Under ``jax_enable_x64``: float64 is summed to its rounding, and float32 stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives._data import PaddedCOO
from tests.sparse_collectives import table
from tests.sparse_collectives.table import ALLREDUCES, SELECTORS, SHORT_CODECS

SIZE, SLOTS = 300, 40
TIGHT = {
    "ssar_split_allgather": {"slack": 1.0, "fill": 1.0},
    "dsar_split_allgather": {"slack": 1.5},
}
WIDE = {
    name: table.make(name, **TIGHT.get(name, row.room))
    for name, row in table.ALGORITHMS.items()
    if row.wide and row.room is not None
}
WIDE["sparse_allgather"] = table.make("sparse_allgather")
NARROW = {name: table.make(name) for name, row in table.ALGORITHMS.items() if not row.wide}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def selections(workers, disjoint=False):
    """Pairs of very different magnitudes, with indices in common unless ``disjoint``."""
    rng = np.random.default_rng(0)
    picks = [rng.choice(SIZE, SLOTS, replace=False) for _ in range(workers)]
    if disjoint:
        picks = rng.permutation(SIZE)[: workers * SLOTS].reshape(workers, SLOTS)
    values = rng.standard_normal((workers, SLOTS)) * 10.0 ** rng.integers(-9, 9, (workers, SLOTS))
    return np.asarray(picks, np.int32), values


def step_of(allreduce, workers):
    """The total, a worker's kept entries, and the info."""

    def step(indices, values):
        coo = PaddedCOO.from_pairs(indices, values, SIZE)
        state = allreduce.init(SIZE, workers)
        total, undelivered, _, info = allreduce.reduce(coo, state, axis="w")
        total = total.to_dense() if isinstance(total, PaddedCOO) else total
        return total, undelivered.residual(coo.to_dense(), coo), info

    return step


def reduced(allreduce, picks, values):
    step, given = step_of(allreduce, len(picks)), (jnp.asarray(picks), jnp.asarray(values))
    total, kept, info = sc.simulate(step, axis="w", axis_size=len(picks))(*given)
    return np.asarray(total), np.asarray(kept), info


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.one_in(3)
def test_float64_loses_nothing_but_its_rounding(x64, name, workers):
    picks, values = selections(workers, disjoint=name == "sparse_allgather")
    # The second scale is far beyond float32.
    for scale in (1.0, 1e280):
        total, kept, info = reduced(WIDE[name], picks, values * scale)
        assert total.dtype == kept.dtype == np.float64
        np.testing.assert_array_equal(total, np.broadcast_to(total[:1], total.shape))
        expected, magnitudes = np.zeros((2, SIZE))
        np.add.at(expected, picks, values * scale)
        np.add.at(magnitudes, picks, np.abs(values * scale))
        # Relative to the sum of magnitudes at an index, since values may cancel.
        atol = 4 * np.finfo(np.float64).eps * magnitudes
        assert (np.abs(total[0] + kept.sum(axis=0) - expected) <= atol).all()
        if name == "sparse_allgather":
            np.testing.assert_array_equal(total[0], expected)
    # In float32 the same sum is off by far more.
    rounded = (expected / 1e280).astype(np.float32) - expected / 1e280
    assert (np.abs(rounded) > 1e3 * atol / 1e280).any()
    if name in ("topk_a", "sparse_allgather"):
        # A value takes two words, so a pair has 1.5 times the words of a float32 pair.
        _, _, narrow = reduced(WIDE[name], picks, values.astype(np.float32))
        assert float(info.words[0]) == pytest.approx(1.5 * float(narrow.words[0]))


@pytest.mark.parametrize("name", [*NARROW, "bf16", "narrow16", "qsgd"])
def test_float64_is_refused_by_what_selects_or_rounds(x64, name):
    allreduce, match = NARROW.get(name), r"coo\.values must be float32.*got float64.*Cast it"
    if allreduce is None:
        allreduce, match = sc.allreduce.topk_a(codec=getattr(sc.wire, name)()), "got float64"
    with pytest.raises(TypeError, match=match):
        reduced(allreduce, *selections(3))


def of_64_bits(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.dtype(x.dtype).itemsize == 8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*SELECTORS, *SHORT_CODECS])
@pytest.mark.one_in(3)
def test_selectors_and_codecs_have_the_types_that_they_have_without_x64(x64, name, dtype):
    if name in SHORT_CODECS:
        codec = SHORT_CODECS[name]()

        def there_and_back(values, indices):
            encoded = codec.encode(PaddedCOO(values, indices, SIZE), jnp.uint32(0))
            return encoded, codec.decode(encoded.message, SIZE, values.dtype)

        like = [jax.ShapeDtypeStruct((3, SLOTS), each) for each in (dtype, "int32")]
        assert not of_64_bits(jax.eval_shape(there_and_back, *like))
        return
    selector = SELECTORS[name](0.05)
    state = jax.eval_shape(lambda: selector.init(SIZE))
    out = jax.eval_shape(selector.select, jax.ShapeDtypeStruct((SIZE,), dtype), state)
    assert not of_64_bits(out)
    assert jax.tree.map(lambda x: x.dtype, out[1]) == jax.tree.map(lambda x: x.dtype, state)


# Allreduces that trace for long have one number of workers, and Ok-Topk itself has both.
LONG = ("full_sums ok_topk", "ok_topk", "ok_topk rotation, 2 messages in flight")
LONG += ("ok_topk all_to_all", "ok_topk, balanced regions", "ok_topk, messages of several sizes")
LONG += (
    "ok_topk, no slack",
    "auto, ok_topk",
    "ring_sparse",
    "ok_topk, lossy",
    "ring_sparse, lossy",
)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, workers) for name in ALLREDUCES if name not in LONG for workers in (3, 4)),
        ("ring_sparse", 4),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in LONG),
        pytest.param("ok_topk", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(3)
def test_allreduces_have_the_types_that_they_have_without_x64(x64, name, workers):
    allreduce = ALLREDUCES[name].allreduce

    def step(coo, state):
        held = {"acc": coo.to_dense()} if allreduce.full_sums else {}
        return allreduce.reduce(coo, state, axis="w", **held)

    coo = PaddedCOO(
        jax.ShapeDtypeStruct((workers, SLOTS), "float32"),
        jax.ShapeDtypeStruct((workers, SLOTS), "int32"),
        SIZE,
    )
    state = jax.eval_shape(lambda: allreduce.init(SIZE, workers))
    assert not of_64_bits(state)
    out = jax.eval_shape(jax.vmap(step, axis_name="w", in_axes=(0, None)), coo, state)
    assert not of_64_bits(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "ok_topk rotation, 2 messages in flight"])
def test_float32_has_the_same_bits(name):
    picks, values = selections(4)
    allreduce = ALLREDUCES[name].allreduce
    without = reduced(allreduce, picks, values.astype(np.float32))
    with jax.enable_x64(True):
        within = reduced(allreduce, picks, values.astype(np.float32))
    for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(within), strict=True):
        np.testing.assert_array_equal(a, b)
