"""benchmarks.training: measures of recorded trainings, by hand, and small complete runs."""

import json

import numpy as np
import pytest

from benchmarks.local import partitioned_norms, select_speed, state_memory, step_cost
from benchmarks.network import traffic
from benchmarks.training import (
    _measures,
    _replay,
    _unions,
    flush_cost,
    load_balance,
    paper_counts,
    regions,
)
from benchmarks.training._measures import Leaf

pytestmark = pytest.mark.usefixtures("default_promotion")


# Rows: 2 words, 3 output channels, 1 whole bias.
LAYOUT = [
    Leaf("embedding", (2, 3), 0, 0),
    Leaf("kernel", (2, 3), 6, -1),
    Leaf("bias", (4,), 12, -1),
]


@pytest.mark.parametrize(
    ("selected", "missing"),
    [
        ([0, 2], [1, 3, 1]),
        # Entries 6 and 9 are in the first column, and 11 is in the last.
        ([6, 9, 11], [2, 1, 1]),
        # Padding.
        ([16, 16], [2, 3, 1]),
    ],
)
def test_missing_rows(selected, missing):
    assert _measures.missing_rows(np.array(selected, int), LAYOUT).tolist() == missing


def test_the_two_plain_selections():
    x = np.zeros(16, np.float32)
    x[[0, 1, 7, 12]] = [-9, 8, 7, 0.5]
    # k is 3 of 16 globally, and 1 of 6, 1 of 6 and 1 of 4 by layer.
    assert sorted(_measures.largest(x, 0.2)) == [0, 1, 7]
    assert sorted(_measures.layer_selection(x, LAYOUT, 0.2)) == [0, 7, 12]
    # Zeros are never selected.
    assert sorted(_measures.largest(x, 1.0)) == [0, 1, 7, 12]


def test_growth_counts_distinct_indices_and_no_padding():
    selections = [np.array(x) for x in ([0, 3, 9], [3, 4, 10], [10, 10, 10], [0, 1, 2])]
    assert _unions.growth(selections, 10).tolist() == [3, 4, 4, 6]


def test_uniform_selections_are_near_the_formula():
    rows = _unions.uniform(2000, 0.02, trials=20, seed=1)["rows"]
    assert rows[0]["expected"] == pytest.approx(2000 * (1 - 0.98**2))
    assert all(abs(row["errors_off"]) < 5 for row in rows)


def test_predictions_of_unions_that_follow_the_model():
    # Uniform over half of the places: every number of workers predicts the same.
    size, k = 1000, 10
    growth = np.array([500 * (1 - (1 - k / 500) ** p) / size for p in range(1, 9)])
    common = {"size": size, "k": k, "uniform": 0.0}
    reports = [
        {"workers": p, "growth": growth[:p], "series": np.full(3, growth[p - 1]), **common}
        | {"union": {"mean": growth[p - 1]}}
        for p in (4, 8)
    ]
    table = _unions.predictions(reports)
    assert table["measured"] == growth[-1]
    assert list(table["same_run"]) == [2, 4]
    kinds = ("same_run", "other_runs", "other_runs_by_step")
    for predicted in (x for kind in kinds for x in table[kind].values()):
        assert predicted == pytest.approx(growth[-1])


def test_received_leaves_out_what_a_worker_keeps():
    # Owners have 0 to 3, 4 to 5, and 6 to 9; 10 is padding.
    boundaries = np.array([0, 4, 6, 10])
    selections = np.array([[0, 1, 4], [0, 5, 9], [3, 8, 10]])
    assert _replay.received(selections, boundaries).tolist() == [2, 1, 1]


def test_the_entries_of_each_owner_and_how_uneven_they_are():
    indices = np.array([[9, 10, 0], [4, 3, 10]])
    # A region may have no width.
    assert _replay.owned(indices, np.array([0, 4, 4, 10])).tolist() == [2, 0, 2]
    assert _replay.unevenness(np.array([6, 0, 0])) == 3
    assert _replay.unevenness(np.array([0, 0])) == 1


def test_concentration():
    layout = [Leaf("a", (2, 3), 0, -1), Leaf("b", (4,), 6, -1)]
    shares = load_balance.concentration(np.array([[0, 7, 8], [9, 10, 10]]), layout)
    assert shares["a"] == {"parameters": 0.6, "selected": 0.25}
    assert shares["b"] == {"parameters": 0.4, "selected": 0.75}


# Whole runs.


@pytest.mark.slow
def test_hashed_regions_lose_nothing_where_each_worker_has_its_own(tmp_path):
    kept = tmp_path / "rows.json"
    small = ["--workers", "4", "--steps", "4", "--size", "800", "--selected", "80"]
    assert regions.main([*small, "--inputs", "own region", "--json", str(kept)]) == 0
    rows = {row["regions"]: row for row in json.loads(kept.read_text())["rows"]}
    assert rows["hashed"]["missing"] < 0.1 < rows["balanced"]["missing"]


# Programs that no other test runs. `compile_time` takes a Python of its own.
SMALL = [
    (flush_cost, "--steps 4 --seeds 1"),
    (paper_counts, "--tasks images --workers 2 --steps 40 --seeds 1"),
    (partitioned_norms, "--layers 2 --width 8 --workers 2 --rounds 2"),
    (select_speed, "--sizes 4096 --densities 0.05 --rounds 2"),
    (state_memory, "--layers 2 --width 32"),
    (step_cost, "--size 4096 --density 0.05 --rounds 3"),
    (traffic, "--sections algorithms --workers 2 3 --params 4096 --density 0.05"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "argv"), SMALL, ids=lambda x: getattr(x, "__name__", ""))
def test_a_program_runs_in_small_and_writes_its_numbers(program, argv, tmp_path, capsys):
    kept = tmp_path / "numbers.json"
    assert program.main([*argv.split(), "--json", str(kept)]) == 0
    assert capsys.readouterr().out
    assert json.loads(kept.read_text())
