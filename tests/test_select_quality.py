"""The measures of benchmarks.training.select_quality on cases worked by hand, and its errors."""

import numpy as np
import pytest

from benchmarks.training import _measures as measures

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture
def layout():
    leaf = measures.Leaf
    # Rows: 2 words, 3 output channels, 1 whole bias.
    return [
        leaf("embedding", (2, 3), 0, 0),
        leaf("kernel", (2, 3), 6, -1),
        leaf("bias", (4,), 12, -1),
    ]


def test_overlap():
    overlap = measures.overlap
    exact = np.array([1, 4, 6, 9])
    assert overlap(exact, exact) == 1
    assert overlap(np.array([0, 4, 9, 10, 10]), exact) == 0.5
    assert overlap(np.array([], int), exact) == 0


@pytest.mark.parametrize(
    ("selected", "missing"),
    [
        ([], [2, 3, 1]),
        ([0, 2], [1, 3, 1]),
        ([0, 5], [0, 3, 1]),
        # Entries 6 and 9 are of the first column, 11 is of the last.
        ([6, 9, 11], [2, 1, 1]),
        ([13], [2, 3, 0]),
        (range(16), [0, 0, 0]),
        # Padding.
        ([16, 16], [2, 3, 1]),
    ],
)
def test_missing_rows(layout, selected, missing):
    counts = measures.missing_rows(np.array(selected, int), layout)
    assert counts.tolist() == missing


def test_the_two_plain_selections(layout):
    x = np.zeros(16, np.float32)
    x[[0, 1, 7, 12]] = [-9, 8, 7, 0.5]
    # k is 3 of 16 at once, and 1 of 6, 1 of 6 and 1 of 4.
    assert sorted(measures.flat_selection(x, layout, 0.2)) == [0, 1, 7]
    assert sorted(measures.layer_selection(x, layout, 0.2)) == [0, 7, 12]
    # Zeros are never selected.
    assert sorted(measures.flat_selection(x, layout, 1.0)) == [0, 1, 7, 12]
