"""How a worker process talks to the program that started it: lines of JSON on pipes.

A worker does what a line on its standard input says and answers with one line. Nothing of
this goes over the network that is measured.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def start(host_name: str) -> Callable[[Any], None]:
    """Prepares a worker process; returns the function that writes an answer.

    Args:
      host_name: what this host is called: the name that others resolve to its address.
    """
    # No worker outlives the program that started it, whatever becomes of that.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Gloo takes the address to which this name resolves.
    socket.sethostname(host_name)
    # Whatever a library prints goes to the log and not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    return answer


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


def interface_bytes() -> tuple[int, int]:
    """Bytes that this host has received and sent, headers included."""
    folder = Path("/sys/class/net/eth0/statistics")
    received, sent = ((folder / f"{way}_bytes").read_text() for way in ("rx", "tx"))
    return int(received), int(sent)


def pin(host: int) -> None:
    """Keeps this process on one core, before any library counts the cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[host % len(cores)]})
