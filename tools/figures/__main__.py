"""Figures of the manual, made of the files in docs/data.

    python -m tools.figures

All have one style: each line has its name at its end instead of a legend, a contestant has the
same color in every figure, and the text can be read at a width of 700 pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks._common import options
from benchmarks._common.processes import ROOT

from . import _gallery, _losses, _steps
from ._style import DPI, STYLE, WIDTH

FOLDER = ROOT / "docs" / "images"
DRAWN = {
    "learning_time_minutes.png": (_losses.loss_against_time, 3.9),
    "learning_late.png": (_losses.loss_against_late_time, 3.9),
    "learning_bytes.png": (_losses.loss_against_bytes, 12),
    "chaos.png": (_losses.loss_with_deaths, 3.9),
    "network.png": (_steps.parts_of_steps, 3.2),
    "scaling.png": (_steps.predicted_steps, 3.7),
    "gallery_sites.png": (_gallery.accuracy_of_two_sites, 2.8),
    **{
        f"gallery_{name}.png": (
            functools.partial(_gallery.results_against_words, picture=name),
            2.6,
        )
        for name in _gallery.PICTURES
    },
}


def draw(name: str, function: Callable[[Figure], None], height: float) -> None:
    """One figure, as a PNG."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    with rc_context(STYLE):
        function(figure)
    figure.savefig(FOLDER / name)


def main(argv: list[str] | None = None) -> int:
    """Draws them."""
    options.parser_of(__doc__).parse_args(argv)
    for name, (function, height) in DRAWN.items():
        draw(name, function, height)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
