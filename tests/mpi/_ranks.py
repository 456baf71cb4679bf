"""The program of one rank: ``mpirun -n P python -m tests.mpi._ranks FOLDER``.

It runs everything of :mod:`tests.mpi._cases` and leaves ``FOLDER/RANK.npz``.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import optax_ext
from sparse_collectives import traffic, transport
from tests import jax_internals
from tests.mpi import _cases
from tests.mpi._cases import leaves

WORLD = MPI.COMM_WORLD
WORKERS, ME = WORLD.Get_size(), WORLD.Get_rank()


def message_of(function) -> str:
    try:
        function()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(name: str, axis, inner_axis):
    tx, params = _cases.TRAININGS[name].make(axis, inner_axis), _cases.params()
    state = tx.init(params)
    step = jax.jit(functools.partial(_cases.train_step, tx), donate_argnums=(0, 1))
    losses = []
    for batch in _cases.batches(name, WORKERS)[:, ME]:
        params, state, value = step(params, state, batch)
        losses.append(value)
    assert jax_internals.programs(step) == 1
    return params, state, losses


def errors(x: jax.Array) -> dict[str, str]:
    tx, params = optax_ext.ok_topk(0.05, axis=WORLD), _cases.params()
    state = tx.init(params)
    mesh = jax.make_mesh((1,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    calls = {
        "mesh": lambda: optax_ext.make_train_step(_cases.loss, tx, mesh)(params, state, None),
        "specs": lambda: optax_ext.state_specs(state),
        "consolidate": lambda: optax_ext.consolidate(params, state),
        "reshard": lambda: optax_ext.reshard(state, state),
        "two": lambda: transport.all_gather(x, (WORLD, MPI.COMM_SELF)),
        "mixed": lambda: transport.psum(x, (WORLD, "ranks")),
        "null": lambda: transport.psum(x, MPI.COMM_NULL),
        "meter": lambda: traffic.of_traced(jax.jit(lambda x: transport.psum(x, WORLD)).trace(x)),
    }
    return {name: message_of(call) for name, call in calls.items()}


def main(folder: Path) -> None:
    found = {}
    for dtype in _cases.DTYPES:
        x = jnp.asarray(_cases.operands(dtype, WORKERS)[ME])
        jitted = jax.jit(functools.partial(_cases.transports, WORLD, WORKERS))
        found |= leaves(f"transport {dtype}", jitted(x))
    x = jnp.asarray(_cases.operands("int32", WORKERS)[ME])
    found |= leaves("eager", {"psum": transport.psum(x, WORLD)})
    found |= leaves("bool", {"gathered": transport.all_gather(x > 25, WORLD)})
    flow = jax.jit(functools.partial(_cases.in_control_flow, WORLD, WORKERS))
    found |= leaves("flow", flow(x))

    grid = inner = None
    if WORKERS == 4:
        inner = WORLD.Split(ME // 2, ME)
        grid = (WORLD.Split(ME % 2, ME), inner)
        found["grid index"] = np.asarray(transport.axis_index(grid))

    gradients = _cases.gradients(WORKERS)[ME]
    for name in _cases.names(WORKERS):
        case = _cases.CASES[name]
        axis = WORLD if case.axes == "flat" else grid
        step = jax.jit(functools.partial(_cases.run, case.allreduce, axis, WORKERS))
        found |= leaves(name, step(gradients))

    for name, training in _cases.TRAININGS.items():
        if training.workers != WORKERS:
            continue
        axes = (WORLD, None) if training.axes == "flat" else (grid, inner)
        for kind, tree in zip(("params", "state", "losses"), train(name, *axes)):
            found |= leaves(f"{name} {kind}", tree)

    found |= {f"error {name}": np.asarray(text) for name, text in errors(x).items()}
    state = optax_ext.ok_topk(0.05, axis=WORLD).init(_cases.params())
    found["metadata workers"] = np.asarray(optax_ext.checkpoint_metadata(state)["workers"])
    np.savez(folder / f"{ME}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
