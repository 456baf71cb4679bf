"""What the demo says and draws, of runs that are made up."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import _report
import train_digits
from _data import digits
from _report import HeldOut, Run

pytestmark = pytest.mark.usefixtures("default_promotion")

STEPS, WORKERS, SIZE, IMAGES = 50, 4, 1000, 200


def made_up(name, held_out=True):
    """A run: dense, or a sparse one whose losses are 0.1 above."""
    random = np.random.default_rng(0)
    above, share = (0.0, 1.0) if name == "dense" else (0.1, 0.05)
    noise = random.standard_normal(IMAGES)
    over = np.geomspace(2.0, 0.4, STEPS) + above
    return Run(
        size=SIZE,
        accuracy=0.9 - above,
        train_loss=0.3 + above,
        losses=over + 0.05 * random.standard_normal(STEPS),
        words=np.full(STEPS, 2 * share * SIZE),
        selected=np.full((STEPS, WORKERS), share * SIZE),
        delivered=np.full(STEPS, share * SIZE),
        overflow=np.zeros((STEPS, WORKERS)),
        held_out=HeldOut(
            {at: float(over[at - 1]) for at in (1, 10, STEPS)},
            # What the images have in common is much more than the difference.
            0.4 + above + noise + 0.01 * random.standard_normal(IMAGES),
            (noise < 1 - above).astype(float),
        )
        if held_out
        else None,
    )


RUNS = {name: made_up(name) for name in ("dense", "sparse_adamw")}


def options(*argv):
    return train_digits.parse(["--workers", str(WORKERS), "--steps", str(STEPS), *argv])


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: figures.append(figure) or save(figure, *a, **k)
    )
    return figures


@pytest.fixture
def untrained(monkeypatch):
    runs = iter(RUNS.values())
    monkeypatch.setattr(train_digits, "optimizers", lambda _: dict.fromkeys(RUNS))
    monkeypatch.setattr(train_digits, "train", lambda *_: next(runs))


def test_nothing_in_the_figure_overlaps(tmp_path, drawn):
    _report.draw(RUNS, tmp_path / "out.png", title="85 parameters")
    (figure,) = drawn
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()]  # pyright: ignore
    for i, box in enumerate(boxes):
        assert figure.bbox.padded(1).contains(*box.min)
        assert figure.bbox.padded(1).contains(*box.max)
        assert not any(box.overlaps(other) for other in boxes[:i])
    for axes in figure.axes:
        labels = [x for x in axes.get_yticklabels() if x.get_visible() and x.get_text()]
        heights = sorted((x.get_window_extent().y0, x.get_window_extent().y1) for x in labels)
        assert all(low[1] <= high[0] for low, high in zip(heights, heights[1:], strict=False))


def test_differences_are_of_the_same_images():
    numbers = _report.summary(RUNS, options())
    row = numbers["runs"]["sparse_adamw"]
    assert row["loss_above"] == pytest.approx(0.1, abs=0.01)
    assert row["loss_error"] < 0.002
    sparse, last = _report.remarks(numbers)
    assert sparse.startswith("sparse_adamw: held-out loss +0.1")
    assert "noise of these images" not in sparse
    assert "--seed" in last
    same = {"dense": RUNS["dense"], "other": RUNS["dense"]}
    assert "within the noise" in _report.remarks(_report.summary(same, options()))[0]


def test_the_figure_goes_to_the_temporary_folder_and_is_named(
    tmp_path, monkeypatch, capsys, untrained
):
    del untrained
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    before = set(tmp_path.parent.iterdir())
    assert train_digits.main([]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    (figure,) = tmp_path.glob("*/*")
    assert first == f"the figure will be {figure}"
    assert last == f"wrote {figure}"
    with Image.open(figure) as image:
        assert image.width > 600
    assert set(tmp_path.parent.iterdir()) == before


def test_a_run_that_ends_early_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(train_digits, "train", interrupt)
    assert train_digits.main([]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err


def test_batches_have_noise_that_is_never_the_same_again():
    data = digits()
    clean = train_digits.noisy_batches(data, options("--noise", "0", "--batch", "1344"))
    noisy = train_digits.noisy_batches(data, options("--noise", "0.5", "--batch", "1344"))
    added = []
    for _ in range(2):
        (images, labels), (without, same) = next(noisy), next(clean)
        np.testing.assert_array_equal(labels, same)
        added.append(images - without)
        assert added[-1].std() == pytest.approx(0.5, rel=0.01)
    assert abs(np.corrcoef(added[0].ravel(), added[1].ravel())[0, 1]) < 0.02


def test_held_out_images_are_the_same_for_all(monkeypatch):
    data = digits()
    images, labels = train_digits.noisy(data.test_images, data.test_labels, options())
    again, _ = train_digits.noisy(data.test_images, data.test_labels, options("--seed", "3"))
    np.testing.assert_array_equal(images, again)
    assert len(images) == len(labels) == train_digits.COPIES * len(data.test_images)
    assert options("--data", "folder").noise == 0
    plain, _ = train_digits.noisy(data.test_images, data.test_labels, options("--noise", "0"))
    np.testing.assert_array_equal(plain, data.test_images)
