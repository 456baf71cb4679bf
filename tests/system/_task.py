"""The training that the faults happen to, and its checkpoints; the same for workers and checks."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optax_ext

AXIS = "data"
_INPUTS, _HIDDEN, _OUTPUTS = 32, 96, 8
# Divisible by 2, 3 and 4 workers, so that each number of them can take the same batches.
_BATCH = 24


def transformation() -> optax.GradientTransformation:
    """Ok-Topk in front of Adam."""
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


def mesh_of_all() -> Mesh:
    """All devices of all processes."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def batch_of(step: int, mesh: Mesh) -> Any:
    """The batch of a step, split over the workers; it depends on nothing but the step."""
    rng = np.random.default_rng([1, step])
    host = (
        rng.standard_normal((_BATCH, width)).astype(np.float32) for width in (_INPUTS, _OUTPUTS)
    )
    return tuple(placed(x, NamedSharding(mesh, PartitionSpec(AXIS))) for x in host)


def placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which each process gives its own part."""
    return jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])


def first_state(mesh: Mesh) -> tuple[Any, Any]:
    """Parameters and optimizer state before the first step."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda x: placed(x, whole), first_params())
    return params, optax_ext.init_state(transformation(), params, mesh)


def hash_of(tree: Any) -> str:
    """A hash of what this process has of the arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()[:16]


def manager_of(folder: Path) -> ocp.CheckpointManager:
    """Checkpoints of a training that are written before the next step."""
    return ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    )


def save(manager: ocp.CheckpointManager, step: int, params: Any, opt_state: Any) -> None:
    """Writes parameters, state, what the state was made for, and checksums."""
    tree = (params, opt_state)
    metadata = {
        "state": optax_ext.checkpoint_metadata(opt_state),
        "checksums": optax_ext.contrib.checksums(tree),
    }
    manager.save(step, args=ocp.args.StandardSave(tree), custom_metadata=metadata)


def restore(manager: ocp.CheckpointManager, step: int, mesh: Mesh) -> tuple[Any, Any]:
    """Parameters and state, to the bit, for the number of workers that saved them."""
    expected = optax_ext.abstract_state(transformation(), first_params(), mesh)
    return restore_into(manager, step, (_shapes(NamedSharding(mesh, PartitionSpec())), expected))


def restore_on_host(manager: ocp.CheckpointManager, step: int) -> tuple[Any, Any]:
    """Parameters and the state of all workers that saved, on one device of this process."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    saved = manager.metadata(step).custom_metadata
    workers = jax.sharding.AbstractMesh((saved["state"]["workers"],), (AXIS,))
    expected = optax_ext.abstract_state(transformation(), first_params(), workers, sharding=host)
    return restore_into(manager, step, (_shapes(host), expected))


def restore_into(manager: ocp.CheckpointManager, step: int, expected: Any) -> Any:
    """A checkpoint in the shapes and at the places of ``expected``: parameters and state.

    ValueError: it is of another state, or of other arrays; or whatever orbax raises of its files.
    """
    saved = manager.metadata(step).custom_metadata
    optax_ext.check_metadata(saved["state"], expected[1])
    tree = manager.restore(step, args=ocp.args.StandardRestore(expected))
    optax_ext.contrib.check_checksums(saved["checksums"], tree)
    return tree


def last_whole(folder: Path) -> tuple[int, dict[int, str]]:
    """The newest checkpoint that can be read and has its checksums, 0 for none; for one process.

    And for each newer one what is wrong with it.
    """
    damaged = {}
    with manager_of(folder) as manager:
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                restore_on_host(manager, step)
            except Exception as error:  # whatever a damaged file raises in orbax
                damaged[step] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            else:
                return step, damaged
    return 0, damaged


def residual_sum(opt_state: Any) -> np.ndarray:
    """``f64[n]``: the residuals added up over the workers, on the host."""
    residual = optax_ext.get_state(opt_state).residual
    return np.sum(np.asarray(residual), axis=0, dtype=np.float64)


def _shapes(sharding: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), first_params()
    )
