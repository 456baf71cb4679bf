"""The example with sharded parameters, in one process and in several, as a user runs it."""

import re
import sys

import pytest

import train_sharded
from benchmarks._common.processes import ROOT, coordinator
from tests.multiprocess import _launch

EXAMPLE = ROOT / "examples" / "train_sharded.py"
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
def test_a_site_may_be_a_process(tmp_path, capsys, layout):
    options = [*SMALL, "--steps", "10", "--layout", layout, "--method", "ok_topk"]
    with coordinator() as (address, bound):
        group = ["--coordinator", address, "--num-processes", "2", "--devices", "4"]
        commands = [
            [sys.executable, str(EXAMPLE), *group, "--process-id", str(i), *options]
            for i in range(2)
        ]
        results = _launch.finish(commands, bound, tmp_path)
    assert [status for status, _ in results] == [0, 0], results
    assert not losses(results[1][1])
    one = losses(alone(capsys, *options[len(SMALL) :]))
    # Sums over processes are made in another order.
    assert losses(results[0][1]) == pytest.approx(one, abs=2e-3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sites", "3"], "--sites 3 does not divide the 8 devices"),
        (["--sites", "8", "--layout", "both"], "--layout both needs an even number of devices"),
        (["--batch", "12"], "--batch 12 is not divisible by the devices of ('site', 'fsdp')"),
        (["--width", "20"], "--width is 20; it must be a multiple of 16"),
        (["--density", "0"], "--density is 0.0; it must be above 0 and at most 1"),
        (["--text", "no-such-file"], "--text no-such-file is no file"),
        (["--layout", "pipeline"], "invalid choice: 'pipeline'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv, message, capsys):
    try:
        status = train_sharded.main(argv)
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
