"""A worker that trains a real model, and that `chaos` starts, kills and starts again.

``python -m benchmarks.elastic._worker JSON`` writes JSON objects to standard output, one a line:
``step`` with a digest of the parameters, and ``value`` with the loss on held-out data.
"""

import hashlib
from typing import Any

import jax
import numpy as np

import optax_ext
from optax_ext import elastic

from ._process import run, say


def main(given: dict[str, Any], task: Any) -> None:
    """Trains until the steps of the settings are taken, or until it is killed."""
    job = elastic.connect(
        given["address"],
        given["size"],
        given["number"],
        heartbeat_seconds=given["heartbeat"],
        collective_seconds=given["collective"],
    )

    def batch_of(request: elastic.BatchRequest) -> Any:
        rng = np.random.default_rng([given["seed"], request.step, request.rank])
        return task.batch_of(rng.integers(0, task.count, given["examples"]).astype(np.int32))

    rounds = {name: given[name] for name in ("density", "every") if name in given}
    training = elastic.Training(
        job,
        task.loss,
        optax_ext.sparse_adamw(given["rate"], axis="data", weight_decay=0.01, **rounds),
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
            info = optax_ext.get_info(training.opt_state)
            received = 4.0 * float(info.words.addressable_data(0).ravel()[0])
            say("value", step=step, value=task.evaluate(params), bytes=received)
    say("done", step=training.step)


if __name__ == "__main__":
    run(main)
