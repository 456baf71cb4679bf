"""A worker that trains a real model and comes and goes; `chaos` starts it.

``python -m benchmarks.elastic._worker JSON``; what it does is written to standard output, a JSON
object to a line: ``step`` with a digest of the parameters, and ``value`` on data held back.
"""

import hashlib
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np

import optax_ext
from optax_ext import elastic

from .._common.processes import die_with_parent
from ..learning import _tasks


def say(event: str, **values: Any) -> None:
    """One line for the program that waits for it."""
    print(json.dumps({"event": event, "time": time.time(), **values}), flush=True)


def main() -> None:
    """Trains until the steps of the settings are taken, or it is killed."""
    given = json.loads(sys.argv[1])
    die_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    jax.config.update("jax_platforms", "cpu")
    task = _tasks.make("text", given["width"], Path(given["text"]) if given["text"] else None, None)
    job = elastic.connect(
        given["address"],
        given["size"],
        given["number"],
        heartbeat_seconds=given["heartbeat"],
        collective_seconds=given["collective"],
    )

    def batch_of(turn: elastic.Turn) -> Any:
        rng = np.random.default_rng([given["seed"], turn.step, turn.rank])
        return task.batch_of(rng.integers(0, task.count, given["examples"]).astype(np.int32))

    training = elastic.Training(
        job,
        task.loss,
        optax_ext.sparse_adamw(given["rate"], axis="data", weight_decay=0.01),
        task.init(given["seed"]),
        batch_of,
        folder=given["folder"],
        save_every=given["save_every"],
        min_workers=given["min_workers"],
    )
    for step, _ in training.run(given["steps"]):
        params = training.params
        digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
        lost = sum(lost.waited for lost in training.lost)
        members = training.members
        say("step", step=step, members=members, digest=digest.hexdigest()[:12], lost=lost)
        if step % given["evaluate_every"] == 0 and members[0] == job.process_id:
            say("value", step=step, value=task.evaluate(params))
    say("done", step=training.step)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # At once, since the others wait for this one until it is gone.
        traceback.print_exc()
        os._exit(1)
