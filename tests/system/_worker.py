"""One process of the training that the faults happen to; `_training` starts it.

Its argument is a JSON object of Settings. What it does is written to standard output, a JSON object
to a line.
"""

import dataclasses
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax

import optax_ext
from benchmarks._common.processes import die_with_parent
from tests.system import _task


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one process is to do.

    Attributes:
      coordinator: host:port of process 0.
      processes: P.
      index: of this process.
      folder: of the checkpoints.
      steps: to train up to.
      save_every: steps between two checkpoints.
      resume: step of the checkpoint to start from; 0 for none.
      heartbeat: seconds without one, after which jax takes a process for dead.
      deadline: seconds for each step and checkpoint.
      first_deadline: seconds for the first block, which compiles.
      hold_at: step before which this process waits for a line on standard input; -1 for none.
      limit_at: step at whose checkpoint this process can't write any more; -1 for none.
    """

    coordinator: str
    processes: int
    index: int
    folder: str
    steps: int
    save_every: int
    resume: int
    heartbeat: int
    deadline: float
    first_deadline: float
    hold_at: int = -1
    limit_at: int = -1


def say(event: str, **values: Any) -> None:
    """One line for the program that waits for it."""
    print(json.dumps({"event": event, **values}), flush=True)


def main() -> None:
    """Trains; see the top of this file."""
    die_with_parent()
    settings = Settings(**json.loads(sys.argv[1]))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        settings.coordinator,
        settings.processes,
        settings.index,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=settings.heartbeat,
        shutdown_timeout_seconds=settings.heartbeat,
    )
    watchdog = optax_ext.Watchdog(settings.deadline, first_seconds=settings.first_deadline)
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
            say("saved", step=done)
    with watchdog("the end"):
        manager.close()
        jax.distributed.shutdown()
    say("finished")


def _start(settings: Settings, manager: Any, mesh: Any) -> tuple[Any, Any]:
    """The first state, or that of a checkpoint of any number of workers."""
    if not settings.resume:
        return jax.block_until_ready(_task.first_state(mesh))
    saved = manager.metadata(settings.resume).custom_metadata["state"]
    if saved["workers"] == settings.processes:
        return _task.restore(manager, settings.resume, mesh)
    params, opt_state = _task.restore_on_host(manager, settings.resume)
    before = _task.residual_sum(opt_state)
    fresh_params, fresh_state = _task.first_state(mesh)
    opt_state = optax_ext.reshard(opt_state, fresh_state)
    params = jax.tree.map(
        lambda x, like: _task.placed(jax.device_get(x), like.sharding), params, fresh_params
    )
    after = _task.residual_sum(_gathered(opt_state))
    say(
        "resharded",
        workers_before=saved["workers"],
        largest=float(abs(before).max()),
        difference=float(abs(after - before).max()),
    )
    return params, opt_state


def _gathered(opt_state: Any) -> Any:
    """The state with the residuals of all processes on each."""
    state = optax_ext.get_state(opt_state)
    whole = jax.experimental.multihost_utils.process_allgather(state.residual, tiled=True)
    return state._replace(residual=whole)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # Outside of the watchdog's blocks: the others must not be waited for here either.
        import traceback

        traceback.print_exc()
        os._exit(1)
