"""Passes over the parameters: how they are counted, and that no step makes more than recorded."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks._common.processes import ROOT
from benchmarks.gpu._hlo import parse
from benchmarks.local import passes

RECORDED = ROOT / "benchmarks" / "local" / "passes.json"

# A loop of three iterations, one of unknown length, and a conditional of two branches.
TEXT = """
HloModule m

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%little (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}

%condition (c: f32[8]) -> pred[] {
  %c = f32[8]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = pred[] parameter(1)
  %w = f32[8]{0} while(%a), condition=%condition, body=%body, backend_config={LOOP}
  %u = f32[8]{0} while(%w), condition=%condition, body=%body
  ROOT %x = f32[8]{0} conditional(%b, %u, %u), true_computation=%little, false_computation=%body
}
""".replace("LOOP", '"known_trip_count":{"n":"3"}')


def test_loops_count_by_their_turns_and_conditionals_by_the_heavier_branch():
    counted = [count for _, count in passes.moved(parse(TEXT))]
    # Read and written in three iterations, and once in the branch.
    assert sum(counted) == (3 + 1) * 2 * 4 * 8


def test_half_a_pass_more_is_named():
    before = [{"program": name, "passes": 20.0} for name in "ab"]
    now = [{"program": name, "passes": x} for name, x in (("a", 20.4), ("b", 20.6), ("c", 1.0))]
    assert passes.grown(now, before) == [
        "b: 20.6 passes, 20.0 before",
        "c: 1.0 passes, none before",
    ]


def check(*more):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if recorded["jax"] != jax.__version__:
        pytest.skip(f"recorded with jax {recorded['jax']}, whose compiler is another one")
    # A process of its own, without the flags and the cache of the tests: fusions are the same at
    # any level of later optimization.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    kept["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "benchmarks.local.passes", "--check", str(RECORDED), *more]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)


@pytest.mark.slow
def test_the_recommended_step_makes_no_more_passes():
    done = check("--only", "sparse_adamw")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_step_makes_more_passes():
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recorded_steps_are_those_that_are_compared():
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["programs"]
    assert [row["program"] for row in rows] == list(passes.NAMES)
