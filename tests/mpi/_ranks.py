"""The program of one rank: ``mpirun -n P python -m tests.mpi._ranks FOLDER``.

It runs everything of :mod:`tests.mpi._cases` and leaves ``FOLDER/RANK.npz``.
"""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import optax_ext
from sparse_collectives import traffic, transport
from tests import jax_internals
from tests.mpi import _cases
from tests.mpi._cases import leaves

WORLD = MPI.COMM_WORLD
WORKERS, ME = WORLD.Get_size(), WORLD.Get_rank()


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


def check_what_needs_a_mesh() -> None:
    """Functions that need a mesh say so, and a state records its number of ranks."""
    tx, params, x = optax_ext.ok_topk(0.05, axis=WORLD), _cases.params(), jnp.ones(4)
    state, psum = tx.init(params), transport.psum
    mesh = jax.make_mesh((1,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    traced = jax.jit(lambda x: psum(x, WORLD)).trace(x)
    one_worker = "opt_state = tx.init(params)"
    made = f"opt_state was made over an MPI communicator of {WORKERS} ranks"
    no_axis = "which is not an intracommunicator"
    for said, call in (
        (one_worker, lambda: optax_ext.make_train_step(_cases.loss, tx, mesh)(params, state, None)),
        (one_worker, lambda: optax_ext.state_specs(state)),
        (made, lambda: optax_ext.consolidate(params, state)),
        (made, lambda: optax_ext.reshard(state, state)),
        ("Pass one communicator of all", lambda: transport.all_gather(x, (WORLD, MPI.COMM_SELF))),
        (f"'ranks' in it, {no_axis}", lambda: psum(x, (WORLD, "ranks"))),
        (no_axis, lambda: psum(x, MPI.COMM_NULL)),
        ("an exchange over MPI", lambda: traffic.of_traced(traced)),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
    assert optax_ext.checkpoint_metadata(state)["workers"] == WORKERS


def main(folder: Path) -> None:
    found = {}
    for dtype in _cases.DTYPES:
        x = jnp.asarray(_cases.operands(dtype, WORKERS)[ME])
        jitted = jax.jit(functools.partial(_cases.transports, WORLD, WORKERS))
        found |= leaves(f"transport {dtype}", jitted(x))
    rows = _cases.operands("int32", WORKERS)
    x = jnp.asarray(rows[ME])
    np.testing.assert_array_equal(transport.psum(x, WORLD), rows.sum(0))
    np.testing.assert_array_equal(transport.all_gather(x > 25, WORLD), rows > 25)
    flow = jax.jit(functools.partial(_cases.in_control_flow, WORLD, WORKERS))
    found |= leaves("flow", flow(x))

    grid = inner = None
    if WORKERS == 4:
        inner = WORLD.Split(ME // 2, ME)
        grid = (WORLD.Split(ME % 2, ME), inner)
        # Ranks of two communicators are numbered row by row.
        assert int(transport.axis_index(grid)) == ME

    gradients = _cases.gradients(WORKERS)[ME]
    for name, case in _cases.CASES.items():
        if WORKERS not in case.workers:
            continue
        axis = WORLD if case.axes == "flat" else grid
        step = jax.jit(functools.partial(_cases.run, case.allreduce, axis, WORKERS))
        found |= leaves(name, step(gradients))

    for name, training in _cases.TRAININGS.items():
        if training.workers != WORKERS:
            continue
        axes = (WORLD, None) if training.axes == "flat" else (grid, inner)
        for kind, tree in zip(("params", "state", "losses"), train(name, *axes)):
            found |= leaves(f"{name} {kind}", tree)

    check_what_needs_a_mesh()
    np.savez(folder / f"{ME}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
