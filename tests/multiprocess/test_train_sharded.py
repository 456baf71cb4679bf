"""The example with sharded parameters, in one process and in several, as a user runs it."""

import re

import pytest

import train_sharded
from tests import groups

SMALL = ["--width", "16", "--length", "16", "--layers", "1", "--batch", "8", "--report", "5"]


def losses(output):
    return [float(x) for x in re.findall(r"loss ([\d.]+),", output)]


def alone(capsys, *options):
    assert train_sharded.main([*SMALL, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "both"])
def test_it_learns_and_a_device_holds_its_share(capsys, layout):
    output = alone(capsys, "--layout", layout, "--steps", "20")
    found = losses(output)
    assert found[-1] < found[0]
    held, whole = map(float, re.search(r"holds ([\d.]+) of ([\d.]+) MiB", output).groups())
    assert held < 0.5 * whole
    words = re.search(r"([\d,]+) words to each site \(([\d.]+)% of the parameters", output)
    assert float(words[2]) < 2


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_a_site_may_be_a_process(capsys, layout):
    options = [*SMALL, "--steps", "10", "--layout", layout, "--method", "ok_topk"]
    results = groups.example("train_sharded.py", 2, "--devices", "4", *options)
    assert [status for status, _ in results] == [0, 0], results
    assert not losses(results[1][1])
    one = losses(alone(capsys, *options[len(SMALL) :]))
    # Sums over processes are made in another order.
    assert losses(results[0][1]) == pytest.approx(one, abs=2e-3)
