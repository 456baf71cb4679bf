"""The gauge of programs for GPUs: what it reads from XLA's text."""

import jax
import pytest

from benchmarks.gpu import overlap
from benchmarks.gpu._hlo import parse, size_of
from benchmarks.gpu._paths import Cost, collectives, heaviest, lightest


def cost(launches=0, both=0, **more):
    """What touches as many bytes as it moves."""
    return Cost(launches=launches, touched=both, moved=both, **more)


# A body of two kernels over 4 float32: each reads 16 bytes and writes 16.
LOOPS = """\
%fused_add (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add = f32[4]{0} add(%p, %p)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %once = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused_add
  %twice = f32[4]{0} fusion(%once), kind=kLoop, calls=%fused_add
  ROOT %next = (s32[], f32[4]{0}) tuple(%i, /*index=1*/%twice)
}

ENTRY %main (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%goes_on, body=%bodyTRIPS
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501

KNOWN = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'

# One branch with a kernel of 2 kB, another with two of a few bytes and a collective.
BRANCHES = """\
%large (p.1: f32[256]) -> f32[256] {
  %p.1 = f32[256]{0} parameter(0)
  ROOT %negate = f32[256]{0} negate(%p.1)
}

%small (p.2: f32[]) -> f32[256] {
  %p.2 = f32[] parameter(0)
  %sum-start = f32[] all-reduce-start(%p.2), channel_id=1, to_apply=%add
  %sum-done = f32[] all-reduce-done(%sum-start)
  ROOT %wide = f32[256]{0} broadcast(%sum-done), dimensions={}
}

ENTRY %main (which: WHICH, x: f32[256], y: f32[]) -> f32[256] {
  %which = WHICH parameter(0)
  %x = f32[256]{0} parameter(1)
  %y = f32[] parameter(2)
  ROOT %out = f32[256]{0} conditional(%which, %x, %y), COMPUTATIONS
}
"""

KINDS = {
    "s32[]": "branch_computations={%large, %small}",
    "pred[]": "true_computation=%large, false_computation=%small",
}

COLLECTIVES = """\
%wrapped (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %scatter = f32[8]{0} reduce-scatter(%p), channel_id=3, dimensions={0}, to_apply=%add
}

%graph (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %ring = f32[8]{0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (x: f32[64]) -> f32[8] {
  %x = f32[64]{0} parameter(0)
  %all-start = ((f32[64]{0}), f32[64]{0}) all-to-all-start(%x), channel_id=1, dimensions={0}
  %all-done = f32[64]{0} all-to-all-done(%all-start)
  %begun = ((f32[64]{0}), f32[8]{0:S(1)}, s32[]) async-start(%all-done), calls=%wrapped
  %running = ((f32[64]{0}), f32[8]{0:S(1)}, s32[]) async-update(%begun)
  %ended = f32[8]{0} async-done(%running)
  %moved-start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%ended)
  %moved = f32[8]{0} copy-done(%moved-start)
  ROOT %called = f32[8]{0} call(%moved), to_apply=%graph
}
"""


# Of 4096 entries, of which some bodies read or change only a part.
FUSED = """\
%fused (p: f32[4096], q: f32[4096], i: s32[8], u: f32[8]) -> RESULT {
  %p = f32[4096]{0} parameter(0)
  %q = f32[4096]{0} parameter(1)
  %i = s32[8]{0} parameter(2)
  %u = f32[8]{0} parameter(3)
  BODY
}

ENTRY %main (p.1: f32[4096], q.1: f32[4096], i.1: s32[8], u.1: f32[8]) -> RESULT {
  %p.1 = f32[4096]{0} parameter(0)
  %q.1 = f32[4096]{0} parameter(1)
  %i.1 = s32[8]{0} parameter(2)
  %u.1 = f32[8]{0} parameter(3)
  ROOT %out = RESULT fusion(%p.1, %q.1, %i.1, %u.1), kind=kLoop, calls=%fused
}
"""

N, WHOLE, FEW, SECTORS = "f32[4096]", 4 * 4096, 4 * 8, 32 * 8

# What a fusion gives, its body, and the bytes that it moves.
MOVED = [
    (N, f"ROOT %r = {N} add(%p, %q)", 3 * WHOLE),
    # A gather reads sectors, and all of its indices; of a sum it reads both.
    ("f32[8]", "ROOT %r = f32[8]{0} gather(%p, %i), slice_sizes={1}", SECTORS + 2 * FEW),
    ("f32[8]", f"%s = {N} add(%p, %q)\n  ROOT %r = f32[8] gather(%s, %i)", 2 * SECTORS + 2 * FEW),
    ("f32[8]", "ROOT %r = f32[8]{0} slice(%p), slice={[0:8]}", 2 * FEW),
    # What is reduced is read as a whole.
    ("f32[]", "%z = f32[] constant(0)\n  ROOT %r = f32[] reduce(%p, %z)", WHOLE + 4),
    # A scatter in place, also through another shape, and into what is made in the same launch.
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
    # Several results, and an operand that two of them read is counted once.
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


def test_a_loop_of_known_length_is_multiplied_out():
    found = parse(LOOPS.replace("TRIPS", KNOWN))
    assert lightest(found) == heaviest(found) == cost(10, 320)
    # No turn, or one.
    found = parse(LOOPS.replace("TRIPS", ""))
    assert (lightest(found), heaviest(found)) == (cost(waits=1), cost(2, 64, waits=1))


def test_what_a_known_loop_waits_for_it_waits_for_at_each_turn():
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
def test_of_a_conditional_the_branch_with_fewest_launches(which):
    found = parse(BRANCHES.replace("WHICH", which).replace("COMPUTATIONS", KINDS[which]))
    assert lightest(found) == cost(1, 2048, waits=1)
    # The most of each number, though no branch has them all.
    assert heaviest(found) == cost(2, 2048, waits=1, collectives=1)
    assert collectives(found) == 1


def test_collectives_are_counted_where_they_start():
    found = parse(COLLECTIVES)
    assert (lightest(found)["launches"], lightest(found)["collectives"]) == (4, 3)
    assert lightest(found)["waits"] == 0
    assert collectives(found) == 3


@pytest.mark.parametrize(("result", "body", "expected"), MOVED)
def test_bytes_that_a_launch_moves(result, body, expected):
    found = lightest(parse(FUSED.replace("RESULT", result).replace("BODY", body)))
    assert found["moved"] == expected
    assert found["touched"] >= expected or "scatter" in body


def test_the_text_of_a_real_program_is_read():
    text = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, y: y * 2, x)).lower(1.0).compile()
    assert lightest(parse(text.as_text()))["launches"] > 0


def test_products_between_the_start_and_the_end_of_a_collective():
    lines = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %before = f32[8] custom-call(%p), custom_call_target="__cublas", metadata={op_name="dot_general"}
  %start = f32[8] all-reduce-start(%p), to_apply=%add
  %other = f32[8] fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(f)/add"}
  %product = f32[8] fusion(%p), kind=kCustom, calls=%g, metadata={op_name="jit(f)/dot_general"}
  %done = f32[8] all-reduce-done(%start)
  %gather = f32[8] all-gather-start(%p), dimensions={0}
  ROOT %end = f32[8] all-gather-done(%gather)
}
"""
    program = parse(lines)
    found = list(overlap.beside(program.computations[program.entry].values()))
    assert found == [("all-reduce", 1), ("all-gather", 0)]
