"""How a worker process talks to the program that started it: lines of JSON on pipes.

A worker does what a line on its standard input says and answers with one line. Nothing of
this goes over the network that is measured.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._common.processes import die_with_parent


def start() -> tuple[dict[str, Any], Callable[[Any], None]]:
    """Prepares a worker process: what it is told, and the function that writes an answer."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints goes to standard error and not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    config = json.loads(sys.argv[1])
    if config["pin"]:
        # Before any library counts the cores.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[config["host"] % len(cores)]})
    return config, answer


def serve(answer: Callable[[Any], None], commands: dict[str, Callable[..., Any]]) -> None:
    """Carries out commands until the input ends; the first one answers that it is ready."""
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answer(commands[name](**request))
        except Exception as error:
            traceback.print_exc()
            answer({"failure": f"{type(error).__name__}: {error}".splitlines()[0]})


def measured(
    barrier: Callable[[], None], take: Callable[[], list[float]], steps: int
) -> dict[str, Any]:
    """Seconds, bytes and words of a step, the mean of those that ``take`` takes."""
    barrier()
    before = _interface_bytes()
    start, busy = time.perf_counter(), time.process_time()
    words = take()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    # What others still have to send for these steps is there after a barrier.
    barrier()
    after = _interface_bytes()
    return {
        "seconds": seconds / steps,
        "cpu_seconds": busy / steps,
        "received": (after[0] - before[0]) / steps,
        "sent": (after[1] - before[1]) / steps,
        "words": sum(words) / steps if words else None,
    }


def _interface_bytes() -> tuple[int, int]:
    """Bytes that this host has received and sent, headers included."""
    folder = Path("/sys/class/net/eth0/statistics")
    received, sent = ((folder / f"{way}_bytes").read_text() for way in ("rx", "tx"))
    return int(received), int(sent)
