"""Real ranks under mpirun against NumPy, and bit for bit against a mesh of as many devices."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
from benchmarks._common.processes import ROOT, environment
from examples.linear_models import __main__ as linear_models
from tests.mpi import _cases
from tests.optax_ext import helpers

# The environment's mpirun comes first, since mpi4jax was built for the MPI in it.
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
SECONDS = 900

pytestmark = [
    # optax's optimizers add numbers to rows.
    pytest.mark.usefixtures("default_promotion"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4jax") is None,
        reason="mpi4jax is not installed; `make test-mpi` installs it",
    ),
    pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun on the PATH"),
]


def mpirun(workers: int, *arguments: str) -> str:
    """The output of ``python arguments...`` on this number of ranks."""
    assert MPIRUN is not None
    command = [MPIRUN, "-n", str(workers), sys.executable, *arguments]
    # For mpich: all traffic between the processes stays on this machine.
    variables = environment() | {"HYDRA_IFACE": "lo", "FI_TCP_IFACE": "lo"}
    variables["PATH"] = f"{Path(MPIRUN).parent}{os.pathsep}{os.environ['PATH']}"
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        # mpirun ends its ranks when it is asked to end.
        process.terminate()
        process.wait()
    assert process.returncode == 0, output[-8000:]
    return output


@functools.cache
def ranks(workers: int) -> list[dict[str, np.ndarray]]:
    """The results of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        mpirun(workers, "-m", "tests.mpi._ranks", folder)
        return [dict(np.load(Path(folder) / f"{rank}.npz")) for rank in range(workers)]


def on_mesh(function, workers: int, *operands, axes: str = "flat"):
    """``function(*operands)`` on each device of a mesh; all results with a leading axis of P."""
    on = helpers.mesh((2, 2), ("node", "device")) if axes == "grid" else helpers.mesh(workers, "w")

    def local(*operands):
        mine = jax.tree.map(lambda x: x[0], operands)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*mine))

    specs = {"in_specs": P(on.axis_names), "out_specs": P(on.axis_names)}
    return jax.jit(jax.shard_map(local, mesh=on, **specs, check_vma=False))(*operands)


def assert_same_bits(prefix: str, mesh, workers: int) -> None:
    """Every rank has the bits of its device; the names in its file begin with ``prefix``."""
    for rank, found in enumerate(ranks(workers)):
        expected = _cases.leaves(prefix, jax.tree.map(lambda x, rank=rank: x[rank], mesh))
        for name, array in expected.items():
            assert found[name].dtype == array.dtype, name
            # As bytes, since -0.0 is not the same result as 0.0.
            assert found[name].tobytes() == array.tobytes(), (name, rank)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("dtype", _cases.DTYPES)
def test_transport_has_the_bits_of_the_mesh_and_its_sums_are_those_of_numpy(workers, dtype):
    x = _cases.operands(dtype, workers)
    mesh = on_mesh(lambda x: _cases.transports("w", workers, x), workers, jnp.asarray(x))
    assert_same_bits(f"transport {dtype}", mesh, workers)
    # In the order of the ranks, as XLA makes them on CPU.
    rows = x.astype(np.float32) if dtype == "bfloat16" else x
    total = functools.reduce(np.add, rows).astype(x.dtype).astype(rows.dtype)
    for rank, found in enumerate(ranks(workers)):
        np.testing.assert_array_equal(found[f"transport {dtype}['psum']"], total)
        scattered = total.reshape(workers, -1)[rank]
        np.testing.assert_array_equal(found[f"transport {dtype}['psum_scatter']"], scattered)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_exchanges_keep_their_order_in_branches_and_loops(workers):
    """They also work without jit, and each rank checks that functions that need a mesh say so."""
    x = _cases.operands("int32", workers)
    mesh = on_mesh(lambda x: _cases.in_control_flow("w", workers, x), workers, jnp.asarray(x))
    assert_same_bits("flow", mesh, workers)


@pytest.mark.parametrize(
    ("name", "workers"), [(name, p) for name, case in _cases.CASES.items() for p in case.workers]
)
def test_allreduce_has_the_bits_of_the_mesh_and_loses_nothing(name, workers):
    case, gradients = _cases.CASES[name], _cases.gradients(workers)
    axis = "w" if case.axes == "flat" else ("node", "device")
    run = functools.partial(_cases.run, case.allreduce, axis, workers)
    mesh = on_mesh(run, workers, gradients, axes=case.axes)
    assert_same_bits(name, mesh, workers)

    every = ranks(workers)
    totals = [found[f"{name}['totals']"] for found in every]
    assert all(total.tobytes() == totals[0].tobytes() for total in totals)
    residuals = np.sum([found[f"{name}['residual']"] for found in every], axis=0, dtype=np.float64)
    put_in = gradients.sum(axis=(0, 1), dtype=np.float64)
    # Float32 sums over 13 steps of values up to 1e3.
    np.testing.assert_allclose(totals[0].sum(0, np.float64) + residuals, put_in, atol=1e-2)
    if name == "ok_topk, balanced regions" and workers > 2:
        # It has taken more than one branch of its balancing.
        assert len(np.unique(every[0][f"{name}['info']['words']"][1:])) >= 3


@pytest.mark.skipif(
    "--xla_cpu_max_isa=AVX" not in os.environ.get("XLA_FLAGS", "").split(),
    reason="with fused multiply-adds XLA rounds the two programs differently; `make test-mpi` "
    "compiles without them",
)
@pytest.mark.parametrize("name", list(_cases.TRAININGS))
def test_training_has_the_bits_of_the_mesh(name):
    training = _cases.TRAININGS[name]
    workers, axes = training.workers, training.axes
    tx = training.make(*(("w", None) if axes == "flat" else (("node", "device"), "device")))
    params = jax.tree.map(lambda x: jnp.stack([x] * workers), _cases.params())
    state = on_mesh(lambda _: tx.init(_cases.params()), workers, np.zeros(workers), axes=axes)
    one_step = functools.partial(_cases.train_step, tx)
    step = jax.jit(lambda *operands: on_mesh(one_step, workers, *operands, axes=axes))
    losses = []
    for batch in _cases.batches(name, workers):
        params, state, value = step(params, state, batch)
        losses.append(value)
    for kind, tree in (("params", params), ("state", state), ("losses", losses)):
        assert_same_bits(f"{name} {kind}", tree, workers)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))
    sparse = optax_ext.get_state(state)
    if sparse is not None:
        assert sparse.skipped.tolist() == [1] * workers
        assert sparse.count.tolist() == [training.steps - 1] * workers


def test_example_trains_and_its_ranks_agree():
    output = mpirun(3, "examples/train_mpi.py", "--steps", "60")
    (line,) = [line for line in output.splitlines() if "workers" in line]
    said = (
        r"3 workers, 60 steps: test accuracy ([0-9.]+)%, [1-9][0-9]* entries delivered and [0-9]+ "
        r"words received in the last step, parameters equal"
    )
    accuracy = re.fullmatch(said, line)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 80


@pytest.mark.parametrize(
    ("method", "exchanges"),
    [("sgd", ["dense", "ssar_recursive_double"]), ("scd", ["dense_allgather", "sparse_allgather"])],
)
def test_linear_models_compute_what_the_devices_of_a_mesh_do(method, exchanges, tmp_path):
    files = [tmp_path / "ranks.json", tmp_path / "mesh.json"]
    argv = ["--method", method, "--rows", "800", "--epochs", "2", "--exchange", *exchanges]
    argv.append("--json")
    printed = mpirun(3, "-m", "examples.linear_models", "--mpi", *argv, str(files[0]))
    assert printed.count("3 workers") == 1
    assert linear_models.main([*argv, str(files[1]), "--workers", "3"]) == 0
    on_ranks, on_devices = (json.loads(file.read_text())["runs"] for file in files)
    assert on_ranks.keys() == on_devices.keys()
    for name, run in on_devices.items():
        np.testing.assert_allclose(on_ranks[name]["objectives"], run["objectives"], rtol=1e-5)
        assert on_ranks[name]["words"] == run["words"]


def test_program_in_the_docs_runs():
    snippets = re.findall(r"```py\n(.*?)```", (ROOT / "docs/multihost.md").read_text(), re.DOTALL)
    (program,) = [text for text in snippets if "mpi4py" in text]
    before = """
import jax, jax.numpy as jnp, optax, optax_ext
params = {"w": jnp.ones((10, 7))}
loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
"""
    after = """
rank = MPI.COMM_WORLD.Get_rank()
for i in range(3):
    batch = jax.random.normal(jax.random.key(rank + 2 * i), (8, 10))
    params, opt_state = step(params, opt_state, batch)
every = MPI.COMM_WORLD.allgather(params["w"].tobytes())
assert int(optax_ext.get_state(opt_state).count) == 3 and len(set(every)) == 1
assert not jnp.all(params["w"] == 1)
"""
    mpirun(2, "-c", before + program + after)
