"""The program of the linear models: over devices and processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from benchmarks._common.processes import ROOT, environment
from examples.linear_models import __main__, data

pytestmark = pytest.mark.usefixtures("default_promotion")
# A dense exchange of each method and a sparse one.
SHORT = {
    "sgd": ["dense", "ssar_recursive_double"],
    "scd": ["dense_allgather", "sparse_allgather"],
}


def written(folder, *argv):
    numbers = folder / "numbers.json"
    assert __main__.main([*argv, "--json", str(numbers)]) == 0
    return json.loads(numbers.read_text())


def libsvm_file(path, rows=900):
    shape = data.Shape(size=120, nonzeros=14, rows=rows, exponent=1.1)
    matrix, labels = data.power_law("some", shape, seed=1).rows(0, rows)
    dump_svmlight_file(matrix, labels, str(path), zero_based=False)
    return str(path)


@pytest.mark.slow
def test_the_program_compares_exchanges_on_a_file(tmp_path, capsys):
    file = libsvm_file(tmp_path / "rows", 300)
    argv = ["--data", file, "--test", file, "--workers", "2", "--epochs", "2"]
    numbers = written(tmp_path, *argv, "--exchange", "dense", "topk_a")
    assert list(numbers["runs"]) == ["dense", "topk_a"]
    assert numbers["runs"]["dense"]["words"] == [120 * 2] * 2  # two steps of 2 n / 2
    assert numbers["runs"]["topk_a"]["difference"] < 1e-5
    assert 0.5 < numbers["test_accuracy"] <= 1
    printed = capsys.readouterr().out
    assert "300 rows, 120 features; logistic, sgd, 2 workers" in printed
    assert "topk_a: objective 0." in printed


def solved(file, model, ridge):
    """The objective that scikit-learn's solver finds."""
    matrix, labels, _ = data.read(Path(file))
    matrix = matrix.astype(np.float64)
    # scikit-learn minimises |w|^2 / 2 + C * sum(loss).
    given = {"C": 1 / (ridge * len(labels)), "fit_intercept": False, "tol": 1e-7}
    if model == "logistic":
        solver = LogisticRegression(**given, max_iter=10_000)
    else:
        solver = LinearSVC(**given, dual=False, max_iter=1_000_000)
    weights = solver.fit(matrix, labels).coef_[0]
    products = labels * (matrix @ weights)
    logistic = model == "logistic"
    losses = np.logaddexp(0, -products) if logistic else np.maximum(0, 1 - products) ** 2
    return losses.mean() + ridge / 2 * weights @ weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "more"),
    [
        ("sgd", "logistic", ["--rate", "4"]),
        ("scd", "logistic", ["--block", "3"]),
        ("scd", "svm", ["--block", "3"]),
    ],
)
def test_it_reaches_the_objective_of_a_solver(method, model, more, tmp_path):
    file = libsvm_file(tmp_path / "rows")
    argv = ["--data", file, "--method", method, "--model", model, *more]
    argv += ["--epochs", "150", "--batch", "16", "--regularisation", "1e-3", "--exchange"]
    numbers = written(tmp_path, *argv, *SHORT[method])
    expected = solved(file, model, 1e-3)
    for name, run in numbers["runs"].items():
        assert expected <= run["objectives"][-1] * (1 + 1e-5)
        assert run["objectives"][-1] < 1.01 * expected, name
        assert run["difference"] < 1e-5


def in_processes(count, argv):
    """The statuses of so many processes that have joined, and what each says of errors."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
    program = [sys.executable, "-m", "examples.linear_models", *argv, "--workers", str(count)]
    given = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*program, "--join", address, str(number)], **given)
        for number in range(count)
    ]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.slow
@pytest.mark.parametrize("method", list(SHORT))
def test_processes_compute_what_the_devices_of_one_do(method, tmp_path):
    argv = ["--method", method, "--rows", "800", "--epochs", "2", "--exchange", *SHORT[method]]
    here = written(tmp_path, *argv, "--workers", "3")
    statuses, errors = in_processes(3, [*argv, "--json", str(tmp_path / "processes.json")])
    assert statuses == [0, 0, 0], errors
    there = json.loads((tmp_path / "processes.json").read_text())
    for name, run in here["runs"].items():
        objectives = there["runs"][name]["objectives"]
        np.testing.assert_allclose(objectives, run["objectives"], rtol=1e-5)
        assert there["runs"][name]["words"] == run["words"]


@pytest.mark.slow
def test_processes_that_fail_end_with_the_status_and_one_line(tmp_path):
    file = tmp_path / "bad"
    file.write_text("1 1:1\n-1 x\n")
    statuses, errors = in_processes(2, ["--data", str(file)])
    assert statuses == [2, 2], errors
    lines = [x for error in errors for x in error.splitlines() if x.startswith("linear_models")]
    assert lines == [f"linear_models: {file}, line 2: 'x' is not INDEX:VALUE"]
