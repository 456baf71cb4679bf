"""The data of the evidence's figures: thresholds, rows, loads, predicted times."""

import numpy as np
import pytest

from benchmarks._common.processes import ROOT
from benchmarks.evidence import _predicted, _recording, _selections, _trainings
from benchmarks.evidence._figures import CURVES
from benchmarks.evidence._store import Store
from benchmarks.training._measures import Leaf

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")
KEPT = ROOT / "docs" / "evidence"
NAMES = ("weak_scaling", "breakdown", "reduction_nodes", "reduction_density")
PREDICTED = [curve for curve in CURVES if curve.figure in NAMES]


@pytest.mark.parametrize("curve", PREDICTED, ids=lambda curve: f"{curve.figure}, {curve.line}")
def test_predicted_lines_are_measured_as_they_are_kept(curve):
    x, y = curve.check(0, True)
    (kept,) = Store(KEPT).best(curve)
    np.testing.assert_allclose(kept["x"], x, rtol=1e-5)
    np.testing.assert_allclose(kept["y"], y, rtol=1e-3)


def test_parts_of_a_bar_are_its_step():
    parts = [curve.check(0, True)[1] for curve in CURVES if curve.figure == "breakdown"]
    bars = [(name, p) for p in (_predicted.FEW, _predicted.MANY) for name in _predicted.STEPS]
    steps = [1e3 * _predicted.step_of(*bar).step for bar in bars]
    np.testing.assert_allclose(np.sum(parts, axis=0), steps)
    assert len(_predicted.BARS) == len(steps)


def test_time_is_that_of_what_is_exchanged():
    densities = {"dense": 1.0, "ok_topk": 0.01, "partitioned_topk(few)": 0.05}
    dense, *others = (_trainings.seconds(*each, 10**6, 8) for each in densities.items())
    # 2n (P-1)/P words of four bytes over 12.5 MB/s.
    assert dense == pytest.approx(2e6 * 7 / 8 * 4 / 12.5e6, rel=0.01)
    assert max(others) < 0.2 * dense


@pytest.mark.parametrize(
    ("figure", "size", "workers"), [("accuracy_time", 18_154, 8), ("loss_time", 34_215, 4)]
)
def test_kept_times_are_those_of_their_steps(figure, size, workers):
    kept = Store(KEPT)
    for curve in (curve for curve in CURVES if curve.figure == figure):
        step = _trainings.seconds(*curve.check.given[2:], size, workers)
        for series in kept.best(curve):
            steps = np.array(series["x"]) / step
            np.testing.assert_allclose(steps, np.arange(20, 401, 20), rtol=1e-4)


# Measures checked by hand.


def test_thresholds_of_normal_entries_agree():
    acc = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    exact, gaussian = _recording.thresholds(acc, 0.01)
    assert gaussian == pytest.approx(exact, rel=0.02)
    assert np.sum(np.abs(acc) >= exact) == 2_000
    # A reused threshold is from the first step of its period.
    assert _selections.reused(np.arange(1.0, 8.0), 3).tolist() == [1, 1, 1, 4, 4, 4, 7]


def test_sums_of_rows():
    # A bias of three, then a matrix whose two columns count as rows: k = 2 of 4, one of each.
    layout = [Leaf("bias", (3,), 0, -1), Leaf(_recording.ROWS_OF, (2, 2), 3, -1)]
    acc = np.array([9, 9, 9, 4, 1, -3, 2], np.float32)
    found = [rows.tolist() for rows in _recording.row_sums(acc, layout, 0.5)]
    assert found == [[7, 3], [7, 0], [4, 2]]


def test_owners_are_one_for_each_index_and_balanced_regions_are_more_even():
    step = [np.arange(shift, 40, 4) for shift in range(4)], np.arange(40)
    regions = ("equal", "balanced", "hashed")
    owners = {name: _selections.owners(name, 400, step[0], 0) for name in regions}
    for name, owner in owners.items():
        counts = np.bincount(owner(np.arange(400)), minlength=4)
        assert counts.sum() == 400
        assert (counts > 0).all()
        assert name == "balanced" or counts.tolist() == [100] * 4
    counts = {name: _selections.load("gather", *step, owner) for name, owner in owners.items()}
    assert counts["equal"].tolist() == [40, 0, 0, 0]
    assert counts["balanced"].max() <= 12
    assert counts["hashed"].tolist() == [10, 10, 10, 10]
    # A worker's entries of its own region stay there.
    assert _selections.load("reduce", *step, owners["equal"]).tolist() == [30, 0, 0, 0]
