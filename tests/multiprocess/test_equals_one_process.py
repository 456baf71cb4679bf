"""Workers in several processes compute the bits of as many workers in one process."""

import jax
import numpy as np
import pytest

from tests import groups
from tests.multiprocess import _cases

SPARSE = ("ok_topk", "topk_a", "narrow8", "qsgd", "gtopk", "threshold_reuse")


def trained(reduction, steps):
    return reduction, "train", {"reduction": reduction, "steps": steps}


def run_group(folder, processes, devices, cases):
    """What each process returned of each case; checkpoints are saved in the folder."""
    given = {"devices": devices, "cases": list(cases), "folder": str(folder)}
    results = groups.finish(groups.group("tests.multiprocess._worker", processes, **given))
    assert not any(status for status, _ in results), results
    return {
        name: [dict(np.load(folder / f"{name}.{process}.npz")) for process in range(processes)]
        for name, _, _ in cases
    }


QUICK = [
    trained("ok_topk", 50),
    trained("topk_a", 10),
    trained("narrow8", 10),
    ("conserve", "conserve", {"steps": 20}),
    ("skip", "skip", {}),
    ("save", "save", {}),
    # The last: one process takes a batch of its own, and that is another program.
    ("refuse", "refuse", {}),
]
LONG = [*(trained(name, 20) for name in (*SPARSE, "dense")), *QUICK[3:]]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_group(folder, 2, 1, QUICK)


def in_one_process(folder, workers, case, options):
    return _cases.CASES[case](_cases.mesh_of(jax.devices()[:workers]), folder, **options)


def assert_same_bits(results, expected, leave_out=()):
    for process, got in enumerate(results):
        assert got.keys() == expected.keys()
        for name, array in got.items():
            # Copies are those of the process's own devices; other tests look at them.
            if "copies" not in name and name not in leave_out:
                same = array.tobytes() == np.asarray(expected[name]).tobytes()
                assert same, (process, name, array, expected[name])


def check_all(folder, cases, results, workers):
    for name, case, options in cases:
        if case == "refuse":
            continue
        expected = in_one_process(folder, workers, case, options)
        if name == "dense":
            check_dense(results[name], expected)
        else:
            # The loss is a mean of floats, which processes may add in another order.
            assert_same_bits(results[name], expected, leave_out=("losses",))
            if "losses" in expected:
                for got in results[name]:
                    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-6)
    check_copies(results)
    check_traces(results)
    check_conservation(results["conserve"])
    check_skip(results["skip"])
    check_refusals(results["refuse"], spread=len(results["refuse"]) > 1)


def check_dense(results, expected):
    """Gloo adds floats in another order than one process does: the last bits differ."""
    for got in results:
        for name, array in got.items():
            if "copies" not in name:
                np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


def check_copies(results):
    for cases in results.values():
        for name in [name for name in cases[0] if "copies" in name]:
            copies = np.concatenate([got[name] for got in cases])
            assert all(copy.tobytes() == copies[0].tobytes() for copy in copies[1:]), name


def check_traces(results):
    traces = [int(got["traces"]) for cases in results.values() for got in cases if "traces" in got]
    assert traces
    assert set(traces) == {1}


def check_conservation(results):
    for got in results:
        kept = got["applied"] + got["residual"].sum(0, dtype=np.float64)
        assert np.abs(got["residual"]).max() > 0.1  # much has not been delivered yet
        # 20 additions of numbers below 4 in float32, for each worker.
        np.testing.assert_allclose(kept, got["gradients"], atol=1e-5 * len(got["residual"]))


def check_skip(results):
    sparse = "['state'][0]"
    for got in results:
        assert got[f"{sparse}.skipped"] == 1
        assert got[f"{sparse}.count"] == 4
        names = [name for name in got if name.startswith(f"before{sparse}")]
        assert len(names) > 10
        for name in set(names) - {f"before{sparse}.skipped"}:
            after = got[name.replace("before", "after")]
            assert got[name].tobytes() == after.tobytes(), name


def check_refusals(results, spread):
    for got in results:
        if spread:
            assert "make_array_from_process_local_data" in str(got["local_batch"])
            assert "process_allgather" in str(got["spread_state"])
        else:
            assert got == {}


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one(two_processes, tmp_path):
    _, results = two_processes
    check_all(tmp_path, QUICK, results, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 2), (3, 1)])
def test_processes_have_the_bits_of_one(processes, devices, tmp_path):
    results = run_group(tmp_path, processes, devices, LONG)
    (tmp_path / "one").mkdir()
    check_all(tmp_path / "one", LONG, results, workers=processes * devices)


@pytest.mark.slow
def test_a_restored_state_goes_on_with_the_same_bits(two_processes):
    _, results = two_processes
    for got in results["save"]:
        restored = {name for name in got if name.startswith("restored[")}
        assert len(restored) > 10
        for name in restored:
            assert got[name].tobytes() == got[name.removeprefix("restored")].tobytes(), name


def check_resumed(folder, saved, processes, devices):
    cases = [("resume", "resume", {})]
    results = run_group(folder, processes, devices, cases)["resume"]
    expected = in_one_process(folder, processes * devices, "resume", {})
    assert_same_bits(results, expected)
    for got in results:
        np.testing.assert_array_equal(got["before"], saved["saved_residual"])
        assert got["after"].shape[0] == processes * devices
        sums = [got[name].sum(0, dtype=np.float64) for name in ("before", "after")]
        # To other workers a residual is dealt out, or added up within 24 bits for each.
        np.testing.assert_allclose(*sums, rtol=2**-23)
        assert got["['state'][0].count"] == _cases.SAVED_AT + 1
    check_copies({"resume": results})


@pytest.mark.slow
def test_three_processes_go_on_from_a_checkpoint_of_two(two_processes):
    folder, results = two_processes
    check_resumed(folder, results["save"][0], 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 2), (4, 1)])
def test_other_processes_go_on_from_a_checkpoint_of_two(two_processes, processes, devices):
    folder, results = two_processes
    check_resumed(folder, results["save"][0], processes, devices)
