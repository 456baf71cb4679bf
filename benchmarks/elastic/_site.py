"""A site that trains a real model and exchanges through a store; `sites_over_links` starts it.

``python -m benchmarks.elastic._site JSON``. It writes a JSON object for each round that it has
applied, and for each value on held-out data. SIGTERM ends it after its round.
"""

import signal
import time
from typing import Any

import jax
import numpy as np
import optax

from optax_ext import sites

from ._process import run, say


def main(given: dict[str, Any], task: Any) -> None:
    """Trains until the rounds of the settings are over, or it is asked to end."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    tx = optax.adamw(given["rate"], weight_decay=0.01)

    @jax.jit
    def take(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        gradients = jax.grad(task.loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    began = time.monotonic()
    site = sites.Site(
        given["store"],
        given["name"],
        task.init(given["seed"]),
        density=given["density"],
        quorum=given["quorum"],
        poll=given["poll"],
        grace=given["grace"],
    )
    say("joined", round=site.round, seconds=time.monotonic() - began)
    # As a job would that has a checkpoint, or none: the moments begin at zero.
    params = jax.tree.map(jax.numpy.asarray, site.params)
    state = tx.init(params)
    rng = np.random.default_rng([given["seed"], given["number"]])
    while site.round < given["rounds"] and not asked:
        began = time.monotonic()
        for _ in range(given["every"]):
            at = rng.integers(0, task.count, given["examples"]).astype(np.int32)
            params, state = take(params, state, task.batch_of(at))
        jax.block_until_ready(params)
        taken = time.monotonic() - began
        params = site.exchange(params, tokens=given["every"] * given["examples"])
        if site.last is not None:
            values = {"seconds": time.monotonic() - began, "steps": taken, **site.last._asdict()}
            say("round", **values)
        if site.round % given["evaluate_every"] == 0:
            say("value", round=site.round, value=task.evaluate(site.params))
    params = site.finish(params)
    site.close()
    say("done", round=site.round, value=task.evaluate(site.params))


if __name__ == "__main__":
    run(main)
