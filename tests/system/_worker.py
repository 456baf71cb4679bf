"""One process of the training that the faults happen to; `_training` starts it.

Its argument is a JSON object: ``steps`` to train up to, ``save_every`` so many a checkpoint in the
``folder``, and ``resume``, the step of the one to start from, 0 for none; ``heartbeat``, seconds
without one, after which jax takes a process for dead, ``deadline`` for each step and checkpoint and
``first_deadline`` for the first, which compiles; ``hold_at``, the step before which it waits for a
line on standard input, and ``limit_at``, at whose checkpoint it can't write any more; -1 for none.
What it does is written to standard output, a JSON object to a line.
"""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

import optax_ext
from tests import groups
from tests.groups import say
from tests.system import _task


def main() -> None:
    """Trains; see the top of this file."""
    settings = SimpleNamespace(**groups.settings())
    groups.join(
        vars(settings),
        heartbeat_timeout_seconds=settings.heartbeat,
        shutdown_timeout_seconds=settings.heartbeat,
    )
    watchdog = optax_ext.contrib.Watchdog(settings.deadline, first_seconds=settings.first_deadline)
    with watchdog("the start"):
        mesh = _task.mesh_of_all()
        manager = _task.manager_of(Path(settings.folder))
        params, opt_state = _start(settings, manager, mesh)
        train_step = optax_ext.make_train_step(_task.loss_fn, _task.transformation(), mesh)
    say("started", step=settings.resume, hash=_task.hash_of((params, opt_state)))
    for step in range(settings.resume, settings.steps):
        batch = _task.batch_of(step, mesh)
        say("begin", step=step)
        if step == settings.hold_at:
            sys.stdin.readline()
        # The first step compiles.
        seconds = settings.first_deadline if step == settings.resume else None
        with watchdog(f"step {step}", seconds=seconds):
            params, opt_state, loss = jax.block_until_ready(train_step(params, opt_state, batch))
        say("end", step=step, loss=float(loss), hash=_task.hash_of((params, opt_state)))
        done = step + 1
        if done % settings.save_every == 0:
            if step == settings.limit_at:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            say("saving", step=done)
            with watchdog(f"checkpoint {done}", seconds=settings.first_deadline):
                _task.save(manager, done, params, opt_state)
    with watchdog("the end"):
        manager.close()
        jax.distributed.shutdown()
    say("finished")


def _start(settings: SimpleNamespace, manager: Any, mesh: Any) -> tuple[Any, Any]:
    """The first state, or that of a checkpoint of any number of workers."""
    if not settings.resume:
        return jax.block_until_ready(_task.first_state(mesh))
    saved = manager.metadata(settings.resume).custom_metadata["state"]
    if saved["workers"] == settings.processes:
        return _task.restore(manager, settings.resume, mesh)
    params, opt_state = _task.restore(manager, settings.resume)
    before = _task.residual_sum(opt_state)
    opt_state = optax_ext.reshard(opt_state, _task.first_state(mesh)[1])
    difference = abs(_task.residual_sum(opt_state) - before).max()
    say("resharded", largest=float(abs(before).max()), difference=float(difference))
    return params, opt_state


if __name__ == "__main__":
    groups.run(main)
