"""A missed deadline, or an error among several processes, ends the process with a message."""

import os
import subprocess
import sys
import threading

import pytest

import optax_ext

START = """
import sys, threading, time
import jax
jax.config.update("jax_platforms", "cpu")
import optax_ext

def waits_for_ever(after=None):
    if after is not None:
        after()
    threading.Event().wait()

# All deadlines have passed, whatever the load of the machine.
def an_hour_passes(*watchdogs):
    now = time.monotonic
    time.monotonic = lambda: now() + 3600
    for watchdog in watchdogs:
        with watchdog._changed:
            watchdog._changed.notify_all()
"""

# Of real time, long enough to be in the function that waits.
FIRST = """
watchdog = optax_ext.contrib.Watchdog(seconds=0.1, first_seconds=2)
with watchdog("step 0"):
    waits_for_ever()
"""
SECOND = """
watchdog = optax_ext.contrib.Watchdog(seconds=60, first_seconds=600)
with watchdog("step 0"):
    pass
with watchdog("step 1"):
    waits_for_ever(lambda: an_hour_passes(watchdog))
"""
# The deadline of the first watchdog passes while the second one is waited for.
LEFT_IN_TIME = """
early = optax_ext.contrib.Watchdog(seconds=60, first_seconds=60)
late = optax_ext.contrib.Watchdog(seconds=600, exit_status=76)
with early("an early block"):
    pass
with late("a late block", seconds=120):
    waits_for_ever(lambda: an_hour_passes(early, late))
"""
# Two processes, of which this is one: what jax says where they are connected.
SEVERAL = """
jax.process_count, jax.process_index = lambda: 2, lambda: 1
watchdog = optax_ext.contrib.Watchdog(seconds=60)
try:
    with watchdog("step 7"):
        raise {error}
finally:
    print("the process went on")
"""


def run(program):
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", START + program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message", "status"),
    [
        (FIRST, "step 0 did not end within 2 s on process 0 of 1", 75),
        (SECOND, "step 1 did not end within 60 s on process 0 of 1", 75),
        (LEFT_IN_TIME, "a late block did not end within 120 s", 76),
    ],
    ids=["first", "second", "left_in_time"],
)
def test_a_missed_deadline_ends_the_process_and_says_where_it_was(program, message, status):
    done = run(program)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "from the last whole checkpoint" in done.stderr
    assert "in waits_for_ever" in done.stderr  # the stack of the thread that hangs


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("jax.errors.JaxRuntimeError('UNKNOWN: closed')", 75),
        pytest.param("KeyError('UNKNOWN: closed')", 1, marks=pytest.mark.slow),
    ],
    ids=["runtime", "other"],
)
def test_an_error_of_one_among_several_processes_ends_it_at_once(error, status):
    done = run(SEVERAL.format(error=error))
    assert done.returncode == status, done.stderr
    assert "step 7 failed on process 1 of 2" in done.stderr
    assert "UNKNOWN: closed" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "went on" not in done.stdout


def test_a_single_process_gets_its_exception_and_close_ends_the_thread():
    before = threading.active_count()
    watchdog = optax_ext.contrib.Watchdog(seconds=60)
    with pytest.raises(KeyError, match="mine"), watchdog("step 0"):
        raise KeyError("mine")
    # Disarmed, so another block is possible, but none inside of it.
    with watchdog("outer"):
        with pytest.raises(RuntimeError, match="'inner' is inside 'outer'"), watchdog("inner"):
            pass
        assert watchdog._armed is not None
        assert threading.active_count() == before + 1
    assert watchdog._armed is None
    watchdog.close()
    assert threading.active_count() == before
    watchdog.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds must be a positive number of seconds, got 0"),
        ({"seconds": float("nan")}, "seconds must be a positive number of seconds, got nan"),
        ({"seconds": 1, "first_seconds": -1}, "first_seconds must be a positive number"),
        ({"seconds": 1, "exit_status": 0}, "exit_status must be between 1 and 255, got 0"),
    ],
)
def test_what_can_be_no_deadline_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        optax_ext.contrib.Watchdog(**arguments)
    watchdog = optax_ext.contrib.Watchdog(seconds=1)
    with pytest.raises(ValueError, match="seconds must be a positive"), watchdog("x", seconds=-1):
        pass
