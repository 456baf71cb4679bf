"""Cases for a group of processes and for one process with as many devices.

Each process of the group is `python -m tests.multiprocess._cases JSON`. Each case is ``case(mesh,
folder, **options) -> {name: array}`` and is run by every process. Arrays that are spread over
processes are gathered, so that the results can be compared with the bits of one process; each
process checks the rest alone.
"""

import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from sparse_collectives import allreduce, select, transport, wire
from tests import groups
from tests.mpi._cases import leaves
from tests.system import _task
from tests.system._task import mesh_of_all, whole

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
    "partitioned_topk": lambda: optax_ext.sparse_allreduce(
        select.topk(density=DENSITY), allreduce.partitioned_topk(bits=None), axis="data"
    ),
    "codes": lambda: optax_ext.sparse_allreduce(
        select.topk(density=DENSITY), allreduce.partitioned_topk(bits=(1, 3)), axis="data"
    ),
    "quantized": lambda: optax_ext.quantized(axis="data"),
    "dense": lambda: optax_ext.dense(axis="data"),
}


def train(mesh: Mesh, folder: Path, *, reduction: str, steps: int) -> dict[str, np.ndarray]:
    """Trains; unless dense, the last worker has a row that is not finite in the third step."""
    del folder
    run = _Run(mesh, reduction)
    sparse = reduction != "dense"
    losses = [run(step, bad=step == 2 and sparse) for step in range(steps)]
    assert not sparse or optax_ext.get_state(run.state).skipped == 1
    assert len(run.traces) == 1
    return {**run.arrays(), "losses": np.asarray(losses)}


def direct(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """The same with direct messages, in one process and in several."""
    transport.use_direct_messages()
    try:
        # The cache has no key for the setting.
        _step.cache_clear()
        return train(mesh, folder, reduction="partitioned_topk", steps=10)
    finally:
        transport.use_direct_messages(False)
        _step.cache_clear()


def rounds(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Rounds whose exchange overlaps the local steps."""
    del folder
    tx = optax_ext.sparse_adamw(0.01, every=3, axis="data")
    params = _task.first_params()
    state = optax_ext.init_state(tx, params, mesh)
    take_round = optax_ext.make_train_round(_task.loss_fn, tx, mesh)
    spread = NamedSharding(mesh, P(None, "data"))
    for number in range(4):
        batches = [_task.batch_of(3 * number + step, mesh) for step in range(3)]
        stacked = jax.jit(
            lambda *batches: jax.tree.map(lambda *x: jnp.stack(x), *batches), out_shardings=spread
        )(*batches)
        params, state, _ = take_round(params, state, stacked)
    return leaves("", jax.tree.map(whole, {"params": params, "state": state}))


def save(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Saves after some steps; the next step is the same with and without a restore."""
    run, restored = _Run(mesh, "ok_topk"), _Run(mesh, "ok_topk")
    for step in range(SAVED_AT):
        run(step)
    with _task.manager_of(folder / "saved") as manager:
        _task.save(manager, SAVED_AT, run.params, run.state)
        residual = whole(optax_ext.get_state(run.state).residual)
        restored.params, restored.state = _task.restore(manager, SAVED_AT, mesh, run.tx)
    run(SAVED_AT)
    restored(SAVED_AT)
    arrays = run.arrays()
    for name, array in restored.arrays().items():
        assert array.tobytes() == arrays[name].tobytes(), name
    assert len(run.traces) == 1
    return {**arrays, "saved_residual": residual}


def resume(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """The state that other workers have saved, and the next step of these workers."""
    run = _Run(mesh, "ok_topk")
    with _task.manager_of(folder / "saved") as manager:
        # Each process restores the whole old state.
        run.params, state = _task.restore(manager, SAVED_AT, tx=run.tx)
    run.state = optax_ext.reshard(state, run.state)
    before, after = (whole(optax_ext.get_state(each).residual) for each in (state, run.state))
    run(SAVED_AT)
    return {**run.arrays(), "before": before, "after": after}


def modules(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """A model of flax nnx whose dropout keys each process has made for itself."""
    del folder
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    tx = optax_ext.sparse_adamw(0.1, density=0.5, axis="data")
    optimizer = nnx.Optimizer(model, optax_ext.with_mesh(tx, mesh), wrt=nnx.Param)

    @optax_ext.data_parallel
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(
            optax_ext.ahead(model, optimizer)
        )
        optimizer.update(model, gradients)
        return loss

    x = np.random.default_rng(0).standard_normal((12, 6), np.float32)
    rows = NamedSharding(mesh, P("data"))
    batch = jax.make_array_from_callback(x.shape, rows, lambda index: x[index])
    losses = [float(step(model, optimizer, batch)) for _ in range(3)]
    params = jax.tree.map(whole, nnx.as_pure(nnx.state(model, nnx.Param)))
    return {**leaves("", params), "losses": np.asarray(losses)}


def explicit(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Explicit axes: keys in the state and as an argument, a callback, numbers at each step."""
    del folder
    types = (AxisType.Explicit,) * mesh.devices.ndim
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    keeps_a_key = optax.GradientTransformation(lambda _: jax.random.key(1), lambda u, s, _: (u, s))
    tx = optax.chain(REDUCTIONS["ok_topk"](), keeps_a_key, optax.sgd(0.01))
    params, rng = jax.device_put(_task.first_params(), NamedSharding(mesh, P())), jax.random.key(2)
    state, found = optax_ext.init_state(tx, params, mesh), []

    def seen(params, batch):
        one = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
        return _task.loss_fn(params, batch) * one

    @optax_ext.data_parallel(donate=False)
    def own_step(params, state, batch, rng):
        gradients = jax.grad(_task.loss_fn)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rng

    step = optax_ext.make_train_step(seen, tx, mesh)
    for number in range(6):
        batch = _task.batch_of(number, mesh)
        params, state, _ = step(params, state, batch)
        params, state, rng = own_step(params, state, batch, rng)
        found.append(optax_ext.metrics(state)["residual_norm"])
    assert rng.sharding.mesh.axis_types == types
    assert jax.random.key_data(rng).tolist() == jax.random.key_data(jax.random.key(2)).tolist()
    norms = np.array(list(map(float, found)))
    return {**leaves("", jax.tree.map(whole, params)), "losses": norms}


def not_a_number(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Parameters with NaN are the same on all processes, and the step is skipped."""
    del folder
    run = _Run(mesh, "ok_topk")
    run.params = {name: np.full_like(x, np.nan) for name, x in run.params.items()}
    run(0)
    assert optax_ext.get_state(run.state).skipped == 1
    return {}


def refuse(mesh: Mesh, folder: Path) -> dict[str, np.ndarray]:
    """Mistakes that only several processes can make raise errors."""
    del folder
    run = _Run(mesh, "ok_topk")
    fresh = optax_ext.init_state(run.tx, run.params, mesh)
    batch = jax.tree.map(np.asarray, _task.batch_of(0, mesh_of_all(jax.local_devices())))
    for said, call in {
        "process_allgather": lambda: optax_ext.reshard(run.state, fresh),
        "make_array_from_process_local_data": lambda: run.step(run.params, run.state, batch),
    }.items():
        wrong = pytest.raises(ValueError, match=said)
        with wrong if jax.process_count() > 1 else contextlib.nullcontext():
            call()
    # Each process has settings of its own.
    tx = optax_ext.sparse_adamw(0.1, axis="data", density=0.1 * (1 + jax.process_index()))
    step = optax_ext.make_train_step(_task.loss_fn, tx, mesh)
    wrong = pytest.raises(ValueError, match="tx of process 1 differs from process 0")
    with wrong if jax.process_count() > 1 else contextlib.nullcontext():
        state = optax_ext.init_state(tx, _task.first_params(), mesh)
        step(_task.first_params(), state, _task.batch_of(0, mesh))

    @optax_ext.data_parallel
    def own_step(params, state, batch):
        gradients = jax.grad(_task.loss_fn)(optax_ext.ahead(params, state), batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with wrong if jax.process_count() > 1 else contextlib.nullcontext():
        state = optax_ext.init_state(tx, _task.first_params(), mesh)
        own_step(_task.first_params(), state, _task.batch_of(0, mesh))
    _check_names_of_what_differs(mesh)
    # Processes that place arrays of different sizes wait for each other, or abort.
    larger = {"w": np.ones((3, 1 + jax.process_index()), np.float32)}
    step = optax_ext.make_train_step(lambda params, batch: 0.0, run.tx, mesh)
    wrong = pytest.raises(ValueError, match="params of process 1 differs from process 0")
    with wrong if jax.process_count() > 1 else contextlib.nullcontext():
        step(larger, optax_ext.init_state(run.tx, larger, mesh), _task.batch_of(0, mesh))
    return {}


def _check_names_of_what_differs(mesh: Mesh) -> None:
    """Errors for numbers of the same shapes that each process has for itself."""
    tx, params, batch = _task.transformation(), _task.first_params(), _task.batch_of(0, mesh)
    differing = {name: x + jax.process_index() for name, x in params.items()}
    state, key = optax_ext.init_state(tx, params, mesh), jax.random.key(jax.process_index())

    @optax_ext.data_parallel
    def step(params, state, batch, rngs):
        gradients = jax.grad(_task.loss_fn)(optax_ext.ahead(params, state), batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rngs

    made = optax_ext.make_train_step(_task.loss_fn, tx, mesh)
    for name, call in {
        r"argument 3\['dropout'\]": lambda: step(params, state, batch, {"dropout": key}),
        "argument 0": lambda: step(differing, state, batch, {}),
        "params": lambda: made(differing, state, batch),
    }.items():
        wrong = pytest.raises(ValueError, match=f"^{name}.* differs between the processes")
        with wrong if jax.process_count() > 1 else contextlib.nullcontext():
            call()


_ALL = (train, direct, rounds, save, resume, modules, explicit, not_a_number, refuse)
CASES = {f.__name__: f for f in _ALL}


class _Run:
    """A training from fixed parameters, one batch a call.

    All runs of a reduction share one step: to start again from parameters of the host must not
    trace it again.
    """

    def __init__(self, mesh: Mesh, reduction: str):
        self.mesh, self.params = mesh, _task.first_params()
        self.tx, self.step, self.traces = _step(mesh, reduction)
        self.state = optax_ext.init_state(self.tx, self.params, mesh)

    def __call__(self, step: int, *, bad: bool = False) -> float:
        batch = _task.batch_of(step, self.mesh, bad=bad)
        self.params, self.state, loss = self.step(self.params, self.state, batch)
        return float(loss)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of parameters and state, by its path; parameters on each local device."""
        arrays = leaves("", jax.tree.map(whole, {"params": self.params, "state": self.state}))
        for name, leaf in self.params.items():
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            arrays[f"copies of {name}"] = np.stack(copies)
        return arrays


@functools.cache
def _step(mesh: Mesh, reduction: str) -> tuple[Any, Any, list[int]]:
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return _task.loss_fn(params, batch)

    tx = optax.chain(REDUCTIONS[reduction](), optax.sgd(0.01, momentum=0.9))
    return tx, optax_ext.make_train_step(loss_fn, tx, mesh), traces


def main() -> None:
    """Runs the cases and writes the results of each to FOLDER/CASE.PROCESS.npz."""
    options = groups.settings()
    groups.join(options, options["devices"], initialization_timeout=600)
    assert jax.process_count() == options["processes"]
    assert jax.local_device_count() == options["devices"]
    folder = Path(options["folder"])
    for name, case, arguments in options["cases"]:
        arrays = CASES[case](mesh_of_all(), folder, **arguments)
        np.savez(folder / f"{name}.{options['index']}.npz", **arrays)
        print(f"{name} done", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
