"""Programs for GPUs: their recorded counts, and the program that times them, on the CPU."""

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
from benchmarks.gpu import (
    _contestants,
    _described,
    programs,
    same_results,
    timings,
    train_step,
)
from sparse_collectives.cost_model._numbers import PROGRAMS
from tests.programs import refused

RECORDED = ROOT / "benchmarks" / "gpu" / "programs.json"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def row(name, *numbers):
    each = dict(zip(("launches", "touched_bytes", "moved_bytes"), numbers))
    return {"program": name} | {key: [value, 10**9] for key, value in each.items()}


def test_growth_of_more_than_a_tenth_is_named():
    before = [row(name, 100, 1000, 10) for name in "abc"]
    now = [row("a", 110, 1100, 10), row("b", 111, 500, 10), row("c", 50, 1101, 12), row("d")]
    assert programs.grown(now, before) == [
        "b: 111 launches, 100 before",
        "c: 1,101 bytes touched, 1,000 before",
        "c: 12 bytes moved, 10 before",
        "d is not in the file",
    ]


@pytest.mark.parametrize("size", [1, 4096, 14_700_000])
def test_the_layers_hold_all_entries(size):
    assert _contestants.layout(size).size == size


def test_every_program_is_in_the_recorded_file():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    names = [row["program"] for row in recorded["programs"]]
    of_selectors = [f"select.{name}" for name in selectors(recorded["density"])]
    assert names == [*of_selectors, *_contestants.STEPS]


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(_described.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jax[cuda12]" in refused(programs.main, [], capsys)


@pytest.mark.slow
def test_no_step_has_become_heavier():
    if not any(importlib.util.find_spec(name) for name in PLUGINS):
        pytest.skip("XLA's compiler for CUDA is not installed: docs/gpu.md says how")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["jax"]
    if recorded != jax.__version__:
        pytest.skip(f"recorded with jax {recorded}, whose compiler is another one")
    # A process of its own, without the flags and the cache of the tests.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    kept.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "benchmarks.gpu.programs", "--check", str(RECORDED)]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_planner_has_the_recorded_launches_and_bytes():
    recorded = json.loads(RECORDED.read_text())
    rows = {row["program"]: row for row in recorded["programs"]}
    # AdamW alone is not compiled.
    planned = {name: program for name, program in PROGRAMS.items() if name != "adamw"}
    assert len(planned) > 10
    for name, program in planned.items():
        row = rows["agreed_few" if name == "agreed(few)" else name]
        assert program.launches == row["launches"][0], name
        per_entry = row["moved_bytes"][0] / recorded["size"]
        assert program.bytes == pytest.approx(per_entry, abs=0.051), name


# Timings.


def run(tmp_path, *argv):
    path = tmp_path / "timings.json"
    small = ["--allow-cpu", "--size", "4096", "--rounds", "2", "--json", str(path)]
    return timings.main([*small, *argv]), json.loads(path.read_text(encoding="utf-8"))


def test_it_times_selection_step_and_simulated_workers(tmp_path, capsys):
    status, found = run(tmp_path, "--only", "lax.top_k", "threshold", "dense")
    assert status == 0
    assert found["finished"]
    assert [(row["part"], row["contestant"]) for row in found["rows"]] == [
        (timings.SELECTION, "lax.top_k"),
        (timings.STEP, "dense"),
        (timings.SIMULATED, "dense"),
        (timings.SELECTION, "threshold"),
    ]
    for row in found["rows"]:
        low, high = row["quartiles_ms"]
        assert 0 < row["min_ms"] <= low <= row["median_ms"] <= high
        # A program for CPUs has no launches.
        assert row["launches"] is None
    assert "COMPUTED, not measured" in capsys.readouterr().out
    # 2 * 14.7M * 4 bytes * 7/8 are 102.9 MB.
    computed = timings.dense_on_networks(14_700_000, 8)
    assert [round(x["ms"], 2) for x in computed] == [82.32, 32.93, 8.23]


def test_what_does_not_fit_in_the_time_is_named(tmp_path, capsys):
    status, found = run(tmp_path, "--only", "threshold", "dense", "--minutes", "1e-9")
    assert status == 0
    assert found["rows"] == []
    assert len(found["skipped"]) == 3
    assert "skipped, no time left: selection: threshold" in capsys.readouterr().out


def test_one_that_fails_does_not_end_the_rest():
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


@pytest.mark.slow
def test_steps_keep_their_state_on_vectors_and_on_matrices(tmp_path):
    status, found = run(tmp_path, "--only", "ok_topk_reuse", "sparse_adamw", "powersgd")
    assert status == 0
    assert len(found["rows"]) == 6


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_refuses(tmp_path, capsys):
    path = tmp_path / "timings.json"
    message = refused(timings.main, ["--json", str(path)], capsys)
    assert "jax has no GPU here, only cpu" in message
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_training_steps_take_turns(tmp_path):
    path = tmp_path / "step.json"
    small = ["--batch", "2", "--width", "64", "--blocks", "1", "--context", "8"]
    train_step.main([*small, "--rounds", "2", "--calls", "2", "--json", str(path)])
    rows = {row["contestant"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [train_step.BASE, *train_step.NAMES]
    assert rows[train_step.BASE]["ratio"] == 1
    # Adam's moments; the residual of an exchange before AdamW, of 4 bytes.
    held = [round(row["state_bytes_per_parameter"]) for row in rows.values()]
    assert held == [8, 8, 8, 12, 12]


@pytest.mark.slow
def test_two_devices_are_compared_and_nothing_is_lost(tmp_path):
    path = tmp_path / "same.json"
    argv = ["--size", "16384", "--workers", "2", "--rounds", "2", "--json", str(path)]
    assert same_results.main([*argv, "--only", "topk_a", "sparse_sgd"]) == 0
    sparse, whole = json.loads(path.read_text())["rows"]
    # Here both devices are the CPU.
    assert sparse["entries"] == sparse["difference"] == whole["difference"] == 0
    assert 0 <= sparse["lost"] < same_results.ROUNDING
    assert "lost" not in whole


def test_a_lost_gradient_is_noticed(monkeypatch):
    monkeypatch.setattr(same_results, "run", lambda made, density, data, device: given)
    data = np.ones((1, 2, 4), np.float32)
    given = np.array([[1.0, 1, 0, 0]]), np.array([0.0, 0, 2, 2])
    assert same_results.row("agreed", None, 0.5, data)["lost"] == 0
    given = np.array([[1.0, 1, 0, 0]]), np.array([0.0, 0, 2, 1])
    assert same_results.row("agreed", None, 0.5, data)["lost"] == 0.5
