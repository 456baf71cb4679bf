"""benchmarks.training.fill_in and load_balance: their measures by hand, and their errors."""

import numpy as np
import pytest

from benchmarks.training import _replay, _unions, load_balance
from benchmarks.training._measures import Leaf

pytestmark = pytest.mark.usefixtures("default_promotion")


def test_growth_counts_distinct_indices_and_no_padding():
    growth = _unions.growth
    selections = [np.array(x) for x in ([0, 3, 9], [3, 4, 10], [10, 10, 10], [0, 1, 2])]
    assert growth(selections, 10).tolist() == [3, 4, 4, 6]


def test_a_row_of_uniform_selections():
    # Two of 4 by 2 workers: 4 (1 - 1/4) = 3 distinct ones.
    row = _unions.uniform_row(np.array([2, 4, 3, 4]), 4, 2, 2)
    assert row["expected"] == pytest.approx(3)
    assert row["mean"] == pytest.approx(3.25)
    assert row["standard_error"] == pytest.approx(0.5 * np.sqrt(11 / 12))
    assert row["errors_off"] == pytest.approx(0.25 / row["standard_error"])


def test_uniform_selections_are_near_the_formula():
    rows = _unions.uniform(2000, 0.02, trials=20, seed=1)["rows"]
    assert [row["workers"] for row in rows] == [2, 4, 8, 16, 32, 64]
    assert all(abs(row["errors_off"]) < 5 for row in rows)


def test_parts_of_a_run():
    parts = _unions.parts(np.arange(20.0))
    assert parts == {"mean": 9.5, "first_tenth": 0.5, "last_quarter": 17}


def test_predictions_of_unions_that_follow_the_model():
    # Uniform among half of the places: every number of workers predicts the same.
    size, k = 1000, 10
    growth = np.array([500 * (1 - (1 - k / 500) ** p) / size for p in range(1, 9)])
    reports = [
        {
            "workers": p,
            "size": size,
            "k": k,
            "growth": growth[:p],
            "union": {"mean": growth[p - 1]},
            "uniform": 0.0,
            "series": np.full(3, growth[p - 1]),
        }
        for p in (4, 8)
    ]
    table = _unions.predictions(reports)
    assert table["workers"] == 8
    assert table["measured"] == growth[-1]
    assert list(table["same_run"]) == [2, 4]
    assert list(table["other_runs"]) == list(table["other_runs_by_step"]) == [4]
    kinds = ("same_run", "other_runs", "other_runs_by_step")
    for predicted in (x for kind in kinds for x in table[kind].values()):
        assert predicted == pytest.approx(growth[-1])


def test_received_leaves_out_what_a_worker_keeps():
    # Owners have 0 to 3, 4 to 5, and 6 to 9; 10 is padding.
    boundaries = np.array([0, 4, 6, 10])
    selections = np.array([[0, 1, 4], [0, 5, 9], [3, 8, 10]])
    assert _replay.received(selections, boundaries).tolist() == [2, 1, 1]


def test_owned():
    owned = _replay.owned
    indices = np.array([[9, 10, 0], [4, 3, 10]])
    assert owned(indices, np.array([0, 4, 6, 10])).tolist() == [2, 1, 1]
    # A region may be empty, or have no width.
    assert owned(indices, np.array([0, 4, 4, 10])).tolist() == [2, 0, 2]


def test_unevenness():
    unevenness = _replay.unevenness
    assert unevenness(np.array([2, 2, 2])) == 1
    assert unevenness(np.array([6, 0, 0])) == 3
    assert unevenness(np.array([0, 0])) == 1


def test_concentration():
    layout = [Leaf("a", (2, 3), 0, -1), Leaf("b", (4,), 6, -1)]
    shares = load_balance.concentration(np.array([[0, 7, 8], [9, 10, 10]]), layout)
    assert shares["a"] == {"parameters": 0.6, "selected": 0.25}
    assert shares["b"] == {"parameters": 0.4, "selected": 0.75}
