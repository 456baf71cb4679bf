"""Faults in a training of several processes, and how it continues after them.

Three processes train over jax.distributed and Gloo, with a checkpoint after every third step. Each
fault breaks something in step 8, or in the checkpoint after it. Every remaining process must end
within the bound, with an error that says why: no process hangs, and no result is wrong. Then the
training continues from the last whole checkpoint: with three processes to the same bits as an
undisturbed training, and with two processes with the same sum of the residuals.

This runs all of them, and prints the processes' messages and the seconds until the last one ended:

    python -m pytest tests/system/test_faults.py -m slow -s

FAULTS_STOP=30 is the number of seconds for which a worker is stopped.
"""

import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest

import optax_ext
from benchmarks._common.namespaces import unusable
from benchmarks._common.processes import ROOT
from tests.system import _faults
from tests.system import _task as task

pytestmark = pytest.mark.usefixtures("default_promotion")

FAULTS = ("killed", "stopped", "stopped_with_patience", "hangs", "coordinator_killed", "link_down")
FAULTS += ("cannot_write", "disk_full", "cut_in_half", "flipped_bit")


def test_end_is_accepted_only_with_an_error_and_its_reason():
    """The tests of the faults show that real ends give these reasons."""
    said = "deadline: step 8 did not end within 10 s on process 0 of 3 (a): b"
    ends = [SimpleNamespace(status=status, errors=said) for status in (75, 0, None)]
    ends += [SimpleNamespace(status=-6, errors=""), SimpleNamespace(status=1, errors="a warning\n")]
    assert [_faults.explained(process) for process in ends] == [True, *[False] * 4]
    assert _faults.report(ends[0]) == "status 75, step 8 did not end within 10 s"


@pytest.mark.slow
def test_recipes_run(tmp_path):
    mesh = task.mesh_of_all()
    params, opt_state = task.first_state(mesh)
    step = optax_ext.make_train_step(task.loss_fn, task.transformation(), mesh)
    names = {"folder": tmp_path, "params": params, "opt_state": opt_state, "step": step}
    names["batches"] = [task.batch_of(step, mesh) for step in range(2)]
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/faults.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(program, names)
    assert int(optax_ext.get_state(names["restored"][1]).count) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hashes of a training that nothing disturbs. From here on, SIGTERM cleans up first."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield _faults.reference(tmp_path_factory.mktemp("undisturbed"))
    signal.signal(signal.SIGTERM, before)


# Orbax warns that it does not read the arrays if only the metadata is requested. After a failed
# read it drops the unfinished ones, which Python reports at any later time.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_ends_in_errors_and_the_training_goes_on(name, undisturbed, tmp_path):
    if name == "link_down" and (reason := unusable()):
        pytest.skip(reason)
    if name == "disk_full" and (os.geteuid() != 0 or shutil.which("mount") is None):
        pytest.skip("a file system of its own needs root and mount")
    # Compiled programs are kept next to the folder, for the processes that follow.
    folder = tmp_path / name
    folder.mkdir()
    getattr(_faults, name)(folder, undisturbed)
