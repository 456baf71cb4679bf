"""Lines in the log that say what this process waits for, so that it does not seem to hang."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator

import jax

log = logging.getLogger("optax_ext.elastic")

# Seconds before the first line, and the longest time between two lines.
FIRST, LONGEST = 5.0, 60.0


class Waiting:
    """Logs the reason of a wait: not at once, and then after pauses that double up to a minute.

    ``seconds`` is how long the process waits at most; None if there is no limit.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._pause = FIRST
        self._next = clock() + FIRST

    def say(self, what: Callable[[], str]) -> None:
        """Logs it if it is time for a line; it is to be called often."""
        now = self._clock()
        if now < self._next:
            return
        self._pause = min(2 * self._pause, LONGEST)
        self._next = now + self._pause
        left = "" if self._end is None else f"up to {max(self._end - now, 0.0):.0f} s more "
        # The coordinator, which `what` may ask, can be gone.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            log.warning("waiting %sfor %s", left, what())


@contextlib.contextmanager
def waiting(what: Callable[[], str], seconds: float | None = None) -> Generator[None]:
    """Logs a line now and then while the block runs, from a thread: a call of jax may block."""
    waits, over = Waiting(seconds), threading.Event()

    def say() -> None:
        while not over.wait(0.2):
            waits.say(what)

    threading.Thread(target=say, name="optax_ext.elastic waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
