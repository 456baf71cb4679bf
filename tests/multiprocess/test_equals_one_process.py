"""Workers in several processes compute the bits of as many workers in one process.

That these lose nothing and skip a step alike is held by tests/optax_ext/test_contract.py.
"""

import jax
import numpy as np
import pytest

from tests import groups
from tests.multiprocess import _cases

pytestmark = pytest.mark.slow


def run_group(folder, processes, devices, cases):
    """What each process returned of each case; checkpoints are saved in the folder."""
    given = {"devices": devices, "cases": list(cases), "folder": str(folder)}
    results = groups.finish(groups.group("tests.multiprocess._worker", processes, **given))
    assert not any(status for status, _ in results), results
    return {
        name: [dict(np.load(folder / f"{name}.{process}.npz")) for process in range(processes)]
        for name, _, _ in cases
    }


def trainings(names, steps):
    return [(name, "train", {"reduction": name, "steps": steps}) for name in names]


# At last what makes another program: one process takes a batch of its own.
ALWAYS = [("save", "save", {}), ("refuse", "refuse", {})]
FEW = [*trainings(["ok_topk"], 50), *trainings(["topk_a", "narrow8"], 10), *ALWAYS]
ALL = [*trainings(_cases.REDUCTIONS, 20), *ALWAYS]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_group(folder, 2, 1, FEW)


def in_one_process(folder, workers, case, options):
    return _cases.CASES[case](_cases.mesh_of_all(jax.devices()[:workers]), folder, **options)


def check_same(results, expected, dense=False):
    for got in results:
        assert got.keys() == expected.keys()
        for name in got.keys() - {name for name in got if "copies" in name}:
            if dense or name == "losses":
                # Gloo adds floats in another order than one process does: the last bits differ.
                close = {"rtol": 1e-5, "atol": 1e-6} if dense else {"rtol": 1e-6}
                np.testing.assert_allclose(got[name], expected[name], **close)
            else:
                assert got[name].tobytes() == np.asarray(expected[name]).tobytes(), name
    for name in (name for name in expected if "copies" in name):
        copies = np.concatenate([got[name] for got in results])
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies[1:]), name


def check_all(folder, cases, results, workers):
    for name, case, options in cases[:-1]:
        check_same(results[name], in_one_process(folder, workers, case, options), name == "dense")
        for got in results[name]:
            assert got["traces"] == 1
            if case == "train" and name != "dense":
                assert got["['state'][0].skipped"] == 1
    for got in results["save"]:
        restored = {name for name in got if name.startswith("restored[")}
        assert len(restored) > 10
        for name in restored:
            assert got[name].tobytes() == got[name.removeprefix("restored")].tobytes(), name
    for got in results["refuse"]:
        if len(results["refuse"]) > 1:
            assert "make_array_from_process_local_data" in str(got["local_batch"])
            assert "process_allgather" in str(got["spread_state"])
        else:
            assert got == {}


def test_two_processes_have_the_bits_of_one(two_processes, tmp_path):
    check_all(tmp_path, FEW, two_processes[1], workers=2)


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 2), (3, 1)])
def test_processes_have_the_bits_of_one(processes, devices, tmp_path):
    results = run_group(tmp_path, processes, devices, ALL)
    (tmp_path / "one").mkdir()
    check_all(tmp_path / "one", ALL, results, workers=processes * devices)


@pytest.mark.parametrize(("processes", "devices"), [(3, 1), (1, 1), (2, 2), (4, 1)])
def test_other_processes_go_on_from_a_checkpoint_of_two(two_processes, processes, devices):
    folder, results = two_processes
    resumed = run_group(folder, processes, devices, [("resume", "resume", {})])["resume"]
    check_same(resumed, in_one_process(folder, processes * devices, "resume", {}))
    for got in resumed:
        np.testing.assert_array_equal(got["before"], results["save"][0]["saved_residual"])
        assert got["after"].shape[0] == processes * devices
        sums = [got[name].sum(0, dtype=np.float64) for name in ("before", "after")]
        # To other workers a residual is dealt out, or added up within 24 bits for each.
        np.testing.assert_allclose(*sums, rtol=2**-23)
        assert got["['state'][0].count"] == _cases.SAVED_AT + 1
