"""A worker of the tests, whose gradients are whole numbers, so that nothing is ever rounded.

``python -m tests.elastic._worker JSON`` writes what it does to standard output, a JSON object
to a line. ``optimizer`` is ``sum``, whose parameters add up the delivered values, or
``sparse_adamw``. ``pause`` is the number of seconds between two steps, ``hang_at`` the step before
which it hangs in Python, ``full_at`` the step at which process 0 finds the disk full,
``release_fails`` the process whose first handover fails after the others have finished it,
``groups_used`` how many groups of devices workers 0 and 1 have used, ``die_at``
a place in the code at which it ends at once, and ``loads_after`` the number of another worker, for
whose arrival it waits before it loads a program.
"""

import errno
import hashlib
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
from benchmarks._common.processes import die_with_parent
from optax_ext import elastic
from optax_ext.elastic import _checkpoints, _files, _job, _programs, _training
from optax_ext.elastic._training_state import own
from tests.groups import run, say, settings

SIZE = 120
# All sums of multiples of it by two, three or four workers are exact.
UNIT = 12.0


def transformation(name: str) -> optax.GradientTransformation:
    """The transformation with this name in the settings."""
    if name == "sum":
        return optax.chain(optax_ext.topk_a(0.05, axis="data"), optax.sgd(1.0))
    return optax_ext.sparse_adamw(
        1e-2, density=0.05, axis="data", every=3 if "every" in name else 1
    )


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    """Its gradient is the mean of the rows of a batch."""
    return jnp.mean(batch @ params["a"].ravel()) + 0.0 * params["b"].sum()


def gradient_of(step: int, rank: int) -> np.ndarray:
    """The gradient of a worker."""
    rng = np.random.default_rng([step, rank])
    return (UNIT * rng.integers(-8, 9, SIZE)).astype(np.float32)


def of(tree: Any) -> dict[str, float]:
    """Two exact numbers that distinguish vectors."""
    x = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
    weights = np.random.default_rng(0).integers(1, 1000, x.size)
    return {"sum": float(x.sum()), "weighted": float(weights @ x)}


def main() -> None:
    """Trains until the steps of the settings are taken."""
    given = settings()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    job = elastic.connect(
        given["address"],
        given["size"],
        given["number"],
        heartbeat_seconds=given["heartbeat"],
        collective_seconds=given.get("collective", 10),
        stuck_seconds=given.get("stuck", 600),
        devices=given.get("devices", 8),
    )
    _die(given.get("die_at", ""))
    if "groups_used" in given:
        job._client.key_value_increment(f"{_job._GROUPS}{(0, 1)}", given["groups_used"])
    if "full_at" in given and job.process_id == 0:
        _fill(given["full_at"])
    if given.get("release_fails") == job.process_id:
        _fail_to_release()
    if "loads_after" in given:
        _load_after(job, given["loads_after"])
    step_before = {}

    def batch_of(request: elastic.BatchRequest) -> np.ndarray:
        if request.step >= given.get("hang_at", math.inf):
            say("hangs")
            time.sleep(3600)
        step_before.update(request=request._asdict())
        return np.stack([gradient_of(request.step, request.rank)] * 2)

    name = given.get("optimizer", "sum")
    params = {"a": np.zeros((SIZE // 2, 2), np.float32), "b": np.zeros(3, np.float32)}
    training = elastic.Training(
        job,
        loss_fn,
        transformation(name),
        {**params, **({"c": np.zeros(2, np.float32)} if given.get("other_model") else {})},
        batch_of,
        check_every=given.get("check_every", 5),
        folder=given.get("folder"),
        save_every=given.get("save_every"),
        min_workers=given.get("min_workers", 1),
        leave_on=(signal.SIGTERM,),
    )
    say("made", seconds=time.time() - given["began"])
    # Before anything is handed over.
    states = {}
    poll = training._poll

    def poll_and_keep(group: Any, now: Any) -> None:
        states[training.step] = training._before, training._now
        poll(group, now)

    training._poll = poll_and_keep
    for step, loss in training.run(given["steps"]):
        before, now = states.pop(step, (training._before, training._now))
        values = {}
        if before is not None and before.step == step - 1:
            values = {
                "before": _state_of(before),
                "after": _state_of(now),
                "gradient": of(gradient_of(step - 1, step_before["request"]["rank"])),
            }
        digest = hashlib.sha256(b"".join(np.asarray(x) for x in jax.tree.leaves(training.params)))
        say(
            "step",
            step=step,
            loss=float(loss),
            members=training.members,
            digest=digest.hexdigest()[:12],
            time=time.time(),
            lost=[lost._asdict() for lost in training.lost],
            **values,
        )
        time.sleep(given.get("pause", 0.0))
    say("done", step=training.step)
    sys.stdout.flush()
    os._exit(0)


def _state_of(held: Any) -> dict[str, Any]:
    state = optax_ext.get_state(own(held.opt_state))
    return {"params": of(own(held.params)), "residual": of(state.residual)}


def _load_after(job: elastic.Job, number: int) -> None:
    original = _programs.Programs.load

    def load(*args: Any) -> Any:
        say("loads")
        while number not in job._all(_job._HERE):
            time.sleep(0.01)
        return original(*args)

    _programs.Programs.load = load


def _fill(step: int) -> None:
    """Lets the disk be full for one checkpoint."""
    write = _files.write

    def full(place: Path, content: Any) -> None:
        if place.parts[-3] == str(step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(place, content)

    _files.write = full


def _fail_to_release() -> None:
    """Lets the first handover fail at its end, as if this worker had heard of an error."""
    load, failed = _programs.Programs.load, []

    def loaded(*args: Any) -> Any:
        group = load(*args)

        def release(*state: Any) -> Any:
            given = jax.block_until_ready(group.release(*state))
            if not failed:
                failed.append(say("fails"))
                raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed")
            return given

        return group._replace(release=release)

    _programs.Programs.load = loaded


def _die(place: str) -> None:
    """Lets this process end at once when it reaches a place in the code."""

    def dies(*_: Any, **__: Any) -> Any:
        say("dies", place=place)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "compile":
        _programs.Programs._compile = dies
    elif place == "admit":
        _training.restored = dies
    elif place == "save":
        _checkpoints.Checkpoints.wait = dies
        original = _checkpoints.Checkpoints.save

        def save(self: Any, *args: Any) -> None:
            original(self, *args)
            dies()

        _checkpoints.Checkpoints.save = save


if __name__ == "__main__":
    run(main)
