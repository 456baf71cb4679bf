"""The training of several processes and its checkpoints, for the workers and the checks.

`_faults` starts each process as `python -m tests.system._task JSON`. The settings are ``steps``,
the last step; ``save_every``, the steps between checkpoints in the ``folder``; ``resume``, the step
of the checkpoint to start from, 0 for none; ``heartbeat``, the seconds without one after which jax
takes a process for dead; ``deadline``, for each step and checkpoint, and ``first_deadline`` for the
first, which compiles; ``hold_at``, the step before which it waits for a line on standard input; and
``limit_at``, at whose checkpoint it can't write any more; -1 for none. It writes what it does to
standard output, a JSON object to a line.
"""

import hashlib
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from examples.checksums import check_checksums, checksums
from examples.deadline import deadline
from tests import groups
from tests.groups import say

AXIS = "data"
_INPUTS, _HIDDEN, _OUTPUTS = 32, 96, 8
# Divisible by 1, 2, 3, 4, 6 and 8 workers, so that each number of them can take the same batches.
_BATCH = 24


def transformation() -> optax.GradientTransformation:
    """Ok-Topk before Adam."""
    return optax.chain(optax_ext.ok_topk(density=0.05, axis=AXIS), optax.adam(1e-3))


def first_params() -> dict[str, np.ndarray]:
    """The parameters before the first step, on the host."""
    rng = np.random.default_rng(0)
    shapes = {"in": (_INPUTS, _HIDDEN), "out": (_HIDDEN, _OUTPUTS)}
    return {name: np.float32(0.2 * rng.standard_normal(x)) for name, x in shapes.items()}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean squared error of a network with one hidden layer."""
    inputs, outputs = batch
    return jnp.mean((jnp.tanh(inputs @ params["in"]) @ params["out"] - outputs) ** 2)


def mesh_of_all(devices: list[jax.Device] | None = None) -> Mesh:
    """All devices of all processes, or these."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def batch_of(step: int, mesh: Mesh, *, bad: bool = False) -> Any:
    """The batch of a step, split over the workers; it depends on nothing but the step.

    A bad batch has a row of the last worker that is not finite.
    """
    rng = np.random.default_rng([1, step])
    host = [
        rng.standard_normal((_BATCH, width)).astype(np.float32) for width in (_INPUTS, _OUTPUTS)
    ]
    host[0][-1, 0] += np.nan if bad else 0
    return tuple(placed(x, NamedSharding(mesh, P(AXIS))) for x in host)


def placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which each process gives its own part."""
    return jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])


def first_state(mesh: Mesh) -> tuple[Any, Any]:
    """Parameters and optimizer state before the first step."""
    params = jax.tree.map(lambda x: placed(x, NamedSharding(mesh, P())), first_params())
    return params, optax_ext.init_state(transformation(), params, mesh)


def whole(x: Any) -> np.ndarray:
    """The whole of an array that is spread over the processes, on each of them."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def hash_of(tree: Any) -> str:
    """A hash of this process's parts of the arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()[:16]


def manager_of(folder: Path) -> ocp.CheckpointManager:
    """A manager that writes each checkpoint before the next step."""
    return ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    )


def save(manager: ocp.CheckpointManager, step: int, params: Any, opt_state: Any) -> None:
    """Writes parameters, state, the state's metadata, and checksums."""
    tree = (params, opt_state)
    metadata = {
        "state": optax_ext.checkpoint_metadata(opt_state),
        "checksums": checksums(tree),
    }
    manager.save(step, args=ocp.args.StandardSave(tree), custom_metadata=metadata)


def restore(manager: Any, step: int, mesh=None, tx=None, like=None) -> tuple[Any, Any]:
    """Parameters and state, to the bit, for the number of workers that saved them.

    Without a mesh, the state of all workers is on one device of this process. The transformation
    and the example of parameters are by default the ones in this file. Raises ValueError if the
    checkpoint has another state or other arrays, and any error of orbax about its files.
    """
    tx, like = tx or transformation(), first_params() if like is None else like
    saved = manager.metadata(step).custom_metadata
    host = None if mesh else SingleDeviceSharding(jax.local_devices()[0])
    place = host or NamedSharding(mesh, P())
    on = mesh or AbstractMesh((saved["state"]["workers"],), (AXIS,))
    state = optax_ext.abstract_state(tx, like, on, sharding=host)
    optax_ext.check_metadata(saved["state"], state)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
    tree = manager.restore(step, args=ocp.args.StandardRestore((params, state)))
    check_checksums(saved["checksums"], tree)
    return tree


def last_whole(folder: Path) -> tuple[int, dict[int, str]]:
    """The newest checkpoint that can be read and has its checksums, 0 for none; for one process.

    It also returns the error of each newer checkpoint.
    """
    damaged = {}
    with manager_of(folder) as manager:
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                restore(manager, step)
            except Exception as error:  # whatever a damaged file raises in orbax
                damaged[step] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            else:
                return step, damaged
    return 0, damaged


def residual_sum(opt_state: Any) -> np.ndarray:
    """``f64[n]``: the residuals of all workers added up, on the host of each process."""
    return whole(optax_ext.get_state(opt_state).residual).sum(axis=0, dtype=np.float64)


def main() -> None:
    """Trains, as the docstring of this file says."""
    settings = SimpleNamespace(**groups.settings())
    timeouts = ("heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    groups.join(vars(settings), **dict.fromkeys(timeouts, settings.heartbeat))
    with deadline("the start", settings.first_deadline):
        mesh = mesh_of_all()
        manager = manager_of(Path(settings.folder))
        params, opt_state = _start(settings, manager, mesh)
        train_step = optax_ext.make_train_step(loss_fn, transformation(), mesh)
    say("started", step=settings.resume, hash=hash_of((params, opt_state)))
    for step in range(settings.resume, settings.steps):
        batch = batch_of(step, mesh)
        say("begin", step=step)
        if step == settings.hold_at:
            sys.stdin.readline()
        # The first step compiles.
        seconds = settings.first_deadline if step == settings.resume else settings.deadline
        with deadline(f"step {step}", seconds):
            params, opt_state, loss = jax.block_until_ready(train_step(params, opt_state, batch))
        say("end", step=step, loss=float(loss), hash=hash_of((params, opt_state)))
        done = step + 1
        if done % settings.save_every == 0:
            if step == settings.limit_at:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            say("saving", step=done)
            with deadline(f"checkpoint {done}", settings.first_deadline):
                save(manager, done, params, opt_state)
    with deadline("the end", settings.deadline):
        manager.close()
        jax.distributed.shutdown()
    say("finished")


def _start(settings: SimpleNamespace, manager: Any, mesh: Any) -> tuple[Any, Any]:
    """The first state, or the state in a checkpoint of any number of workers."""
    if not settings.resume:
        return jax.block_until_ready(first_state(mesh))
    saved = manager.metadata(settings.resume).custom_metadata["state"]
    if saved["workers"] == settings.processes:
        return restore(manager, settings.resume, mesh)
    params, opt_state = restore(manager, settings.resume)
    before = residual_sum(opt_state)
    opt_state = optax_ext.reshard(opt_state, first_state(mesh)[1])
    difference = abs(residual_sum(opt_state) - before).max()
    say("resharded", largest=float(abs(before).max()), difference=float(difference))
    return params, opt_state


if __name__ == "__main__":
    groups.run(main)
