"""The launcher that the benchmarks and the tests of several processes share."""

import os
import select
import signal
import sys

import pytest

from benchmarks._common import processes


def python(code):
    return [sys.executable, "-c", code]


def test_process_is_read_until_it_ends():
    program = """
import sys
print('[Gloo] no JSON'); print('{"event": "held", "step": 3}', flush=True)
sys.stdin.readline()
print('{"event": "done"}'); print("why", file=sys.stderr); sys.exit(4)
"""
    with processes.started([python(program)]) as (process,):
        assert process.wait_for("held", step=3, seconds=60) == {"event": "held", "step": 3}
        assert process.find("held", step=4) is None
        assert process.status is None
        process.send("go on")
        assert process.wait_for_end(60)
    assert (process.status, process.errors) == (4, "why\n")
    assert [event["event"] for event in process.events] == ["held", "done"]
    with pytest.raises(RuntimeError, match=r"\(status 4\) did not say gone.*\nwhy"):
        process.wait_for("gone", seconds=60)


def test_failure_ends_the_wait_and_the_block_ends_also_what_is_stopped():
    waiting = "import sys; print('{}', flush=True); sys.stdin.readline()"
    with processes.started([python(waiting), python("import sys; sys.exit(3)")]) as group:
        group[0].signal(signal.SIGSTOP)
        processes.wait_for_ends(group, 600)
        assert [process.status for process in group] == [None, 3]
    assert group[0].status == -signal.SIGKILL


def test_process_dies_with_the_one_that_started_it():
    """This holds even if that one is killed and can't clean up."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent has ended")
    child = (
        "from benchmarks._common.processes import die_with_parent; import time; "
        "die_with_parent(); print('ready', flush=True); time.sleep(1000)"
    )
    parent = f"""
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(json.dumps({{"event": "ready", "pid": child.pid}}), flush=True)
sys.stdin.readline()
"""
    with processes.started([python(parent)]) as (process,):
        pid = process.wait_for("ready", seconds=600)["pid"]
        watched = os.pidfd_open(pid)
        process.signal(signal.SIGKILL)
        assert process.wait_for_end(600)
        # The descriptor can be read as soon as the process has ended.
        assert select.select([watched], [], [], 600)[0]
        os.close(watched)


def test_group_of_processes_belongs_to_no_other(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "somewhere:1")
    assert not {"SLURM_JOB_ID", "JAX_COORDINATOR_ADDRESS"} & processes.environment().keys()
    with processes.coordinator() as (address, variables):
        assert address.startswith("127.0.0.1:")
        assert variables == {"JAX_COORDINATOR_BIND_ADDRESS": address}
