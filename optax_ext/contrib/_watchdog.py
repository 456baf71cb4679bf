"""A deadline for a process that waits for others, which may never come."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import threading
import time
import traceback
from collections.abc import Generator
from typing import NamedTuple

import jax

# EX_TEMPFAIL of sysexits.h: the failed work may succeed when it is started again.
_EXIT_STATUS = 75


class _Armed(NamedTuple):
    what: str
    seconds: float
    deadline: float


class Watchdog:
    """Ends this process with a message if a step misses its deadline, or fails.

    A collective ends when every process takes part. If one process hangs, so do all the
    others, and if one raises an exception, Python waits in ``jax.distributed.shutdown`` for
    processes that wait for it. The watchdog therefore ends the process at once and without
    cleaning up, with ``os._exit``:

    - when a ``with`` block is not left before its deadline: with ``exit_status``;
    - when an exception leaves the block and there are several processes: with
      ``exit_status`` for ``jax.errors.JaxRuntimeError``, which a lost connection
      raises, and with 1 for any other exception. A single process gets its
      exception.

    The block has to wait for its result with ``jax.block_until_ready``, since JAX
    returns from a step before it is computed. Blocks can't be nested. A thread watches
    the deadline and needs the GIL, so it does not notice a call that never releases the GIL.

    Make it after ``jax.distributed.initialize``.

    Args:
      seconds: the deadline of each block.
      first_seconds: the deadline of the first block, which compiles. At least ``seconds``.
      exit_status: 1 to 255. The default, 75, is ``EX_TEMPFAIL``: start again, from the last
        whole checkpoint.

    Raises:
      ValueError: a deadline that is not a positive number, or another exit status.

    Cost: about ten microseconds a block, and one thread.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> watchdog = Watchdog(seconds=60)
      >>> for step in range(2):
      ...     with watchdog(f"step {step}"):
      ...         loss = jax.block_until_ready(jnp.ones(()) * step)
      >>> watchdog.close()
    """

    def __init__(
        self, seconds: float, *, first_seconds: float = 600.0, exit_status: int = _EXIT_STATUS
    ):
        self._seconds = _check_seconds("seconds", seconds)
        self._next = max(self._seconds, _check_seconds("first_seconds", first_seconds))
        if not 1 <= exit_status <= 255:
            raise ValueError(
                f"exit_status must be between 1 and 255, got {exit_status}: 0 would report success."
            )
        self._exit_status = exit_status
        # Asked here, since the thread could no longer ask a backend that hangs.
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._changed = threading.Condition()
        self._armed: _Armed | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def __call__(self, what: str, *, seconds: float | None = None) -> Generator[None]:
        """A block with a deadline.

        Args:
          what: the work in the block, for the message, such as ``f"step {step}"``.
          seconds: another deadline for this block, for example for a checkpoint.

        Raises:
          RuntimeError: inside another block of this watchdog.
        """
        if seconds is None:
            seconds = self._next
        self._arm(what, _check_seconds("seconds", seconds))
        try:
            yield
        except Exception as error:
            # The exception may have come late, but the deadline no longer counts.
            self._disarm()
            if self._processes == 1:
                raise
            runtime = isinstance(error, jax.errors.JaxRuntimeError)
            self._leave(self._failed(what, error), self._exit_status if runtime else 1)
        finally:
            self._disarm()
        self._next = self._seconds

    def close(self) -> None:
        """Ends the thread, which would not keep the process from ending either."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _arm(self, what: str, seconds: float) -> None:
        with self._changed:
            if self._armed is not None:
                raise RuntimeError(
                    f"{what!r} is inside {self._armed.what!r} of the same watchdog, whose deadline "
                    "it would replace. Use one block, or one after the other."
                )
            self._armed = _Armed(what, seconds, time.monotonic() + seconds)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="optax_ext.contrib.Watchdog", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def _disarm(self) -> None:
        with self._changed:
            self._armed = None

    def _watch(self) -> None:
        me = threading.current_thread()
        with self._changed:
            while self._thread is me:
                armed = self._armed
                left = math.inf if armed is None else armed.deadline - time.monotonic()
                if armed is not None and left <= 0:
                    # With the lock held, so that the block can no longer be left.
                    self._leave(self._missed(armed), self._exit_status, threads=True)
                self._changed.wait(None if armed is None else left)

    def _where(self) -> str:
        return (
            f"process {self._process} of {self._processes} ({socket.gethostname()}, pid "
            f"{os.getpid()})"
        )

    def _missed(self, armed: _Armed) -> str:
        cause = (
            "another process hangs, died or cannot be reached, and its own output says more"
            if self._processes > 1
            else "the result that it waits for does not arrive"
        )
        return (
            f"{armed.what} did not end within {armed.seconds:g} s on {self._where()}: {cause}. "
            "This process ends now. Start all of them again from the last whole checkpoint. If the "
            "step only needs longer, give Watchdog more seconds."
        )

    def _failed(self, what: str, error: Exception) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return (
            f"{what} failed on {self._where()} with {text[:400]}. This process ends now, without "
            f"waiting for the other {self._processes - 1}, which wait for it. Start all of them "
            "again from the last whole checkpoint."
        )

    def _leave(self, message: str, status: int, threads: bool = False) -> None:
        # To the file descriptor, since a thread that hangs may hold the lock of a buffer.
        if not threads:
            _write(traceback.format_exc())
        _write(f"optax_ext.contrib.Watchdog: {message}\n")
        if threads:
            faulthandler.dump_traceback(2, all_threads=True)
        os._exit(status)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _check_seconds(name: str, seconds: float) -> float:
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}.")
    return float(seconds)
