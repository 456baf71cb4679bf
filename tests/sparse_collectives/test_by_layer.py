"""Layouts, selection by layer, and ADTopk with its two variants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.reference import by_layer, selection, windows
from tests.sparse_collectives.helpers import slow
from tests.sparse_collectives.selecting import as_dtype, check, jitted

# Two layers of one shape, rows of one entry and of no whole word, no entries at all.
SHAPES = ((3, 2, 4, 9), (9,), (70, 12), (70, 12), (0, 3), (), (33, 1), (1, 40))
LAYOUT = sc.Layout(SHAPES)
# Rows long enough for bounds from groups, in each of the memory orders.
LONG = sc.Layout(((700, 3), (3, 700), (7, 3, 100), (640,)))


@functools.cache
def layerwise_topk(density):
    selector = sc.select.layerwise(sc.select.topk(density=density))
    return selector, jax.jit(selector.select)


def test_sizes_and_offsets():
    assert LAYOUT.sizes == (216, 9, 840, 840, 0, 1, 33, 40)
    assert LAYOUT.offsets == (0, 216, 225, 1065, 1905, 1905, 1906, 1939)
    assert LAYOUT.size == 1979


def test_of_a_tree_is_in_the_order_of_its_leaves():
    params = {"b": jnp.zeros((2, 3)), "a": np.zeros(4)}
    assert sc.Layout.of(params).shapes == ((4,), (2, 3))


def test_is_a_static_part_of_a_state():
    assert jax.tree.leaves(LAYOUT) == []
    assert jax.jit(lambda layout: layout)(LAYOUT) == LAYOUT


@pytest.mark.parametrize("shapes", [(), ((0, 4),), ((2**16, 2**15),)])
def test_of_no_entries_or_too_many(shapes):
    with pytest.raises(ValueError, match="size must be"):
        sc.Layout(shapes)


@pytest.mark.parametrize("size", [3.0, "3", None, (3,), True])
def test_a_size_that_is_neither(size):
    with pytest.raises(TypeError, match="Layout"):
        sc.select.topk(density=0.1).init(size)


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_takes_k_of_each_layer(density):
    selector, select = layerwise_topk(density)
    state = selector.init(LAYOUT)
    for name, acc in selection.hard_vectors(LAYOUT.size).items():
        out = select(acc, state)
        state, expected = out[1], by_layer.layerwise_topk(acc, SHAPES, density)
        np.testing.assert_array_equal(check(out, acc), expected, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold_reuse", "gaussian_k", "dgc", "mstopk"])
def test_is_the_selector_on_each_layer_with_a_state_of_its_own(name):
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
    # Of two independent draws of 100 of 1000 ten are in common, with a deviation of 2.9.
    assert 9 < np.mean(common) < 11
    assert max(common) < 30


def test_of_a_number_of_entries_is_the_selector_itself():
    acc = selection.hard_vector("normal", 500)
    selector, select = layerwise_topk(0.02)
    out = select(acc, selector.init(500))
    np.testing.assert_array_equal(check(out, acc), selection.topk(acc, 10))


def test_a_hundred_equal_layers_are_one_program():
    def program(layers):
        selector = sc.select.layerwise(sc.select.topk(density=0.1))
        layout = sc.Layout(((30, 10),) * layers)
        state = selector.init(layout)
        acc = jax.ShapeDtypeStruct((layout.size,), jnp.float32)
        return len(jax.jit(selector.select).lower(acc, state).as_text().splitlines())

    assert program(100) <= program(2) + 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("layout", "density", "row_axis"),
    [(LAYOUT, 0.1, -1), (LAYOUT, 0.1, 0), (LONG, 0.01, -1), (LONG, 0.4, 0)],
    ids=["last", "first", "long last", "long first, dense"],
)
def test_every_row_is_exact(layout, density, row_axis, dtype):
    follow(layout, density, row_axis, dtype)


@pytest.mark.slow
def test_an_axis_in_the_middle():
    follow(sc.Layout(((5, 7, 11), (2, 3, 70))), 0.1, 1, "float32")


def follow(layout, density, row_axis, dtype):
    selector, select = jitted("adtopk", density=density, row_axis=row_axis)
    state = selector.init(layout)
    for name, x in selection.hard_vectors(layout.size).items():
        acc = as_dtype(x, dtype)
        out = select(acc, state)
        expected = by_layer.adtopk(acc, layout.shapes, density, row_axis)
        np.testing.assert_array_equal(check(out, acc), expected, err_msg=name)
        assert out[2].overflow == 0


@pytest.mark.slow
@pytest.mark.parametrize("crowd", ["one group", "ties in one row", "one row in order"])
def test_rows_that_crowd_their_slots(crowd):
    layer = selection.hard_vector("normal", 4 * 2048).reshape(4, 2048)
    if crowd == "one group":
        layer[1, 3::128] *= 1000
    elif crowd == "ties in one row":
        layer[2] = 5
    else:
        layer[3] = np.sort(np.abs(layer[3]))
    for axis, matrix in ((0, layer), (-1, layer.T.copy())):
        layout = sc.Layout((matrix.shape,))
        selector, select = jitted("adtopk", density=0.01, row_axis=axis)
        out = select(matrix.ravel(), selector.init(layout))
        expected = by_layer.adtopk(matrix.ravel(), layout.shapes, 0.01, axis)
        np.testing.assert_array_equal(check(out, matrix.ravel()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("density", [1e-9, 0.001, 0.05])
def test_leaves_no_row_out(density):
    acc = selection.hard_vector("heavy tail", LAYOUT.size)
    selector, select = jitted("adtopk", density=density)
    chosen = set(check(select(acc, selector.init(LAYOUT)), acc).tolist())
    for shape, at in by_layer.slices(SHAPES):
        for row in by_layer.rows(shape, -1):
            assert chosen & set((at.start + row).tolist())


@pytest.mark.slow
def test_density_one_takes_every_nonzero():
    acc = selection.hard_vector("half zeros", LAYOUT.size)
    selector, select = jitted("adtopk", density=1.0)
    out = select(acc, selector.init(LAYOUT))
    np.testing.assert_array_equal(check(out, acc), np.flatnonzero(acc))


@pytest.mark.parametrize("row_axis", [1, -3, 5])
def test_an_axis_that_a_layer_has_not(row_axis):
    layout = sc.Layout(((3, 2, 4), (2, 3))) if row_axis < 0 else sc.Layout(((4,), (6, 1, 2)))
    selector = sc.select.published.adtopk(density=0.1, row_axis=row_axis)
    if row_axis == 1:
        selector.init(layout)
    else:
        with pytest.raises(ValueError, match="row_axis"):
            selector.init(layout)


def test_a_buffer_of_another_size():
    selector = sc.select.published.adtopk(density=0.1)
    with pytest.raises(ValueError, match="acc has 5 entries"):
        selector.select(jnp.zeros(5), selector.init(LAYOUT))


@pytest.mark.slow
def test_interleaved_takes_rows_and_layers_in_turn():
    selector, select = jitted("adtopk_interleaved", density=0.1)
    state = selector.init(LAYOUT)
    for step in range(5):
        acc = selection.hard_vector("normal", LAYOUT.size, seed=step)
        coo, state, info = select(acc, state)
        oracle = by_layer.layerwise_topk if step % 2 else by_layer.adtopk
        np.testing.assert_array_equal(check((coo, state, info), acc), oracle(acc, SHAPES, 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("drift", [0.99, 1.3], ids=["steady", "moving"])
def test_threshold_follows_algorithm_2(drift):
    steps, warmup, period = 40, 4, 3
    layout = sc.Layout(((40, 12), (40, 12), (90,)))
    selector, select = jitted(
        "adtopk_threshold",
        density=0.1,
        steps=steps,
        warmup=warmup,
        period=period,
        headroom=float("inf"),
    )
    layers = [by_layer.ThresholdLayer(shape, 0.1, steps, warmup, period) for shape in layout.shapes]
    state = selector.init(layout)
    rng = np.random.default_rng(1)
    base = rng.standard_normal(layout.size)
    for step in range(steps):
        noise = 0.1 * rng.standard_normal(layout.size)
        acc = ((base + noise) * drift**step).astype(np.float32)
        coo, state, info = select(acc, state)
        expected = [
            at.start + layer.step(acc[at])
            for layer, (_, at) in zip(layers, by_layer.slices(layout.shapes), strict=True)
        ]
        chosen = check((coo, state, info), acc)
        np.testing.assert_array_equal(chosen, np.concatenate(expected), f"{step}")
    periods = np.concatenate([s.period for s in state.states])
    assert periods.tolist() == [layer.period for layer in layers]
    taken = {branch for layer in layers for branch in layer.branches}
    assert taken >= {"layer", "evaluate"} | ({"rows", "reuse"} if drift < 1 else set())


@pytest.mark.slow
def test_threshold_counts_what_finds_no_slot_and_lets_it_take_turns():
    selector, select = jitted(
        "adtopk_threshold", density=0.1, steps=1000, warmup=3, period=1000, headroom=0.5
    )
    acc = np.linspace(1, 2, 100).astype(np.float32)
    state = selector.init(100)
    seen = set()
    for step in range(windows.steps_for_all(15, 100)):
        # Everything is above the threshold of the first steps; in turn with those by row.
        given = acc * (10 if step else 1)
        _, state, _ = select(given, state)
        coo, state, info = select(given, state)
        seen |= set(check((coo, state, info), given))
        if step:
            assert (int(info.selected), int(info.overflow)) == (15, 85)
    assert seen == set(range(100))
