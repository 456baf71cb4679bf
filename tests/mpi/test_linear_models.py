"""The linear models over real ranks."""

import json

import numpy as np
import pytest

from examples.linear_models import __main__
from tests.mpi import test_over_mpi
from tests.mpi.test_over_mpi import mpirun

pytestmark = test_over_mpi.pytestmark


@pytest.mark.parametrize(
    ("method", "exchanges"),
    [("sgd", ["dense", "ssar_recursive_double"]), ("scd", ["dense_allgather", "sparse_allgather"])],
)
def test_ranks_compute_what_the_devices_of_a_mesh_do(method, exchanges, tmp_path):
    files = [tmp_path / "ranks.json", tmp_path / "mesh.json"]
    argv = [
        "--method",
        method,
        "--exchange",
        *exchanges,
        "--rows",
        "800",
        "--epochs",
        "2",
        "--json",
    ]
    printed = mpirun(3, "-m", "examples.linear_models", "--mpi", *argv, str(files[0]))
    assert printed.count("3 workers") == 1
    assert __main__.main([*argv, str(files[1]), "--workers", "3"]) == 0
    ranks, mesh = (json.loads(file.read_text())["runs"] for file in files)
    assert ranks.keys() == mesh.keys()
    for name, run in mesh.items():
        np.testing.assert_allclose(ranks[name]["objectives"], run["objectives"], rtol=1e-5)
        assert ranks[name]["words"] == run["words"]
