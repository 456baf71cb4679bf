"""Layouts, selection by layer, and ADTopk with its two variants."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.reference import selection, windows
from tests.sparse_collectives.helpers import slow
from tests.sparse_collectives.selecting import DTYPES, as_dtype, check, jitted, k_of

# Two layers of one shape, rows of one entry and of a partial word, and a layer without entries.
SHAPES = ((3, 2, 4, 9), (9,), (70, 12), (70, 12), (0, 3), (), (33, 1), (1, 40))
LAYOUT = sc.Layout(SHAPES)
# Rows long enough for bounds from groups, in each of the memory orders.
LONG = sc.Layout(((700, 3), (3, 700), (7, 3, 100), (640,)))


def test_layout_has_the_layers_of_a_tree_in_the_order_of_its_leaves():
    assert LAYOUT.sizes == (216, 9, 840, 840, 0, 1, 33, 40)
    assert LAYOUT.offsets == (0, 216, 225, 1065, 1905, 1905, 1906, 1939)
    assert LAYOUT.size == 1979
    params = {"b": jnp.zeros((2, 3)), "a": np.zeros(4)}
    assert sc.Layout.of(params).shapes == ((4,), (2, 3))
    # A static part of a state.
    assert jax.tree.leaves(LAYOUT) == []
    assert jax.jit(lambda layout: layout)(LAYOUT) == LAYOUT


def test_layout_says_what_is_wrong():
    for shapes in ((), ((0, 4),), ((2**16, 2**15),)):
        with pytest.raises(ValueError, match="size must be"):
            sc.Layout(shapes)
    for size in (3.0, "3", None, (3,), True):
        with pytest.raises(TypeError, match="Layout"):
            sc.select.topk(density=0.1).init(size)
    selector = sc.select.published.adtopk(density=0.1)
    with pytest.raises(ValueError, match="acc has 5 entries"):
        selector.select(jnp.zeros(5), selector.init(LAYOUT))
    # An axis that some layers do not have.
    sc.select.published.adtopk(density=0.1, row_axis=1).init(sc.Layout(((4,), (6, 1, 2))))
    for row_axis, shapes in ((-3, ((3, 2, 4), (2, 3))), (5, ((4,), (6, 1, 2)))):
        with pytest.raises(ValueError, match="row_axis"):
            sc.select.published.adtopk(density=0.1, row_axis=row_axis).init(sc.Layout(shapes))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "density", "row_axis"),
    [
        *((LAYOUT, 0.1, axis) for axis in (-1, 0)),
        *((LONG, 0.01, -1), (LONG, 0.4, 0), (sc.Layout(((5, 7, 11), (2, 3, 70))), 0.1, 1)),
        # At least one entry of each row, and all entries.
        *((LAYOUT, density, -1) for density in (1e-9, 1.0)),
    ],
)
def test_adtopk_is_exact_in_every_row(layout, density, row_axis, dtype):
    selector, select = jitted("adtopk", density=density, row_axis=row_axis)
    state = selector.init(layout)
    for name, x in selection.hard_vectors(layout.size).items():
        acc = as_dtype(x, dtype)
        out = select(acc, state)
        expected = selection.adtopk(acc, layout.shapes, density, row_axis)
        np.testing.assert_array_equal(check(out, acc), expected, err_msg=name)
        assert out[2].overflow == 0


@pytest.mark.slow
@pytest.mark.parametrize("crowd", ["one group", "ties in one row", "one row in order"])
def test_rows_that_crowd_their_slots_are_exact(crowd):
    layer = selection.hard_vector("normal", 4 * 2048).reshape(4, 2048)
    if crowd == "one group":
        layer[1, 3::128] *= 1000
    else:
        layer[2] = 5 if "ties" in crowd else np.sort(np.abs(layer[2]))
    for axis, matrix in ((0, layer), (-1, layer.T.copy())):
        layout, acc = sc.Layout((matrix.shape,)), matrix.ravel()
        selector, select = jitted("adtopk", density=0.01, row_axis=axis)
        expected = selection.adtopk(acc, layout.shapes, 0.01, axis)
        np.testing.assert_array_equal(check(select(acc, selector.init(layout)), acc), expected)


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_takes_k_of_each_layer_and_interleaved_of_rows_and_layers_in_turn(density):
    wise = sc.select.layerwise(sc.select.topk(density=density))
    select, state = jax.jit(wise.select), wise.init(LAYOUT)
    interleaved, in_turn = jitted("adtopk_interleaved", density=density)
    other = interleaved.init(LAYOUT)
    for step, (name, acc) in enumerate(selection.hard_vectors(LAYOUT.size).items()):
        out, turn = select(acc, state), in_turn(acc, other)
        state, other = out[1], turn[1]
        of_layers = selection.layerwise_topk(acc, SHAPES, density)
        np.testing.assert_array_equal(check(out, acc), of_layers, err_msg=name)
        expected = of_layers if step % 2 else selection.adtopk(acc, SHAPES, density)
        np.testing.assert_array_equal(check(turn, acc), expected, err_msg=name)
        # Without layers it is the selector itself.
        alone = check(select(acc, wise.init(acc.size)), acc)
        np.testing.assert_array_equal(alone, selection.topk(acc, k_of(density, acc.size)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold_reuse", "gaussian_k", "dgc", "mstopk"])
def test_layerwise_is_the_selector_on_each_layer_with_a_state_of_its_own(name):
    inner, one = jitted(name, density=0.1)
    layout = sc.Layout(((20, 10), (200,), (64,)))
    wise = sc.select.layerwise(inner)
    select, state = jax.jit(wise.select), wise.init(layout)
    states = [inner.init(size) for size in layout.sizes]
    rng = np.random.default_rng(0)
    for step in range(6):
        acc = rng.standard_normal(layout.size).astype(np.float32) * 1.1**step
        coo, state, info = select(acc, state)
        expected, overflow = [], 0
        for layer, (offset, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
            part, states[layer], inside = one(acc[offset : offset + size], states[layer])
            expected.append(offset + np.asarray(part.indices)[: int(inside.selected)])
            overflow += int(inside.overflow)
        np.testing.assert_array_equal(check((coo, state, info), acc), np.concatenate(expected))
        assert info.overflow == overflow


@pytest.mark.parametrize("around", ["random_k", *slow("scheduled")])
def test_layers_of_one_size_draw_other_random_indices(around):
    inner = sc.select.random_k(density=0.1)
    if around == "scheduled":
        inner = sc.select.scheduled(inner, 0.1)
    layers, length, steps = 8, 1000, 30
    wise = sc.select.layerwise(inner)
    select, state = jax.jit(wise.select), wise.init(sc.Layout(((length,),) * layers))
    alone, own = jax.jit(inner.select), inner.init(length)
    acc = np.ones(layers * length, np.float32)
    common = []
    for _ in range(steps):
        coo, state, info = select(acc, state)
        drawn = (
            check((coo, state, info), acc).reshape(layers, length // 10)
            - length * np.arange(layers)[:, None]
        )
        first, own, _ = alone(acc[:length], own)
        np.testing.assert_array_equal(drawn[0], first.indices)
        sets = [set(row) for row in drawn]
        common += [len(a & b) for i, a in enumerate(sets) for b in sets[:i]]
    # Two independent draws of 100 of 1,000 have ten in common, with a deviation of 2.9.
    assert 9 < np.mean(common) < 11
    assert max(common) < 30


@pytest.mark.slow
@pytest.mark.parametrize("headroom", [0.0, math.inf])
@pytest.mark.parametrize("drift", [1.02, 1.3], ids=["steady", "moving"])
def test_threshold_follows_algorithm_2(drift, headroom):
    steps, warmup, period, density = 40, 4, 3, 0.1
    layout = sc.Layout(((40, 12), (40, 12), (90,)))
    options = {"steps": steps, "warmup": warmup, "period": period, "headroom": headroom}
    selector, select = jitted("adtopk_threshold", density=density, **options)
    layers = [selection.ThresholdLayer(x, density, steps, warmup, period) for x in layout.shapes]
    places = list(selection.slices(layout.shapes))
    # Slots for the rows, or for all entries that pass.
    slots = [len(selection.of_rows(np.ones(math.prod(x)), x, density, -1)) for x, _ in places]
    state, rng, waits = selector.init(layout), np.random.default_rng(1), 0
    base = rng.standard_normal(layout.size)
    for step in range(steps):
        noise = 0.1 * rng.standard_normal(layout.size)
        acc = ((base + noise) * drift**step).astype(np.float32)
        coo, state, info = select(acc, state)
        passed = [at.start + layer.step(acc[at]) for layer, (_, at) in zip(layers, places)]
        expected = np.concatenate(passed)
        if headroom == 0:
            shown = [windows.window(each, most, step) for each, most in zip(passed, slots)]
            assert info.overflow == len(expected) - sum(map(len, shown))
            expected = np.concatenate(shown)
        np.testing.assert_array_equal(check((coo, state, info), acc), expected, f"{step}")
        waits += int(info.overflow)
    periods = np.concatenate([s.period for s in state.states])
    assert periods.tolist() == [layer.period for layer in layers]
    taken = {branch for layer in layers for branch in layer.branches}
    assert taken >= {"layer", "evaluate"} | ({"rows", "reuse"} if drift < 1.1 else set())
    assert (waits > 0) == (headroom == 0)
