"""The state of a training on a group of workers: placed, restored, described and compared."""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_ext._state import _find, _index
from optax_ext.elastic import _handover
from optax_ext.elastic._arguments import without_addresses
from optax_ext.elastic._checkpoints import Checkpoints
from optax_ext.elastic._job import Job
from optax_ext.elastic._meeting import Decision
from optax_ext.elastic._programs import Group, Programs


class TrainingState(NamedTuple):
    """A state of the training, of the group that it is on.

    Attributes:
      version: counts exchanges and handovers; two workers with the same one have the same state.
      step: steps that have been taken.
      params: global arrays.
      opt_state: global arrays.
    """

    version: int
    step: int
    params: Any
    opt_state: Any


def own(tree: Any) -> Any:
    """This process's part of global arrays."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Global arrays from the part of this process.

    It does not communicate with the others, who may be gone, as ``jax.device_put`` would.
    """
    (device,) = mesh.local_devices
    size = mesh.devices.size

    def place(spec: PartitionSpec, x: Any) -> jax.Array:
        shape = (size * x.shape[0], *x.shape[1:]) if len(spec) else x.shape
        part = jax.device_put(x, device)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), [part])

    if isinstance(specs, PartitionSpec):
        return jax.tree.map(lambda x: place(specs, x), tree)
    return jax.tree.map(place, specs, tree)


def restored(
    decision: Decision, held: TrainingState | None, group: Group, job: Job, programs: Programs,
    saves: Checkpoints, initial: Any,
) -> TrainingState:  # fmt: skip
    """The state of a decision on a new group.

    It is ``held``, the state of that version on the last group; or this worker's part of a
    checkpoint; or ``initial`` parameters, and what the other workers give it.
    """
    me = job.process_id
    size, rank = len(decision.members), decision.members.index(me)
    params, holders = initial, decision.holders
    with jax.default_device(job.devices_of(me)[0]):
        state = programs.fresh(size, group.order.index(me), initial)
        if held is not None:
            params = own(held.params)
            state = _handover.carried(own(held.opt_state), state)
        elif decision.saved >= 0:
            written, params, saved = saves.load(decision.saved, rank, size)
            holders = decision.members[:written]
            if saved is not None:
                state = _handover.carried(saved, state)
    params = placed(params, PartitionSpec(), group.mesh)
    state = placed(state, group.specs, group.mesh)
    if {*holders} != {*decision.members}:
        holds = np.array([process in holders for process in group.order])
        params, state = group.admit(params, state, placed(holds, PartitionSpec(), group.mesh))
    jax.block_until_ready((params, state))
    return TrainingState(decision.version, decision.step, params, state)


def description(params: Any, opt_state: Any) -> str:
    """The model and the optimizer in short, for processes to compare."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in leaves]
    # The text of the state has its settings.
    of_state = str(jax.tree.map(lambda x: (x.shape, x.dtype), opt_state))
    text = repr((shapes, without_addresses(of_state)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    count = sum(x.size for _, x in leaves)
    return f"a model of {count} parameters ({digest}, jax {jax.__version__})"


def steps_in_round(opt_state: Any) -> int:
    """Steps from one exchange to the next, the same in all parts."""
    index = _index.of(opt_state)
    if index.moves or len(index.every) > 1:
        raise ValueError(
            "tx has rounds of local steps that end at a step of their own, such as "
            "optax_ext.local_steps: what a worker has moved can't be handed over in the middle. "
            "Use every= of optax_ext.sparse_adamw or sparse_sgd, the same in all parts."
        )
    if not index.is_whole:
        raise ValueError(
            "tx shards its buffer over several axes of workers: optax_ext.elastic is for workers "
            "that hold a whole residual each."
        )
    return max(index.every, default=1)


def exchanges(opt_state: Any, every: int) -> bool:
    """Whether the step from this state has an exchange, in rounds of so many steps."""
    return every == 1 or (int(_find.get_states(opt_state)[0].count) + 1) % every == 0


def poll(
    group: Group, state: TrainingState, *, waits: bool, leaves: bool
) -> tuple[bool, np.ndarray, dict[int, float]]:
    """Exchanges four words with the other workers; a RuntimeError if their parameters differ.

    ``waits`` says whether this worker has heard of one that would like to take part, and ``leaves``
    whether it leaves. The result is the same on all workers: whether some worker waits or leaves,
    ``bool[P]`` for those that leave, in the order of the group, and the sum of the magnitudes of
    each worker's residual, by process.
    """
    residuals = [part.residual for part in _find.get_states(own(state.opt_state))]
    digest, waited = _digest(own(state.params), residuals)
    row = np.array([waits, leaves, int(digest), 0], np.uint32)[None]
    row[0, 3] = np.float32(waited).view(np.uint32)
    each = placed(row, PartitionSpec(*group.mesh.axis_names), group.mesh)
    rows = np.asarray(jax.block_until_ready(group.poll(each)))
    if len({*rows[:, 2].tolist()}) > 1:
        digests = dict(zip(group.order, map(hex, rows[:, 2].tolist()), strict=True))
        raise RuntimeError(
            f"the parameters of the workers differ, digests by process: {digests}. Start all of "
            "them again, from a checkpoint."
        )
    magnitudes = dict(zip(group.order, rows[:, 3].view(np.float32).tolist(), strict=True))
    return bool(rows[:, :2].any()), rows[:, 1].astype(bool), magnitudes


@jax.jit
def _digest(params: Any, residuals: Any) -> tuple[jax.Array, jax.Array]:
    """A checksum of the parameters, and the sum of the magnitudes of the residuals."""
    total = jnp.zeros((), jnp.uint32)
    for number, x in enumerate(jax.tree.leaves(params)):
        # The weights detect an exchange of two entries.
        words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).ravel()
        weights = jnp.arange(x.size, dtype=jnp.uint32) * 2 + np.uint32(2 * number + 1)
        total += (words * weights).sum(dtype=jnp.uint32)
    waited = sum(jnp.abs(x.astype(jnp.float32)).sum() for x in residuals)
    return total, jnp.asarray(waited, jnp.float32)
