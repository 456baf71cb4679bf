"""The examples over several processes, as a user runs them."""

import re

import pytest

import train_sharded
from tests import groups


def run(example, processes, *options):
    """What process 0 prints; the others print nothing of their own."""
    results = groups.example(example, processes, *options)
    for status, _ in results:
        assert status == 0, results
    for _, output in results[1:]:
        assert "workers, " not in output
        assert "loss" not in output
    return results[0][1]


@pytest.mark.slow
def test_a_training_goes_on_with_the_same_and_with_other_processes(tmp_path):
    example, saved = "train_multihost.py", tmp_path / "saved"
    options = ["--report", "10", "--checkpoints", str(saved), "--save-every", "10"]
    whole = run(example, 2, "--steps", "30", "--report", "10")
    assert "2 processes, 2 workers, ok_topk" in run(example, 2, "--steps", "20", *options)
    assert sorted(path.name for path in saved.iterdir()) == ["step_10", "step_20"]
    second = run(example, 2, "--steps", "30", "--resume", *options)
    assert "resumed after step 20" in second
    last = re.compile(r"step 30: .*|test accuracy .*")
    assert len(last.findall(whole)) == 2
    assert last.findall(second) == last.findall(whole)

    third = run(example, 3, "--steps", "120", "--resume", "--devices", "2", *options[:4])
    assert "3 processes, 6 workers, ok_topk" in third
    assert "resumed after step 30" in third
    assert float(re.search(r"test accuracy ([\d.]+)%", third)[1]) > 90


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "both"])
def test_sharded_parameters_learn_and_a_device_holds_its_share(capsys, layout):
    assert train_sharded.main([*SMALL, "--layout", layout, "--steps", "20"]) == 0
    output = capsys.readouterr().out
    assert losses(output)[-1] < losses(output)[0]
    held, whole = map(float, re.search(r"holds ([\d.]+) of ([\d.]+) MiB", output).groups())
    assert held < 0.5 * whole
    words = re.search(r"([\d,]+) words to each site \(([\d.]+)% of the parameters", output)
    assert float(words[2]) < 2


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_a_site_may_be_a_process(capsys, layout):
    options = [*SMALL, "--steps", "10", "--layout", layout, "--method", "ok_topk"]
    together = losses(run("train_sharded.py", 2, "--devices", "4", *options))
    assert train_sharded.main(options) == 0
    # Sums over processes are made in another order.
    assert together == pytest.approx(losses(capsys.readouterr().out), abs=2e-3)
