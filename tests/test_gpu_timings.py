"""The program that times everything on a GPU, tried on the CPU."""

import json
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import _runs, timings
from benchmarks.gpu._session import Session
from tests.programs import refused


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
        # A program for CPUs says nothing of launches.
        assert row["launches"] is None
    printed = capsys.readouterr().out
    assert "COMPUTED, not measured" in printed


def test_what_does_not_fit_in_the_time_is_named(tmp_path, capsys):
    status, found = run(tmp_path, "--only", "threshold", "dense", "--minutes", "1e-9")
    assert status == 0
    assert found["rows"] == []
    assert len(found["skipped"]) == 3
    assert "skipped, no time left: selection: threshold" in capsys.readouterr().out


def test_one_that_fails_does_not_end_the_rest(tmp_path):
    def fail():
        raise MemoryError("out of memory\nand more")

    path = tmp_path / "timings.json"
    data = [jnp.ones(8)]
    options = {"rounds": 2, "start": time.monotonic(), "seconds": 60}
    session = Session(_runs.copy(data), {"device": "cpu"}, path, **options)
    session.measure("selection", "bad", fail)
    # Whatever comes now, this is kept.
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["failed"] == {"selection: bad": "out of memory"}
    assert not found["finished"]
    session.measure("selection", "good", lambda: _runs.top_k(data, 2))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["contestant"] for row in found["rows"]] == ["good"]


def test_the_dense_allreduce_is_computed():
    found = timings.dense_on_networks(14_700_000, 8)
    # 2 * 14.7M * 4 bytes * 7/8 are 102.9 MB.
    assert [(x["gbit_per_s"], round(x["ms"], 2)) for x in found] == [
        (10, 82.32),
        (25, 32.93),
        (100, 8.23),
    ]


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
