"""Workers in several processes compute the bits of as many workers in one process.

tests/optax_ext/test_contract.py checks that these lose nothing and skip a step alike. The examples
also run over several processes, as a user runs them.
"""

import re

import jax
import numpy as np
import pytest

import train_sharded
from tests import groups
from tests.multiprocess import _cases

pytestmark = pytest.mark.slow


def run_group(folder, processes, devices, cases):
    """The results of each process for each case; checkpoints are saved in the folder."""
    given = {"devices": devices, "cases": list(cases), "folder": str(folder)}
    results = groups.finish(groups.group("tests.multiprocess._cases", processes, **given))
    assert not any(status for status, _ in results), results
    return {
        name: [dict(np.load(folder / f"{name}.{process}.npz")) for process in range(processes)]
        for name, _, _ in cases
    }


def trainings(names, steps):
    return [(name, "train", {"reduction": name, "steps": steps}) for name in names]


# The last case makes another program: one process takes a batch of its own.
ALWAYS = [
    ("direct", "direct", {}),
    ("rounds", "rounds", {}),
    ("save", "save", {}),
    ("modules", "modules", {}),
    ("explicit", "explicit", {}),
    ("not_a_number", "not_a_number", {}),
    ("refuse", "refuse", {}),
]
FEW = [*trainings(["ok_topk"], 50), *trainings(["topk_a", "narrow8", "codes"], 10), *ALWAYS]
ALL = [*trainings(_cases.REDUCTIONS, 20), *ALWAYS]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_group(folder, 2, 1, FEW)


def check_same(results, expected, dense=False):
    for got in results:
        assert got.keys() == expected.keys()
        for name in got.keys() - {name for name in got if "copies" in name}:
            if dense or name == "losses":
                # Gloo adds floats in an order other than one process does: the last bits differ.
                close = {"rtol": 1e-5, "atol": 1e-6} if dense else {"rtol": 1e-6}
                np.testing.assert_allclose(got[name], expected[name], **close)
            else:
                assert got[name].tobytes() == np.asarray(expected[name]).tobytes(), name
    for name in (name for name in expected if "copies" in name):
        copies = np.concatenate([got[name] for got in results])
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies[1:]), name


def check_all(folder, cases, results, workers):
    """Compares with one process with as many devices."""
    mesh = _cases.mesh_of_all(jax.devices()[:workers])
    for name, case, options in cases:
        expected = _cases.CASES[case](mesh, folder, **options)
        check_same(results[name], expected, dense=name == "dense")


def test_two_processes_have_the_bits_of_one(two_processes, tmp_path):
    check_all(tmp_path, FEW[:-1], two_processes[1], workers=2)


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (2, 2), (3, 1)])
def test_processes_have_the_bits_of_one(processes, devices, tmp_path):
    results = run_group(tmp_path, processes, devices, ALL)
    (tmp_path / "one").mkdir()
    check_all(tmp_path / "one", ALL[:-1], results, workers=processes * devices)


@pytest.mark.parametrize(("processes", "devices"), [(3, 1), (1, 1), (2, 2), (4, 1)])
def test_checkpoint_of_two_processes_goes_on_with_others(two_processes, processes, devices):
    folder, results = two_processes
    resume = [("resume", "resume", {})]
    resumed = run_group(folder, processes, devices, resume)
    check_all(folder, resume, resumed, processes * devices)
    for got in resumed["resume"]:
        np.testing.assert_array_equal(got["before"], results["save"][0]["saved_residual"])
        assert got["after"].shape[0] == processes * devices
        sums = [got[name].sum(0, dtype=np.float64) for name in ("before", "after")]
        # For other workers a residual is dealt out, or added up within 24 bits for each.
        np.testing.assert_allclose(*sums, rtol=2**-23)
        assert got["['state'][0].count"] == _cases.SAVED_AT + 1


# The examples.


def run(example, processes, *options):
    """The output of process 0; the others print nothing of their own."""
    results = groups.example(example, processes, *options)
    for status, _ in results:
        assert status == 0, results
    for _, output in results[1:]:
        assert "workers, " not in output
        assert "loss" not in output
    return results[0][1]


def test_training_goes_on_with_the_same_and_with_other_processes(tmp_path):
    example, saved = "train_multihost.py", tmp_path / "saved"
    options = ["--report", "10", "--checkpoints", str(saved), "--save-every", "10"]
    whole = run(example, 2, "--steps", "30", "--report", "10")
    assert "2 processes, 2 workers, sparse_adamw" in run(example, 2, "--steps", "20", *options)
    assert sorted(path.name for path in saved.iterdir()) == ["step_10", "step_20"]
    second = run(example, 2, "--steps", "30", "--resume", *options)
    assert "resumed after step 20" in second
    last = re.compile(r"step 30: .*|test accuracy .*")
    assert len(last.findall(whole)) == 2
    assert last.findall(second) == last.findall(whole)

    third = run(example, 3, "--steps", "120", "--resume", "--devices", "2", *options[:4])
    assert "3 processes, 6 workers, sparse_adamw" in third
    assert "resumed after step 30" in third
    assert float(re.search(r"test accuracy ([\d.]+)%", third)[1]) > 90


@pytest.mark.parametrize("index", [0, 1], ids=["waits for others", "finds no coordinator"])
def test_processes_that_do_not_meet_end_with_one_line(index):
    options = ("--timeout", "2")
    ((status, output),) = groups.example("train_multihost.py", 2, *options, ids=(index,))
    assert status == 2, output
    assert "have not met at ADDRESS within 2 s" in output
    assert "Traceback" not in output


SMALL = ["--width", "16", "--length", "16", "--layers", "1", "--batch", "8", "--report", "5"]


def losses(output):
    return [float(x) for x in re.findall(r"loss ([\d.]+),", output)]


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "both"])
def test_sharded_parameters_learn_and_a_device_holds_its_share(capsys, layout):
    assert train_sharded.main([*SMALL, "--layout", layout, "--steps", "20"]) == 0
    output = capsys.readouterr().out
    assert losses(output)[-1] < losses(output)[0]
    held, whole = map(float, re.search(r"holds ([\d.]+) of ([\d.]+) MiB", output).groups())
    assert held < 0.5 * whole
    assert float(re.search(r"to each site \(([\d.]+)% of the parameters", output)[1]) < 2


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize(
    ("layout", "method"),
    [("fsdp", "ok_topk"), ("tensor", "ok_topk"), ("fsdp", "sparse_adamw --every 5")],
)
def test_site_may_be_a_process(capsys, layout, method):
    options = [*SMALL, "--steps", "10", "--layout", layout, "--method", *method.split()]
    together = losses(run("train_sharded.py", 2, "--devices", "4", *options))
    assert train_sharded.main(options) == 0
    # Sums over processes are made in another order.
    assert together == pytest.approx(losses(capsys.readouterr().out), abs=2e-3)
