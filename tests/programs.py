"""Programs of users, run in this process and in others."""

import contextlib
import os
import signal
import subprocess
import sys

from benchmarks._common.processes import ROOT, environment
from sparse_collectives.transport import _direct


@contextlib.contextmanager
def direct_messages(use):
    """Small sums and gathers are direct, or not, whatever a program sets in between."""
    before = _direct._in_use
    _direct.use_direct_messages(use)
    try:
        yield
    finally:
        _direct.use_direct_messages(before)


def status_of(main, argv):
    """The status of a program, whether it returns it or exits."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def refused(main, argv, capsys):
    """The one line in which a program names the error in its input."""
    assert status_of(main, argv) == 2
    message = capsys.readouterr().err.strip()
    assert message
    assert "\n" not in message
    return message


def started(module, *argv):
    """A program in a process of its own; its output and errors can be read."""
    # Unoptimized machine code compiles fastest, and the tests measure no times.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    # Tests that run in the background ignore SIGINT, and their child processes would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"XLA_FLAGS": flags},
            cwd=ROOT,
        )
    finally:
        signal.signal(signal.SIGINT, before)
