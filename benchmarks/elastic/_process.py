"""The beginning and the end of a process that trains a real model and reports in JSON lines."""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .._common.processes import die_with_parent
from ..learning import _tasks


def say(event: str, **values: Any) -> None:
    """Writes one line for the program that waits for it."""
    print(json.dumps({"event": event, "time": time.time(), **values}), flush=True)


def run(main: Callable[[dict[str, Any], Any], None]) -> None:
    """Calls ``main(given, task)`` with the settings of the command line, and ends the process."""
    try:
        given = json.loads(sys.argv[1])
        die_with_parent()
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        jax.config.update("jax_platforms", "cpu")
        text = Path(given["text"]) if given["text"] else None
        main(given, _tasks.make("text", given["width"], text, None))
    except Exception:
        # At once, since the others wait for this process until it is gone.
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
