"""The check of predictions on several hosts: its output, and that it sees replicas that differ."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu import _predicted, hosts
from tests.groups import coordinator, finish, started
from tests.optax_ext.helpers import mesh

FEW = ["--params", "20k", "--rounds", "2", "--only", "dense", "sparse_adamw"]


@pytest.mark.slow
def test_two_processes_measure_and_compare_their_replicas():
    program = [sys.executable, "-m", "benchmarks.gpu.hosts", *FEW]
    with coordinator() as (address, bound):
        told = ["--coordinator", address, "--processes", "2"]
        commands = [[*program, *told, "--process", str(i)] for i in (0, 1)]
        variables = bound | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        (first, said), (second, nothing) = finish(started(commands, variables))
    assert (first, second) == (0, 0), said
    rows = [line.split() for line in said.splitlines() if line.endswith("True")]
    assert [row[0] for row in rows] == ["dense", "sparse_adamw"]
    assert "20,000 parameters, 4 workers" in said
    assert "parameters" not in nothing
    # 2 n (P-1)/P words, and far fewer.
    words = [float(row[-2].replace(",", "")) for row in rows]
    assert words[0] == pytest.approx(30_000, rel=0.01)
    assert words[1] < words[0] / 20


def test_a_replica_with_another_bit_is_found():
    trial = hosts.Trial("dense", mesh(4, hosts.AXIS), [(5, 3), (7,)])
    assert trial.same()
    replicas = [np.zeros(7, np.float32) for _ in range(4)]
    replicas[2][6] = -0.0
    trial._params[1] = jax.make_array_from_single_device_arrays(
        (7,),
        NamedSharding(mesh(4, hosts.AXIS), PartitionSpec()),
        [jax.device_put(x, d) for x, d in zip(replicas, jax.devices(), strict=False)],
    )
    assert not trial.same()


def test_predicted_steps_are_those_of_the_link():
    found = {case.gbit: steps for case, steps in _predicted.cases() if case[:3] == ("124M", 64, 1)}
    # The step of AdamW, and 2 n (P-1)/P numbers of 32 bits at 1 Gbit/s.
    expected = 35.0e-3 + 32 * 2 * 124_439_808 * 63 / 64 / 1e9
    assert found[1]["dense"].step == pytest.approx(expected, rel=1e-3)
    ratios = [steps["dense"].step / steps["sparse_adamw"].step for steps in found.values()]
    assert ratios == sorted(ratios, reverse=True)
    # Eight GPUs share the parameters and the card, so that the exchange takes as long.
    shared = next(x for case, x in _predicted.cases() if case == ("124M", 64, 8, 1))
    assert shared["dense"].step == pytest.approx(found[1]["dense"].step, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--coordinator 10.0.0.1:9000", "belong together"),
        ("--coordinator 10.0.0.1:9000 --processes 2 --process 2", "--process must be from 0 to 1"),
        ("--params many", "--params"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert hosts.main(options.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
