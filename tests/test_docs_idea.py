"""The figures of docs/idea.md have the numbers that the library computes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("idea", DOCS / "figures" / "idea.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_the_figures_are_those_of_the_program(figures, tmp_path):
    figures.main(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["idea_agreed.svg", "idea_gradient.svg", "idea_ok_topk.svg"]
    for name in drawn:
        committed = (DOCS / "images" / name).read_text()
        assert (tmp_path / name).read_text() == committed, f"run {figures.__file__}"


@pytest.mark.usefixtures("default_promotion")
def test_the_page_tells_what_they_show(figures):
    ok_topk, agreed = figures.ok_topk(), figures.agreed()
    assert (ok_topk.words, agreed.words) == (75, 9)
    assert np.abs(ok_topk.total).sum() == np.abs(agreed.total).sum() == 81
    assert ok_topk.selected.any(0).sum() == 8
    # The second entry.
    assert ok_topk.acc[:, 1].tolist() == [-3, -5, -8, -9]
    assert (ok_topk.total[1], ok_topk.kept[:, 1].tolist()) == (-17, [-3, -5, 0, 0])
    assert (agreed.owner[1], agreed.acc[2:, 1].tolist()) == (0, [-8, -9])
    # Worker 1 sent four, and one of them waits.
    assert (ok_topk.total[ok_topk.selected[1]] != 0).sum() == 3
    (waiting,) = np.flatnonzero(ok_topk.selected[1] & (ok_topk.total == 0))
    assert ok_topk.kept[1, waiting] == 6
    # Worker 2 chose a 4, of which all have 12.
    (chosen,) = np.flatnonzero(agreed.selected[2])
    assert (agreed.acc[2, chosen], agreed.total[chosen]) == (4, 12)
