"""Counts of launches, bytes and passes that are recorded in files, and how they are compared."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._common.contestants import selectors
from benchmarks._common.processes import ROOT
from benchmarks.gpu import _contestants, _described, programs, same_results, timings
from benchmarks.local import passes
from sparse_collectives.cost_model._numbers import PROGRAMS
from tests.programs import refused

RECORDED = {
    "gpu.programs": ROOT / "benchmarks" / "gpu" / "programs.json",
    "local.passes": ROOT / "benchmarks" / "local" / "passes.json",
}
FILES = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in RECORDED.items()}
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def row(name, *numbers):
    each = dict(zip(("launches", "touched_bytes", "moved_bytes"), numbers))
    return {"program": name} | {key: [value, 10**9] for key, value in each.items()}


def test_growth_of_a_tenth_or_of_half_a_pass_is_named():
    before = [row(name, 100, 1000, 10) for name in "abc"]
    now = [row("a", 110, 1100, 10), row("b", 111, 500, 10), row("c", 50, 1101, 12), row("d")]
    assert programs.grown(now, before) == [
        "b: 111 launches, 100 before",
        "c: 1,101 bytes touched, 1,000 before",
        "c: 12 bytes moved, 10 before",
        "d is not in the file",
    ]
    before = [{"program": name, "passes": 20.0} for name in "ab"]
    now = [{"program": name, "passes": x} for name, x in (("a", 20.4), ("b", 20.6), ("c", 1.0))]
    assert passes.grown(now, before) == [
        "b: 20.6 passes, 20.0 before",
        "c: 1.0 passes, none before",
    ]


@pytest.mark.parametrize("size", [1, 4096, 14_700_000])
def test_layers_hold_all_entries(size):
    assert _contestants.layout(size).size == size


def test_recorded_files_have_every_program():
    of_selectors = [f"select.{x}" for x in selectors(FILES["gpu.programs"]["density"])]
    names = {"gpu.programs": [*of_selectors, *_contestants.STEPS], "local.passes": [*passes.NAMES]}
    for file, expected in names.items():
        assert [row["program"] for row in FILES[file]["programs"]] == expected


def test_planner_has_the_recorded_launches_and_bytes():
    recorded = FILES["gpu.programs"]
    rows = {row["program"]: row for row in recorded["programs"]}
    # AdamW alone is not compiled.
    planned = {name: program for name, program in PROGRAMS.items() if name != "adamw"}
    assert len(planned) > 10
    for name, program in planned.items():
        row = rows[name.replace("(few)", "_few").replace("(1, 3)", "_1_3")]
        assert program.launches == row["launches"][0], name
        per_entry = row["moved_bytes"][0] / recorded["size"]
        assert program.bytes == pytest.approx(per_entry, abs=0.051), name


@pytest.mark.slow
@pytest.mark.parametrize("program", RECORDED)
def test_steps_are_no_heavier_than_recorded(program):
    if program == "gpu.programs" and not any(importlib.util.find_spec(name) for name in PLUGINS):
        pytest.skip("XLA's compiler for CUDA is not installed: docs/gpu.md says how")
    if (recorded := FILES[program]["jax"]) != jax.__version__:
        pytest.skip(f"recorded with jax {recorded}, whose compiler is another one")
    # A process of its own, without the flags and the cache of the tests.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-m", f"benchmarks.{program}", "--check", str(RECORDED[program])]
    # Fusions, and so passes, are the same at any level of later optimization.
    flags = "--xla_backend_optimization_level=0" if program == "local.passes" else ""
    given = {"env": kept | {"XLA_FLAGS": flags}, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, **given)
    assert done.returncode == 0, done.stdout + done.stderr


# The programs that time them.


def test_gpu_programs_say_what_to_install_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(_described.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jax[cuda12]" in refused(programs.main, [], capsys)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_timings_refuse_without_a_gpu(tmp_path, capsys):
    path = tmp_path / "timings.json"
    message = refused(timings.main, ["--json", str(path)], capsys)
    assert "jax has no GPU here, only cpu" in message
    assert not path.exists()


def test_timings_of_dense_on_networks_are_by_formula():
    # 2 * 14.7M * 4 bytes * 7/8 are 102.9 MB.
    computed = timings.dense_on_networks(14_700_000, 8)
    assert [round(x["ms"], 2) for x in computed] == [82.32, 32.93, 8.23]


def test_timings_go_on_after_one_that_fails():
    def fail():
        raise MemoryError("out of memory\nand more")

    kept = []
    data = [jnp.ones(8)]
    made = {("selection", "bad"): fail}
    made["selection", "good"] = lambda: _contestants.stateless(jnp.abs, data)
    copy = _contestants.stateless(jnp.copy, data)
    timings.measure(copy, made, 2, time.monotonic() + 60, lambda x: kept.append(json.dumps(x)))
    # The first report is kept, whatever follows.
    first, *_, last = map(json.loads, kept)
    assert first["failed"] == {"selection: bad": "out of memory"}
    assert not first["finished"]
    assert [row["contestant"] for row in last["rows"]] == ["good"]
    assert last["finished"]


@pytest.mark.parametrize(("residual", "lost"), [(2.0, 0), (1.0, 0.5)])
def test_same_results_notice_a_lost_gradient(monkeypatch, residual, lost):
    given = np.array([[1.0, 1, 0, 0]]), np.array([0.0, 0, 2, residual])
    monkeypatch.setattr(same_results, "run", lambda made, density, data, device: given)
    data = np.ones((1, 2, 4), np.float32)
    assert same_results.row("partitioned_topk", None, 0.5, data)["lost"] == lost
