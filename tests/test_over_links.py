"""The benchmarks over real links: their measurements, and that they clean up."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks._common import namespaces
from benchmarks.learning import time
from benchmarks.network import _report, scaling
from benchmarks.network import run as network
from tests.leftovers import left_by
from tests.programs import started, status_of

LEARNING = ["--workers", "2", "--batch", "4", "--width", "4", "--seconds", "2", "--points", "2"]
QUICK = ("--workers", "2", "--quick", "--methods", "dense", "--no-breakdown")


def ended(module, *argv):
    """The output of a program, which must end well and leave no network."""
    running = started(module, *argv)
    printed, errors = running.communicate()
    assert running.returncode == 0, errors
    assert left_by(running.pid) == set()
    return printed


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_network_run_measures_the_bytes_that_the_library_predicts(tmp_path):
    file, figure = tmp_path / "network.json", tmp_path / "network.png"
    # So large that Gloo's overhead in each message is small.
    argv = ["--quick", "--params", "400000", "--density", "0.05", "--link", "100mbit"]
    argv += ["--methods", "ok_topk", "topk_a", "--json", str(file), "--plot", str(figure)]
    ended("benchmarks.network.run", "--workers", "2", *argv)
    numbers = json.loads(file.read_text())
    assert figure.stat().st_size > 10_000
    points = {(row["link"], row["method"]): row for row in numbers["points"]}
    methods = ("dense", "ok_topk", "topk_a")
    assert set(points) == {(link, name) for link in ("100mbit", "none") for name in methods}
    for row in points.values():
        received = sum(row["received"]) / len(row["received"])
        assert received == pytest.approx(_report.predicted_bytes(row), rel=0.1), row["method"]
        assert _report.breakdown(row, numbers) is not None
    # 1.6 MB at 12.5 MB/s: the limit is there. (A bucket that is full lets a little pass at once.)
    assert min(points["100mbit", "dense"]["seconds"]) > 0.9 * 1.6e6 / 12.5e6
    assert {row["method"] for row in scaling.validate(file)} == set(methods)


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_learning_time_learns_and_sends_what_it_should(tmp_path):
    runs = tmp_path / "runs"
    argv = ["--link", "100mbit", "--rates", "0.05", "--runs", str(runs)]
    argv += ["--only", "dense", "dense, float16", "sparse_adamw", "--options", "density=0.5"]
    printed = ended("benchmarks.learning.time", *LEARNING, *argv)
    found = {run["contestant"]: run for run in map(json.loads, runs.read_text().splitlines())}
    assert list(found) == ["dense", "dense, float16", "sparse_adamw", "sparse_adamw density=0.5"]
    for name, run in found.items():
        curve = run["curve"]
        assert curve["values"][-1] < curve["values"][0] - 0.1, name
        assert len(curve["seconds"]) == len(curve["steps"]) == 3
        assert name in printed
    # Half the bits are half the bytes, plus the overhead of each message.
    size = found["dense"]["curve"]["size"]
    assert 4 * size < found["dense"]["received"] < 4.4 * size
    assert 2 * size < found["dense, float16"]["received"] < 2.4 * size
    assert found["sparse_adamw"]["received"] < 0.5 * size


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("method", ["sgd", "scd"])
def test_epochs_of_linear_models_measure_what_is_sent(method, tmp_path):
    numbers = tmp_path / "numbers.json"
    names = {"sgd": ["ssar_recursive_double"], "scd": ["sparse_allgather"]}[method]
    argv = ["--quick", "--workers", "2", "--method", method, "--exchange", *names]
    ended("benchmarks.network.linear_models", *argv, "--json", str(numbers))
    base, sparse = json.loads(numbers.read_text())["rows"]
    assert sparse["exchange"] == names[0]
    assert sparse["words"][0] < base["words"][0] / 3
    for row in (base, sparse):
        # With headers and barriers; a word has 4 bytes.
        assert 4 * row["words"][0] < row["received"][0] < 4 * row["words"][0] * 1.2 + 20_000
        assert 0 < row["exchange_seconds"][0] <= row["epoch_seconds"][0]
        np.testing.assert_allclose(row["objectives"], base["objectives"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("program", "number"),
    [
        (("benchmarks.network.run", *QUICK), signal.SIGINT),
        (("benchmarks.network.run", *QUICK), signal.SIGTERM),
        (("benchmarks.learning.time", *LEARNING, "--only", "dense"), signal.SIGTERM),
    ],
)
def test_network_of_an_interrupted_run_is_removed(program, number):
    running = started(*program)
    # Its first line is printed inside the network.
    assert running.stderr.readline()
    assert left_by(running.pid)
    running.send_signal(number)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert errors.strip().endswith("interrupted")
    assert left_by(running.pid) == set()


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_clean_removes_what_a_killed_run_left_and_nothing_of_a_live_one(capsys):
    running = started("benchmarks.network.run", *QUICK)
    assert "compiling" in running.stderr.readline()
    running.kill()
    running.communicate()
    assert left_by(running.pid)
    with namespaces.network(1):
        alive = left_by(os.getpid())
        assert network.main(["--clean"]) == 0
        assert left_by(os.getpid()) == alive
        assert alive
    assert left_by(running.pid) == set()
    assert str(running.pid) in capsys.readouterr().out


ECHO = """
import socket
with socket.create_server(("", 9876)) as listening:
    print("listens", flush=True)
    connection, _ = listening.accept()
    connection.sendall(connection.recv(1))
"""
ASK = """
import socket, sys, time
begun = time.monotonic()
with socket.create_connection((sys.argv[1], 9876)) as connection:
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
print(time.monotonic() - begun)
"""


@pytest.mark.usefixtures("usable")
def test_link_with_a_delay_holds_every_frame():
    """A connection, a byte, and its echo: two round trips."""
    python = [sys.executable, "-c"]
    with namespaces.network(2) as hosts:
        for link, at_least in (("100mbit+40ms", 0.16), ("none+20ms", 0.08), ("100mbit", 0.0)):
            hosts.limit(link)
            server = [*hosts.command(1), *python, ECHO]
            with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as answering:
                assert answering.stdout.readline() == "listens\n"
                client = [*hosts.command(0), *python, ASK, hosts.addresses[1]]
                taken = subprocess.run(client, capture_output=True, text=True, check=True)
            assert float(taken.stdout) >= at_least
    assert left_by(os.getpid()) == set()


@pytest.mark.parametrize(("program", "argv"), [(network, ["--quick"]), (time, [])])
def test_network_without_root_says_so_in_one_line(program, argv, capsys, monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    # The handlers of the test's own process are left as they are.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert status_of(program.main, argv) == 2
    assert "need root" in capsys.readouterr().err.strip().splitlines()[-1]
