"""The program of the linear models and its benchmark: over devices, processes and real links."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import dump_svmlight_file

from benchmarks._common.processes import ROOT, environment
from benchmarks.network import linear_models as benchmark
from examples.linear_models import __main__, generate, launch

pytestmark = pytest.mark.usefixtures("default_promotion")


def written(folder, *argv):
    out, numbers = folder / "out.png", folder / "numbers.json"
    assert __main__.main([*argv, "--out", str(out), "--json", str(numbers)]) == 0
    with Image.open(out) as image:
        assert image.width > 600
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
    return json.loads(numbers.read_text())


def libsvm_file(path, rows=900):
    shape = generate.Shape(size=120, nonzeros=14, rows=rows, exponent=1.1)
    matrix, labels = generate.power_law("some", shape, seed=1).rows(0, rows)
    dump_svmlight_file(matrix, labels, str(path), zero_based=False)
    return str(path)


@pytest.mark.slow
def test_the_program_compares_exchanges_on_a_file(tmp_path, capsys):
    file = libsvm_file(tmp_path / "rows", 300)
    argv = ["--data", file, "--test", file, "--workers", "2", "--epochs", "2", "--solver"]
    numbers = written(tmp_path, *argv, "--exchange", "dense", "topk_a")
    assert list(numbers["runs"]) == ["dense", "topk_a"]
    assert numbers["runs"]["dense"]["words"] == [120 * 2] * 2  # two steps of 2 n / 2
    assert numbers["runs"]["topk_a"]["difference"] < 1e-5
    assert numbers["solver"] < min(numbers["runs"]["dense"]["objectives"])
    assert 0.5 < numbers["test_accuracy"] <= 1
    printed = capsys.readouterr().out
    assert "300 rows, 120 features; logistic, sgd, 2 workers" in printed
    assert "scikit-learn" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], "0 is not between 1 and"),
        (["--exchange", "ring"], "--exchange ring is none of --method sgd"),
        (["--method", "scd", "--exchange", "topk_a"], "is none of --method scd"),
        (["--method", "scd", "--model", "hinge"], "has no second derivative"),
        (["--features", "sharded"], "--features sharded is for --method scd"),
        (["--rate", "1e5", "--regularisation", "1"], "must be below 1"),
        (["--test", "file"], "--test and --size are for --data"),
        (["--data", "none", "--rows", "5"], "--rows is for generated data"),
        (["--data", "no-such-file"], "cannot read no-such-file: No such file"),
        (["--mpi", "--processes"], "exclude one another"),
        (["--mpi", "--workers", "2"], "it is the -n of mpirun"),
        (["--coordinator", "host:1"], "--coordinator and --process-id go together"),
        (["--coordinator", "host", "--process-id", "0"], "expected HOST:PORT"),
        (["--coordinator", "host:1", "--process-id", "4"], "--process-id is 4, of 4 workers"),
        (["--workers", "9"], "--workers is 9, but jax runs with 8 devices"),
        (["--out", "figure.txt"], "must end in one of"),
        (["--json", "no/such/folder/file"], "cannot write"),
    ],
)
def test_wrong_input_is_one_line(argv, message, capsys):
    try:
        status = __main__.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "more"),
    [
        ("sgd", "logistic", ["--rate", "4"]),
        ("sgd", "hinge", ["--rate", "20", "--epochs", "60"]),
        ("scd", "logistic", ["--block", "3"]),
        ("scd", "svm", ["--block", "3"]),
    ],
)
def test_it_reaches_the_objective_of_a_solver(method, model, more, tmp_path):
    argv = ["--data", libsvm_file(tmp_path / "rows"), "--method", method, "--model", model]
    argv += ["--epochs", "150", "--batch", "16", "--regularisation", "1e-3", "--solver", *more]
    numbers = written(tmp_path, *argv)
    for name, run in numbers["runs"].items():
        assert numbers["solver"] <= run["objectives"][-1] * (1 + 1e-5)
        assert run["objectives"][-1] < 1.01 * numbers["solver"], name
        assert run["difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [[], ["--method", "scd"], ["--method", "scd", "--features", "sharded"]]
)
def test_processes_compute_what_the_devices_of_one_do(argv, tmp_path):
    argv = [*argv, "--rows", "800", "--workers", "3", "--epochs", "2"]
    here = written(tmp_path, *argv)
    there = written(tmp_path, *argv, "--processes")
    for name, run in here["runs"].items():
        objectives = there["runs"][name]["objectives"]
        np.testing.assert_allclose(objectives, run["objectives"], rtol=1e-5)
        assert there["runs"][name]["words"] == run["words"]


@pytest.mark.slow
def test_processes_that_fail_end_with_the_status_and_one_line(tmp_path, capfd):
    file = tmp_path / "bad"
    file.write_text("1 1:1\n-1 x\n")
    assert launch.on_loopback(["--data", str(file), "--workers", "2"], 2) == 2
    lines = [x for x in capfd.readouterr().err.splitlines() if "linear_models" in x]
    assert lines == [f"linear_models: {file}, line 2: 'x' is not INDEX:VALUE"]


# The benchmark over limited links.


def test_a_benchmark_of_an_unknown_exchange_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["--method", "scd", "--exchange", "topk_a"])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "--exchange topk_a is none of --method scd: dense, dense_allgather" in lines[0]


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("method", ["sgd", "scd"])
def test_the_benchmark_measures_over_real_links_what_is_sent(method, tmp_path):
    numbers = tmp_path / "numbers.json"
    program = [
        sys.executable,
        "-m",
        "benchmarks.network.linear_models",
        "--quick",
        "--workers",
        "2",
    ]
    names = {"sgd": ["ssar_recursive_double"], "scd": ["sparse_allgather"]}[method]
    done = subprocess.run(
        [*program, "--method", method, "--exchange", *names, "--json", str(numbers)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    base, sparse = json.loads(numbers.read_text())["rows"]
    assert sparse["exchange"] == names[0]
    assert sparse["words"][0] < base["words"][0] / 3
    for row in (base, sparse):
        # With headers and barriers; a word has 4 bytes.
        assert 4 * row["words"][0] < row["received"][0] < 4 * row["words"][0] * 1.2 + 20_000
        assert 0 < row["exchange_seconds"][0] <= row["epoch_seconds"][0]
        np.testing.assert_allclose(row["objectives"], base["objectives"], rtol=1e-5)
