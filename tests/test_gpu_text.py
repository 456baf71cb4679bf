"""The counts of launches and bytes of GPU programs, read from XLA's text."""

from pathlib import Path

import jax
import pytest

from benchmarks.gpu import overlap
from benchmarks.gpu._hlo import parse, size_of
from benchmarks.gpu._paths import Cost, collectives, heaviest, lightest
from benchmarks.local import passes


def cost(launches=0, both=0, **more):
    """A cost with as many touched as moved bytes."""
    return Cost(launches=launches, touched=both, moved=both, **more)


# Programs as XLA prints them. A loop's body has two kernels over 4 float32, each of which reads 16
# bytes and writes 16. One branch has a kernel of 2 kB, the other one two kernels of a few bytes and
# a collective. Fusions have 4,096 entries, and some bodies read or change only a part of them.
TEXTS = {path.stem: path.read_text() for path in Path(__file__).with_name("gpu_text").iterdir()}
LOOPS, BRANCHES, FUSED = (TEXTS[name] for name in ("loops", "branches", "fused"))

KNOWN = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'

KINDS = {
    "s32[]": "branch_computations={%large, %small}",
    "pred[]": "true_computation=%large, false_computation=%small",
}

N, WHOLE, FEW, SECTORS = "f32[4096]", 4 * 4096, 4 * 8, 32 * 8

# The type of a fusion's result, its body, and the bytes that it moves.
MOVED = [
    (N, f"ROOT %r = {N} add(%p, %q)", 3 * WHOLE),
    # A gather reads sectors, and all of its indices; for a sum it reads both operands.
    ("f32[8]", "ROOT %r = f32[8]{0} gather(%p, %i), slice_sizes={1}", SECTORS + 2 * FEW),
    ("f32[8]", f"%s = {N} add(%p, %q)\n  ROOT %r = f32[8] gather(%s, %i)", 2 * SECTORS + 2 * FEW),
    ("f32[8]", "ROOT %r = f32[8]{0} slice(%p), slice={[0:8]}", 2 * FEW),
    # The operand of a reduction is read as a whole.
    ("f32[]", "%z = f32[] constant(0)\n  ROOT %r = f32[] reduce(%p, %z)", WHOLE + 4),
    # A scatter in place, also through another shape, and into a result of the same launch.
    (N, f"ROOT %r = {N} scatter(%p, %i, %u), to_apply=%add", 2 * SECTORS + 2 * FEW),
    (
        "f32[1,4096]",
        """%f = f32[1,4096]{1,0} bitcast(%p)
  %s = f32[1,4096]{1,0} scatter(%f, %i, %u), to_apply=%add
  ROOT %r = f32[1,4096]{1,0} bitcast(%s)""",
        2 * SECTORS + 2 * FEW,
    ),
    (N, f"%s = {N} add(%p, %q)\n  ROOT %r = {N} scatter(%s, %i, %u)", 3 * WHOLE + 2 * FEW),
    (N, f"ROOT %r = {N} dynamic-update-slice(%p, %u, %i)", 3 * FEW),
    # Several results; an operand that two of them read is counted once.
    (
        "(f32[4096], f32[8])",
        """%s = f32[4096]{0} negate(%p)
  %g = f32[8]{0} gather(%p, %i), slice_sizes={1}
  ROOT %r = (f32[4096]{0}, f32[8]{0}) tuple(%s, %g)""",
        2 * WHOLE + 2 * FEW,
    ),
]


SIZES = {"f32[]": 4, "f32[3,5]{1,0}": 60, "bf16[3]{0}": 6, "u16[3]{0:T(8,128)}": 6, "pred[7]{0}": 7}
SIZES |= {"s4[3]{0}": 2, "f8e4m3fn[5]{0}": 5, "c64[2]{0}": 16, "f32[0]{0}": 0, "token[]": 0}
SIZES |= {"((s32[8,2]{1,0}), s32[8,2]{1,0:S(5)}, /*index=2*/u8[4]{0})": 132}


def test_bytes_of_shapes():
    assert {shape: size_of(shape) for shape in SIZES} == SIZES


def test_loop_of_known_length_is_multiplied_out():
    found = parse(LOOPS.replace("TRIPS", KNOWN))
    assert lightest(found) == heaviest(found) == cost(10, 320)
    # No iteration, or one.
    found = parse(LOOPS.replace("TRIPS", ""))
    assert (lightest(found), heaviest(found)) == (cost(waits=1), cost(2, 64, waits=1))


def test_loop_of_known_length_waits_at_each_turn():
    inner = LOOPS.replace("TRIPS", "").replace("ENTRY %main (x.1: f32[4])", "%inner (x.1: f32[4])")
    outer = """
%turn (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} call(%p), to_apply=%inner
}

ENTRY %main (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %r.1 = f32[4]{0} while(%p.1), condition=%goes_on, body=%turn"""
    found = parse(inner + outer + KNOWN + "\n}\n")
    assert lightest(found) == Cost(waits=5)


def test_long_sorts_are_named():
    of_library = """\
ENTRY %main (x: u32[9000]) -> u32[9000] {
  %x = u32[9000]{0} parameter(0)
  ROOT %out = (u32[9000]{0}, u8[9]{0}) custom-call(%x), custom_call_target="__cub$DeviceRadixSort"
}
"""
    sort = "ROOT %r = f32[SIZE]{0} sort(%p), dimensions={0}, to_apply=%less"
    launches = [FUSED.replace("BODY", sort.replace("SIZE", size)) for size in ("4096", "8")]
    found = [lightest(parse(text)) for text in (of_library, *launches)]
    assert [(cost["launches"], cost["sorts"]) for cost in found] == [(1, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize("which", KINDS)
def test_conditional_has_the_branch_with_fewest_launches(which):
    found = parse(BRANCHES.replace("WHICH", which).replace("COMPUTATIONS", KINDS[which]))
    assert lightest(found) == cost(1, 2048, waits=1)
    # The maximum of each number, though no branch has all of them.
    assert heaviest(found) == cost(2, 2048, waits=1, collectives=1)
    assert collectives(found) == 1


def test_collectives_are_counted_where_they_start():
    found = parse(TEXTS["collectives"])
    assert (lightest(found)["launches"], lightest(found)["collectives"]) == (4, 3)
    assert lightest(found)["waits"] == 0
    assert collectives(found) == 3


@pytest.mark.parametrize(("result", "body", "expected"), MOVED)
def test_bytes_that_a_launch_moves(result, body, expected):
    found = lightest(parse(FUSED.replace("RESULT", result).replace("BODY", body)))
    assert found["moved"] == expected
    assert found["touched"] >= expected or "scatter" in body


def test_program_that_is_real_is_read():
    text = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, y: y * 2, x)).lower(1.0).compile()
    assert lightest(parse(text.as_text()))["launches"] > 0


def test_products_between_the_start_and_the_end_of_a_collective():
    program = parse(TEXTS["overlap"])
    found = list(overlap.beside(program.computations[program.entry].values()))
    assert found == [("all-reduce", 1), ("all-gather", 0)]


def test_passes_count_loops_by_their_turns_and_conditionals_by_the_heavier_branch():
    """A loop of three iterations, one of unknown length, and a conditional of two branches."""
    counted = [count for _, count in passes.moved(parse(TEXTS["passes"]))]
    # Read and written in three iterations, and once in the branch.
    assert sum(counted) == (3 + 1) * 2 * 4 * 8
