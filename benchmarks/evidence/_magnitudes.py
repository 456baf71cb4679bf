"""Thresholds and magnitudes along recorded trainings, for the figures."""

from collections.abc import Callable

import numpy as np

from ._curves import Curve, Points
from ._recording import ROW_CHOICES, recording

# Steps for which a threshold is used, tau'.
PERIOD = 32
NETWORKS = {"images": "a small VGG, 1 %", "text": "an LSTM, 2 %"}
# Points of a line over rows.
_RANKS = 32


def _threshold(
    name: str, guess: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Callable[[int, bool], Points]:
    """A guessed threshold over the exact one, by step."""

    def measure(seed: int, quick: bool) -> Points:
        exact, gaussian = np.array(recording(name, seed, quick).thresholds).T
        return np.arange(1, len(exact) + 1), guess(exact, gaussian) / exact

    return measure


def reused(exact: np.ndarray, period: int = PERIOD) -> np.ndarray:
    """Of each step the threshold that Ok-Topk uses: that of the first step of the period."""
    steps = np.arange(len(exact))
    return exact[steps - steps % period]


def _row_sums(choice: int) -> Callable[[int, bool], Points]:
    """The sums of all rows at the last recorded step, the largest first, by rank in percent."""

    def measure(seed: int, quick: bool) -> Points:
        _, sums = recording("text", seed, quick).rows[-1]
        ordered = np.sort(sums[choice])[::-1]
        ranks = np.linspace(0, len(ordered) - 1, _RANKS).round().astype(int)
        return 100 * ranks / (len(ordered) - 1), ordered[ranks]

    return measure


def _mean_sums(choice: int) -> Callable[[int, bool], Points]:
    """The mean of the sums of all rows, by step."""

    def measure(seed: int, quick: bool) -> Points:
        rows = recording("text", seed, quick).rows
        return np.array([step + 1 for step, _ in rows]), np.array(
            [x[choice].mean() for _, x in rows]
        )

    return measure


CURVES = (
    *(
        Curve(
            "thresholds",
            f"{line}: reused for {PERIOD} steps",
            _threshold(name, lambda x, _: reused(x)),
        )
        for name, line in NETWORKS.items()
    ),
    *(
        Curve("thresholds", f"{line}: Gaussiank", _threshold(name, lambda _, x: x))
        for name, line in NETWORKS.items()
    ),
    *(Curve("row_magnitudes", line, _row_sums(i)) for i, line in enumerate(ROW_CHOICES)),
    *(Curve("mean_magnitudes", line, _mean_sums(i)) for i, line in enumerate(ROW_CHOICES)),
)
