"""row_topk: the largest sums of each row, no row missing, in messages that are dealt out evenly.

test_allreduce_contract.py has the tests for all allreduces, with a vector as one row.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc
from sparse_collectives.allreduce import _row_topk
from sparse_collectives.allreduce._row_topk import RowTopkState
from tests.reference import exchanges, selection
from tests.sparse_collectives import helpers
from tests.sparse_collectives.helpers import as_entries, slow_rows

# Layers of different widths: convolutions, rows of one entry, rows narrower than 1 / density, a
# layer of the same shape, one without entries, a scalar.
SHAPES = ((3, 3, 4, 9), (9,), (50, 24), (50, 24), (0, 3), (), (1, 21), (33, 1), (12, 31))
LAYOUT = sc.Layout(SHAPES)
# A long vector and a matrix of two rows, which are all divided among owners.
DIVIDED = sc.Layout(((400,), (120, 2), (3,)))
DENSITY = 0.1


def rows_and_shares(layout, density, row_axis):
    """The row of each index, and the entries that are delivered of it."""
    row, share = np.zeros(layout.size, int), np.zeros(layout.size, int)
    number = 0
    for shape, at in selection.slices(layout.shapes):
        for places in selection.rows(shape, row_axis):
            row[at.start + places] = number
            share[at.start + places] = selection.count(density, len(places))
            number += 1
    return row, share


def states(selector, layout, workers):
    """The selector's state of each worker."""
    copy = lambda x: np.broadcast_to(x, (workers, *np.shape(x)))  # noqa: E731
    return jax.tree.map(copy, selector.init(layout))


@functools.cache
def parts(density, row_axis=-1, codec=None):
    selector = sc.select.published.adtopk(density=density, row_axis=row_axis)
    return selector, sc.allreduce.row_topk(density=density, row_axis=row_axis, codec=codec)


def run_once(selector, allreduce, layout, acc, count=0):
    """A step of all workers, whatever the dtype of the accumulators."""
    workers = len(acc)
    coo, selected = helpers.simulated_select(selector, workers)(
        acc, states(selector, layout, workers)
    )
    state = allreduce.init(layout, workers)._replace(count=jnp.int32(count))
    out = helpers.simulated_reduce(allreduce, workers)(coo, state)
    return {**selected, **out, "kept": helpers.added_up(out["kept"])}


def plan_of(layout, density, workers, row_axis=-1):
    row, share = rows_and_shares(layout, density, row_axis)
    slots = sum(share[row == each][0] for each in range(row.max() + 1))
    return _row_topk.make_plan(layout, density, row_axis, workers, slots), slots


def pieces(layout, density, workers, count=0, row_axis=-1):
    plan, _ = plan_of(layout, density, workers, row_axis)
    # All small layouts have one length here, so that the operations are compiled once.
    indices = np.minimum(np.arange(max(layout.size, 5_000), dtype=np.int32), layout.size - 1)
    found = plan.piece(jnp.asarray(indices), jnp.int32(count))
    return tuple(np.asarray(x)[: layout.size] for x in found)


@pytest.mark.parametrize(
    ("workers", "row_axis"), [(3, -1), *slow_rows((1, -1), (2, 0), (4, -1), (5, 0), (5, -1))]
)
def test_the_largest_sums_of_each_row_are_delivered(workers, row_axis):
    layout = sc.Layout(tuple(shape for shape in SHAPES if len(shape) != 1))
    row, share = rows_and_shares(layout, DENSITY, row_axis)
    plan, _ = plan_of(layout, DENSITY, workers, row_axis)
    assert max(plan.pieces) == 1 or workers > 3  # Some rows are divided among five workers.
    for case, acc in helpers.hard_accumulators(workers, layout.size).items():
        if case == "subnormal":
            continue  # Their sums may be flushed to zero.
        out = run_once(*parts(DENSITY, row_axis), layout, acc)
        piece, of_piece = row, share
        if max(plan.pieces) > 1:
            piece, of_piece = pieces(layout, DENSITY, workers, row_axis=row_axis)
        total, kept = exchanges.row_topk(as_entries(out["sent"]), piece, of_piece)
        if workers == 1:
            total, kept = np.asarray(out["sent"][0]), np.zeros_like(kept)
        np.testing.assert_array_equal(out["total"], np.tile(total, (workers, 1)), case)
        np.testing.assert_array_equal(out["kept"], kept, case)
        assert (np.asarray(out["info"].delivered) == np.count_nonzero(total)).all(), case
        assert not np.asarray(out["info"].overflow).any(), case
        if total.any() and workers > 1:
            threshold = np.abs(total[total != 0]).min()
            assert (np.asarray(out["info"].threshold) == threshold).all(), case
        # No row is missing of which a sum is not 0.
        sums = np.asarray(out["sent"], np.float64).sum(axis=0)
        for each in range(row.max() + 1):
            there = row == each
            assert total[there].any() or not np.any(np.abs(sums[there]) > 1e-5), case
            assert np.count_nonzero(total[there]) <= share[there][0], case


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_divided_rows_are_exact_in_each_piece_and_nearly_the_largest_together(workers):
    row, share = rows_and_shares(DIVIDED, DENSITY, -1)
    acc = helpers.hard_accumulators(workers, DIVIDED.size)["normal"]
    for count in range(4):
        piece, of_piece = pieces(DIVIDED, DENSITY, workers, count)
        out = run_once(*parts(DENSITY), DIVIDED, acc, count)
        # An entry without a slot would be kept, and take no part in the sum.
        assert not np.asarray(out["info"].overflow).any()
        entries = as_entries(out["sent"])
        total, kept = exchanges.row_topk(entries, piece, of_piece)
        np.testing.assert_array_equal(out["total"], np.tile(total, (workers, 1)))
        np.testing.assert_array_equal(out["kept"], kept)
        best = exchanges.row_topk(entries, row, share)[0]
        for each in range(row.max() + 1):
            there = row == each
            assert 0 < np.count_nonzero(total[there]) <= share[there][0]
        assert np.abs(total).sum() > 0.9 * np.abs(best).sum()
    # Another step divides the rows differently.
    assert (pieces(DIVIDED, DENSITY, workers, 0)[0] != piece).any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6),
    st.sampled_from((1e-3, 0.1, 0.5, 1.0)),
    st.integers(2, 17),
)
def test_slots_are_dealt_out_evenly_and_each_row_has_its_share(shapes, density, workers):
    layout = sc.Layout((*shapes, (11, 40)))
    plan, slots = plan_of(layout, density, workers)
    piece, of_piece = pieces(layout, density, workers)
    row, share = rows_and_shares(layout, density, -1)
    loads = np.zeros(workers, int)
    for number in np.unique(piece):
        inside = piece == number
        assert len({*row[inside]}) == 1
        assert len({*of_piece[inside]}) == 1
        loads[number % workers] += of_piece[inside][0]
    for each in range(row.max() + 1):
        numbers = np.unique(piece[row == each], return_index=True)[1]
        assert of_piece[row == each][numbers].sum() == share[row == each][0]
    whole = max((s for s, p in zip(plan.share, plan.pieces, strict=True) if p == 1), default=0)
    # One slot of a divided row, and one row that is not divided.
    assert loads.max() == plan.owner_slots <= slots / workers + whole + 1
    assert whole <= max(1, slots / (8 * workers))


@pytest.mark.parametrize("workers", [8, *helpers.slow(2, 64, 128)])
def test_words_are_4_k_whatever_the_number_of_workers(workers):
    """An all_to_all and an allgather of 2 k (P-1)/P words each, if rows are dealt out evenly."""
    layout = sc.Layout(((100, 512), (50, 1024)))
    selector, allreduce = parts(0.02)
    slots = 512 * 2 + 1024 * 1

    def step(acc, count):
        coo, _, _ = selector.select(acc, selector.init(layout))
        return allreduce.reduce(coo, RowTopkState(count, layout), axis="w")

    given = jax.ShapeDtypeStruct((layout.size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    traffic = sc.traffic.of_function(step, *given, axis="w", axis_size=workers)
    assert traffic.words == 4 * slots * (workers - 1) / workers
    assert [r.kind for r in traffic.collectives] == ["all_to_all", "all_gather"]


@pytest.mark.slow
def test_messages_have_no_padding_if_rows_are_dealt_out_evenly():
    layout, slots = sc.Layout(((100, 512), (50, 1024))), 512 * 2 + 1024 * 1
    acc = helpers.hard_accumulators(8, layout.size)["heavy tail"]
    out = run_once(*parts(0.02), layout, acc)
    assert (np.asarray(out["info"].words) == 4 * slots * 7 / 8).all()
    # An owner sends K / P slots, all of them in use, and each worker all of its selection.
    assert np.mean(out["info"].useful) == out["info"].words[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_sixteen_bits_are_rounded_once_and_no_row_is_missing(dtype):
    acc = jnp.asarray(helpers.hard_accumulators(4, LAYOUT.size)["normal"]).astype(dtype)
    out = run_once(*parts(DENSITY), LAYOUT, acc)
    total, sent = np.asarray(out["total"][0]), np.asarray(out["sent"]).astype(np.float32)
    assert out["total"].dtype == dtype
    sums = functools.reduce(np.add, sent).astype(dtype)
    np.testing.assert_array_equal(total[total != 0], sums[total != 0])
    row, _ = rows_and_shares(LAYOUT, DENSITY, -1)
    assert all(total[row == each].any() for each in range(row.max() + 1))
    helpers.check_conserved(out, tolerance=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cpu", "cuda"])
def test_both_forms_for_platforms_have_the_bits_of_the_oracle(form):
    acc = helpers.hard_accumulators(4, LAYOUT.size)["heavy tail"]
    # Instances of their own, since the programs of an instance are compiled once.
    selector = sc.select.published.adtopk(density=DENSITY)
    allreduce = sc.allreduce.row_topk(density=DENSITY)
    with helpers.traced_for(form):
        out = run_once(selector, allreduce, LAYOUT, acc)
    piece, share = pieces(LAYOUT, DENSITY, 4)
    total, kept = exchanges.row_topk(as_entries(out["sent"]), piece, share)
    np.testing.assert_array_equal(out["total"], np.tile(total, (4, 1)))
    np.testing.assert_array_equal(out["kept"], kept)


@pytest.mark.slow
def test_lowers_for_gpus_with_a_layout():
    selector, allreduce = parts(DENSITY)

    def step(acc, count):
        coo, _, _ = selector.select(acc, selector.init(LAYOUT))
        return allreduce.reduce(coo, RowTopkState(count, LAYOUT), axis="w")[0]

    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=helpers.abstract_mesh(w=64),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    given = jax.ShapeDtypeStruct((LAYOUT.size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(mapped).trace(*given)
    for platform in ("cuda", "rocm"):
        assert "stablehlo.all_to_all" in program.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
def test_starvation_where_a_selection_crowds_the_rows_of_one_owner():
    """All entries of worker 0's rows compete for its slots: 12 for each. Each has one at times."""
    workers, steps, layout = 3, 240, sc.Layout(((12, 30),))
    selector = sc.select.threshold(magnitude=0, density=1 / 3)  # It selects all nonzero entries.
    allreduce = sc.allreduce.row_topk(density=DENSITY)
    piece, _ = pieces(layout, DENSITY, workers)
    crowd = jnp.asarray(np.where(piece % workers == 0, 1.0, 0.0), jnp.float32)

    def run(scale):
        def step(carry, _):
            residual, selector_state, state = carry
            acc = residual + scale * crowd
            coo, selector_state, _ = selector.select(acc, selector_state)
            total, undelivered, state, info = allreduce.reduce(coo, state, axis="workers")
            carry = undelivered.residual(acc, coo), selector_state, state
            return carry, (total.to_dense(), info.overflow)

        start = jnp.zeros(360), selector.init(360), allreduce.init(layout, workers)
        return jax.lax.scan(step, start, length=steps)

    (residual, *_), (totals, overflow) = sc.simulate(run, axis_size=workers)(
        jnp.asarray([1.0, 2.0, 3.0])
    )
    totals = np.asarray(totals)
    assert (totals == totals[:1]).all()
    assert (np.asarray(overflow) == 110).all()  # 120 entries, and 10 slots.
    served = totals[0] != 0
    assert (served.sum(axis=1) > 0).all()
    # Each entry is in a window of the first half of the steps and in one of the second.
    for half in (served[: steps // 2], served[steps // 2 :]):
        assert (half.any(axis=0) == (np.asarray(crowd) > 0)).all()
    # Whole numbers, so the sums are exact.
    np.testing.assert_array_equal(
        totals[0].sum(axis=0) + np.asarray(residual).sum(axis=0), 6.0 * steps * np.asarray(crowd)
    )


def test_allreduces_take_a_layout_or_a_number_of_entries():
    whole = sc.Layout(((8, 5), (8,)))
    for allreduce in (sc.allreduce.topk_a(), sc.allreduce.ok_topk(density=0.1)):
        states_of = [allreduce.init(layout, 3) for layout in (whole, 48)]
        jax.tree.map(np.testing.assert_array_equal, *states_of)
    assert sc.allreduce.row_topk(0.1).init(48, 3).layout == sc.Layout(((48,),))
    for size in (3.0, "3", None, True):
        with pytest.raises(TypeError, match="Layout"):
            sc.allreduce.topk_a().init(size, 3)


def test_errors_say_which_axis_or_length_is_wrong():
    for row_axis, shapes in ((-3, ((3, 2, 4), (2, 3))), (5, ((4,), (6, 1, 2)))):
        with pytest.raises(ValueError, match=f"row_axis={row_axis} is not an axis of a layer"):
            sc.allreduce.row_topk(0.1, row_axis=row_axis).init(sc.Layout(shapes), 2)
    rows = sc.allreduce.row_topk(0.1)
    for outer in (rows, sc.allreduce.full_sums(rows)):
        with pytest.raises(
            ValueError, match=r"a shard of a node cuts through rows, got .*row_topk\("
        ):
            sc.allreduce.hierarchical(inner_axis="device", outer=outer)
    _, allreduce = parts(DENSITY)
    state = allreduce.init(sc.Layout(((4, 5),)), 2)
    coo = sc.PaddedCOO(jnp.ones(2), jnp.arange(2, dtype=jnp.int32), 21)
    run = sc.simulate(lambda _: allreduce.reduce(coo, state, axis="workers"), axis_size=2)
    with pytest.raises(ValueError, match=r"21 entries, but init .* of 20: \(\(4, 5\),\)"):
        run(jnp.zeros(2))
    assert math.isclose(allreduce.spec.number("density"), DENSITY)
