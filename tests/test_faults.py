"""The machinery of benchmarks/faults and benchmarks/soak.py, and both of them with few steps."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import optax_ext

pytestmark = pytest.mark.usefixtures("default_promotion")

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / "benchmarks" / "faults", ROOT / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks by its name, for one test."""
    names = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}
    for name in names & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    for folder in reversed(FOLDERS):
        monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


def python(code):
    return [sys.executable, "-c", code]


def test_what_a_process_says_is_read_until_it_ends(load):
    program = """
import sys
print('[Gloo] no JSON'); print('{"event": "held", "step": 3}', flush=True)
sys.stdin.readline()
print('{"event": "done"}'); print("why", file=sys.stderr); sys.exit(4)
"""
    with load("_processes").started([python(program)]) as (process,):
        assert process.wait_for("held", step=3, seconds=60) == {"event": "held", "step": 3}
        assert process.find("held", step=4) is None
        assert process.status is None
        process.send("go on")
        assert process.wait_for_end(60)
    assert (process.status, process.errors) == (4, "why\n")
    assert [event["event"] for event in process.events] == ["held", "done"]
    with pytest.raises(RuntimeError, match=r"\(status 4\) did not say gone.*\nwhy"):
        process.wait_for("gone", seconds=60)


def test_a_stopped_process_ends_with_the_block_that_started_it(load):
    program = 'import sys; print(\'{"event": "ready"}\', flush=True); sys.stdin.readline()'
    with load("_processes").started([python(program)]) as (process,):
        process.wait_for("ready", seconds=60)
        process.signal(signal.SIGSTOP)
    assert process.status == -signal.SIGKILL


WATCHDOG = "optax_ext.Watchdog: step 8 "
JAX = "F1121 client.h:80] Terminating process because the JAX service detected errors."


@pytest.mark.parametrize(
    ("status", "errors", "expected"),
    [
        (75, f"{WATCHDOG}did not end within 10 s on process 0 of 3 (a, pid 1): b", "within 10 s"),
        (
            75,
            f"{WATCHDOG}failed on process 2 of 3 (a) with E: closed. This process ends now",
            "E: c",
        ),
        (-6, f"{JAX} The following tasks are unhealthy (no heartbeats):\n2\nThe", "heartbeats): 2"),
        (
            1,
            "Traceback\n  File\nValueError: the checksums of 1\n",
            "ValueError: the checksums of 1",
        ),
    ],
)
def test_the_reason_of_an_end_is_found(load, status, errors, expected):
    training = load("_training")
    process = SimpleNamespace(status=status, errors=errors)
    assert expected in training.report(process)
    assert training.explained(process)


def test_an_end_without_a_reason_or_without_an_error_is_not_accepted(load):
    training = load("_training")
    for status, errors in ((-6, ""), (1, "a warning\n"), (0, WATCHDOG), (None, WATCHDOG)):
        assert not training.explained(SimpleNamespace(status=status, errors=errors))


# Where a read has failed, orbax drops the others unfinished, and Python says so when it likes to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cut_checkpoint_is_passed_over_for_the_last_whole_one(load, tmp_path):
    task = load("_task")
    mesh = task.mesh_of_all()
    assert task.last_whole(tmp_path) == (0, {})
    params, opt_state = task.first_state(mesh)
    with task.manager_of(tmp_path) as manager:
        for step in (3, 6):
            task.save(manager, step, params, opt_state)
    assert task.last_whole(tmp_path) == (6, {})
    files = [path for path in (tmp_path / "6").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    step, damaged = task.last_whole(tmp_path)
    assert (step, list(damaged)) == (3, [6])
    with task.manager_of(tmp_path) as manager:
        restored = task.restore(manager, 3, mesh)
    assert task.hash_of(restored) == task.hash_of((params, opt_state))
    assert task.residual_sum(restored[1]).shape == (sum(x.size for x in jax.tree.leaves(params)),)


def test_the_recipes_run(load, tmp_path):
    task = load("_task")
    mesh = task.mesh_of_all()
    params, opt_state = task.first_state(mesh)
    names = {
        "folder": tmp_path,
        "params": params,
        "opt_state": opt_state,
        "batches": [task.batch_of(step, mesh) for step in range(2)],
        "step": optax_ext.make_train_step(task.loss_fn, task.transformation(), mesh, task.AXIS),
    }
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/faults.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(program, names)
    names["watchdog"].close()
    assert int(optax_ext.get_state(names["restored"][1]).count) == 2


def test_gradients_are_not_finite_exactly_where_it_is_said(load):
    patterns = load("_patterns")
    steps = 0
    for step in range(400):
        bad = [
            np.flatnonzero(~np.isfinite(patterns.gradient(step, worker, 3))) for worker in range(3)
        ]
        said = [patterns.faulty(step, worker, 3)[0] for worker in range(3)]
        assert [x.tolist() for x in bad] == [x.tolist() for x in said]
        steps += any(x.size for x in bad)
    assert 5 < steps < 40
    assert {patterns.pattern_of(step) for step in range(100)} == set(patterns.PATTERNS)


def line(step, **changes):
    counts = {"count": step, "skipped": 0, "dropped": 0}
    return {
        "step": step,
        "params": step,
        "finite": True,
        "worst": 1.0,
        "found": counts,
        "expected": counts,
        "settled": True,
        "rss": 300.0,
        "maps": 2000,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"worst": 9.0}, "step 30: 9.0 roundings lost"),
        ({"worst": float("nan")}, "step 30: nan roundings lost"),
        ({"params": 7}, "step 30: replicas differ"),
        ({"finite": False}, "step 30: parameters that are not finite"),
        ({"found": {"count": 29, "skipped": 1, "dropped": 0}}, "step 30: counts"),
        ({"rss": 317.0}, "process 1: rss grew by 17.0"),
        ({"maps": 2065}, "process 1: maps grew by 65"),
    ],
)
def test_the_soak_sees_each_violation(load, changes, complaint):
    soak = load("soak")
    args = SimpleNamespace(steps=30, processes=2)
    good = [line(step) for step in range(1, 31)]
    assert soak._summary([[good, good]], args)["violations"] == []
    # Memory that grows stays so.
    late = {"rss", "maps"} & changes.keys()
    bad = [line(x["step"], **(changes if x["step"] > 25 or not late else {})) for x in good]
    if not late:
        bad[:-1] = good[:-1]
    (found,) = soak._summary([[good, bad]], args)["violations"]
    assert found.startswith(complaint)


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.slow
def test_faults_end_in_errors_and_the_training_goes_on():
    rows = "killed,coordinator_killed,hangs,cannot_write,flipped_bit"
    done = run("benchmarks/faults/run.py", "--rows", rows)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rows, 0 failed" in done.stdout


@pytest.mark.slow
def test_a_short_soak_finds_no_violation():
    done = run("benchmarks/soak.py", "--steps", "120", "--processes", "2", "--report-every", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations        0" in done.stdout


def test_unknown_rows_and_counts_are_refused():
    done = run("benchmarks/faults/run.py", "--rows", "killed,meteor")
    assert done.returncode == 2
    assert "no row meteor; there are killed, stopped" in done.stderr
    done = run("benchmarks/soak.py", "--steps", "0")
    assert done.returncode == 2
    assert "--steps must be at least 1" in done.stderr
