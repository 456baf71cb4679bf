"""What a group of processes does, and what one process with as many devices does alike.

Each case is ``case(mesh, folder, **options) -> {name: array}`` and is run by every process of a
group. Arrays that are spread over processes are gathered, so that what comes back can be
compared with the bits of one process.
"""

import functools
from pathlib import Path
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
from sparse_collectives import select, wire

ROWS, INPUTS, HIDDEN, OUTPUTS = 24, 10, 16, 7  # 24 rows are divisible by 1, 2, 3, 4, 6 and 8
DENSITY = 0.1
SAVED_AT = 4

REDUCTIONS = {
    "ok_topk": lambda: optax_ext.ok_topk(DENSITY, axis="data"),
    "topk_a": lambda: optax_ext.topk_a(DENSITY, axis="data"),
    "gtopk": lambda: optax_ext.published.gtopk(DENSITY, axis="data"),
    "narrow8": lambda: optax_ext.ok_topk(DENSITY, axis="data", codec=wire.narrow8()),
    "qsgd": lambda: optax_ext.topk_a(DENSITY, axis="data", codec=wire.qsgd(bits=8)),
    "threshold_reuse": lambda: optax_ext.ok_topk(
        DENSITY, axis="data", selector=select.threshold_reuse(density=DENSITY)
    ),
    "dense": lambda: optax_ext.dense(axis="data"),
}


def mesh_of(devices: list[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def train(mesh: Mesh, folder: Path, *, reduction: str, steps: int) -> dict[str, np.ndarray]:
    """Of the third step a row of the last worker is not finite, but for the dense mean."""
    del folder
    run = _Run(mesh, reduction)
    batches = _batches(steps)
    if reduction != "dense":
        batches[2][-1, 0] = np.nan
    losses = [run(batch) for batch in batches]
    return {**run.arrays(), "losses": np.asarray(losses), "traces": np.asarray(len(run.traces))}


def save(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Saves after some steps; the next step without and with a restore."""
    run = _Run(mesh, "ok_topk")
    *batches, last = _batches(SAVED_AT + 1)
    for batch in batches:
        run(batch)
    metadata = optax_ext.checkpoint_metadata(run.state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", (run.params, run.state), custom_metadata=metadata)
        checkpointer.wait_until_finished()
        residual = whole(optax_ext.get_state(run.state).residual)
        run(last)

        restored = _Run(mesh, "ok_topk")
        shapes = _shapes(restored.params, NamedSharding(mesh, P()))
        expected = optax_ext.abstract_state(restored.tx, restored.params, mesh)
        optax_ext.check_metadata(checkpointer.metadata(folder / "saved").custom_metadata, expected)
        restored.params, restored.state = checkpointer.restore(folder / "saved", (shapes, expected))
        restored(last)
    others = {f"restored{name}": array for name, array in restored.arrays().items()}
    traces = np.asarray(len(run.traces))
    return {**run.arrays(), **others, "saved_residual": residual, "traces": traces}


def resume(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """The state that other workers have saved, and the next step of these."""
    run = _Run(mesh, "ok_topk")
    # A device of this process: each restores all of the old state for itself.
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder / "saved").custom_metadata
        old_mesh = AbstractMesh((saved["workers"],), ("data",))
        old = optax_ext.abstract_state(run.tx, run.params, old_mesh, sharding=host)
        optax_ext.check_metadata(saved, old)
        run.params, state = checkpointer.restore(folder / "saved", (_shapes(run.params, host), old))
    before = np.asarray(optax_ext.get_state(state).residual)
    run.state = optax_ext.reshard(state, optax_ext.init_state(run.tx, run.params, mesh))
    after = whole(optax_ext.get_state(run.state).residual)
    run(_batches(SAVED_AT + 1)[-1])
    return {**run.arrays(), "before": before, "after": after}


def refuse(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """What several processes can get wrong, and what they are told."""
    del folder
    run = _Run(mesh, "ok_topk")
    fresh = optax_ext.init_state(run.tx, run.params, mesh)
    messages = {}
    for name, call in {
        "spread_state": lambda: optax_ext.reshard(run.state, fresh),
        "local_batch": lambda: run.step(run.params, run.state, _batches(1)[0]),
    }.items():
        try:
            call()
        except ValueError as error:
            messages[name] = np.asarray(str(error))
    return messages


CASES = {f.__name__: f for f in (train, save, resume, refuse)}


def whole(x: Any) -> np.ndarray:
    """All of a global array."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


class _Run:
    """A training from fixed parameters, one batch a call.

    All runs of a reduction share one step: to start again from parameters of the host must not
    trace it again.
    """

    def __init__(self, mesh: Mesh, reduction: str):
        rng = np.random.default_rng(1)
        self.mesh = mesh
        self.tx, self.step, self.traces = _step(mesh, reduction)
        self.params: Any = {
            "a": rng.standard_normal((INPUTS, HIDDEN)).astype(np.float32),
            "b": rng.standard_normal((HIDDEN, OUTPUTS)).astype(np.float32),
        }
        self.state = optax_ext.init_state(self.tx, self.params, mesh)

    def __call__(self, rows: np.ndarray) -> float:
        """Of the global batch each process gives only the rows of its own devices."""
        process, devices = jax.process_index(), self.mesh.devices.flat
        workers = [i for i, device in enumerate(devices) if device.process_index == process]
        local = np.concatenate([np.split(rows, self.mesh.size)[i] for i in workers])
        where = NamedSharding(self.mesh, P("data"))
        batch = jax.make_array_from_process_local_data(where, local)
        self.params, self.state, loss = self.step(self.params, self.state, batch)
        return float(loss)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of parameters and state, by its path; parameters on each local device."""
        trees = {"params": self.params, "state": self.state}
        arrays = {
            jax.tree_util.keystr(path): whole(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(trees)
        }
        for name, leaf in self.params.items():
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            arrays[f"copies of {name}"] = np.stack(copies)
        return arrays


@functools.cache
def _step(mesh: Mesh, reduction: str) -> tuple[Any, Any, list[int]]:
    traces = []

    def loss_fn(params, rows):
        traces.append(1)
        return jnp.mean((jnp.tanh(rows @ params["a"]) @ params["b"]) ** 2)

    tx = optax.chain(REDUCTIONS[reduction](), optax.sgd(0.01, momentum=0.9))
    return tx, optax_ext.make_train_step(loss_fn, tx, mesh), traces


def _batches(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((ROWS, INPUTS)).astype(np.float32) for _ in range(number)]


def _shapes(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
