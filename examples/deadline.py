"""A deadline for a step of several processes, which ends a process instead of letting it hang.

    with deadline("step 3", seconds=60):
        params, opt_state, loss = jax.block_until_ready(step(params, opt_state, batch))

Copy this file to your program. A collective ends when every process takes part. If one process
hangs, so do all the others, and if one raises an exception, Python waits in
`jax.distributed.shutdown` for processes that wait for it. `deadline` therefore ends the process at
once and without cleaning up.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import traceback
from collections.abc import Iterator

import jax

# EX_TEMPFAIL of sysexits.h: the failed work may succeed when it is started again.
AGAIN = 75


@contextlib.contextmanager
def deadline(what: str, seconds: float) -> Iterator[None]:
    """A block that ends the process if it takes longer, or if one of several processes fails in it.

    A missed deadline prints the stack of every thread, and ends the process with status 75. An
    exception among several processes ends it with 75 for `jax.errors.JaxRuntimeError`, which a lost
    connection raises, and with 1 for any other; a single process gets its exception. The block has
    to wait for its result, because jax returns from a step before it is computed. A thread watches
    the deadline and needs the GIL, so it does not notice a call that never releases the GIL.
    """
    processes = jax.process_count()
    where = f"process {jax.process_index()} of {processes} ({socket.gethostname()}, {os.getpid()})"
    advice = "This process ends now. Start all of them again from the last whole checkpoint."

    def missed() -> None:
        _write(f"deadline: {what} did not end within {seconds:g} s on {where}. {advice}\n")
        faulthandler.dump_traceback(2, all_threads=True)
        os._exit(AGAIN)

    timer = threading.Timer(seconds, missed)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        timer.cancel()
        if processes == 1:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        _write(traceback.format_exc())
        _write(f"deadline: {what} failed on {where} with {text}. {advice}\n")
        os._exit(AGAIN if isinstance(error, jax.errors.JaxRuntimeError) else 1)
    finally:
        timer.cancel()


def _write(text: str) -> None:
    # To the file descriptor, since a thread that hangs may hold the lock of a buffer.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
