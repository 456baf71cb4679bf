"""benchmarks.network: problems, reports and predictions by hand."""

import json
import math

import pytest

from benchmarks._common.options import InputError
from benchmarks.network import _problem, _report, run, scaling
from benchmarks.network._workers import WorkerError


def point(**changes):
    row = {"workers": 4, "params": 1000, "link": "1gbit", "method": "ok_topk"}
    row |= {"program_words": {"best": 50.0, "worst": 70.0}, "words": [60.0, 60.0, 66.0]}
    return row | {"seconds": [4.0, 2.0, 5.0]} | changes


def found(points, local=(), links=()):
    return {"points": list(points), "local": list(local), "links": list(links)}


@pytest.mark.parametrize("size", [1, 12_345, 14_700_000])
@pytest.mark.parametrize("shapes", ["vgg", "lstm", "gpt2", "flat"])
def test_shapes_have_exactly_the_entries_asked_for(shapes, size):
    made = _problem.SHAPES[shapes](size)
    assert sum(math.prod(shape) for shape in made) == size
    if shapes != "flat" and size >= 10**6:
        # Otherwise leaves that PowerSGD can't compress would dominate its traffic.
        assert sum(shape[0] for shape in made if len(shape) == 1) < 0.01 * size


def test_batches_have_the_baseline_and_every_method_once_and_fit():
    names = ["dense", "ok_topk", "topk_a", "gtopk", "ddp"]
    assert run.batches(names, 1000, 4, available=1e12) == [names]
    # 4 processes with 7 + 2 buffers of 400 MB and their libraries; another has no room.
    two = run.batches(["ok_topk", "dense", "topk_a"], 10**8, 4, available=4 * 4.2e9)
    assert two == [["dense", "ok_topk"], ["dense", "topk_a"]]
    with pytest.raises(WorkerError, match="use fewer --workers or --params"):
        run.batches(names, 10**8, 4, available=1e9)


def test_predicted_bytes_are_of_the_steps_if_these_say_and_else_of_the_program():
    predicted = _report.predicted_bytes
    assert predicted(point()) == 4 * 62
    assert predicted(point(words=[])) == 4 * 70
    assert predicted(point(words=[], program_words=None)) is None


def test_breakdown_of_a_step_adds_up():
    local = [point(method="dense/leaves", seconds=[0.5]), point(seconds=[1.5])]
    everything = found([point(), point(link="none", seconds=[2.5])], local)
    parts = {"rest": 0.5, "sparsification": 1.0, "communication": 2.5, "of_it_unlimited": 1.0}
    assert _report.breakdown(point(), everything) == parts
    assert _report.breakdown(point(method="ddp"), everything) is None


def validation_report(step):
    where = {"workers": 4, "params": 10**6, "link": "1gbit"}
    points = [point(**where, method=m, seconds=[step]) for m in ("dense", "ddp", "ok_topk/reuse")]
    local = [point(**where, method="dense", seconds=[0.25])]
    report = found(points, local, [where | {"latency": 1e-3}])
    return report | {"settings": {"density": 0.01, "cores": 2}}


def test_validation_adds_the_local_step_latency_and_bandwidth(tmp_path):
    # A psum of 1e6 floats by 4 workers: 4 messages, and 1.5e6 words of 4 bytes at 125 MB/s.
    model = 0.25 + 4 * 1e-3 + 1.5e6 * 4 / 125e6
    # The model has neither DDP nor methods without a local step.
    file = tmp_path / "network.json"
    file.write_text(json.dumps(validation_report(model / 1.5)))
    (row,) = scaling.validate(file)
    assert row["model"] == pytest.approx(model)
    assert row["error"] == pytest.approx(0.5)
    file.write_text(json.dumps(validation_report(1.0) | {"local": []}))
    with pytest.raises(InputError, match="nothing to compare"):
        scaling.validate(file)


def test_scaling_reads_the_local_cost_of_a_measurement(tmp_path):
    file, measured = tmp_path / "cost.json", {"dense (psum)": 20, "ok_topk": 100}
    times = [{"contestant": name, "median_ms": time} for name, time in measured.items()]
    file.write_text(json.dumps({"size": 10**6, "times": times}))
    local, dense, _ = scaling.local_cost(str(file))
    assert local.select == pytest.approx(80e-9)
    assert dense == pytest.approx(20e-9)
