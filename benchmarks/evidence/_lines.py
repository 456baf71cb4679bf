"""All lines of the figures; those of one figure in the order of its legend."""

from collections.abc import Callable

import numpy as np

from sparse_collectives import cost_model

from ..training._measures import DENSITIES
from . import _learned, _loads, _magnitudes, _predicted
from ._curves import Curve, Points
from ._ok_topk_words import DENSITY, SIZE, WORKERS
from ._recording import DENSITIES as SELECTED
from ._recording import WORKERS as RECORDED
from ._recording import recording
from ._runs import xi
from ._selections import LAYERS
from ._trainings import counts
from ._words import words_of, words_of_ok_topk


def _words(name: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        rows = [(p, words_of(name, SIZE, DENSITY, p)) for p in WORKERS]
        found = [(p, row["worst"] / (DENSITY * SIZE)) for p, row in rows if row]
        return tuple(np.array(found).T)

    return measure


def _ok_topk_words(case: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        y = [words_of_ok_topk(SIZE, DENSITY, p)[case]["words"] for p in WORKERS]
        return np.array(WORKERS), np.array(y) / (DENSITY * SIZE)

    return measure


def _bound(_seed: int, _quick: bool) -> Points:
    workers = np.array(WORKERS)
    return workers, 6 * (workers - 1) / workers


def _counts(name: str, which: int) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        found = counts(name, seed, quick)[which]
        return np.arange(1, len(found) + 1), found

    return measure


def _xi(model: str, *, falls: bool = False) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        found = xi(0.01, seed, quick, model, falls)
        return np.arange(1, len(found) + 1), found

    return measure


def _union(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        unions = recording(name, seed, quick).unions.mean(0)
        return np.arange(1, len(unions) + 1), unions

    return measure


def _uniform(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        size = recording(name, seed, quick).size
        k, workers = max(1, round(SELECTED[name] * size)), range(1, RECORDED[name] + 1)
        return np.array(workers), np.array(
            [cost_model.expected_union(size, k, p) / size for p in workers]
        )

    return measure


def _missing(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        rates = recording("text", seed, quick).missing.rates("accumulator", name)
        return 100 * np.array(DENSITIES), 100 * np.array(rates["mean of matrices"])

    return measure


CURVES = (
    Curve("words", "TopkA", _words("topk_a"), exact=True),
    Curve("words", "TopkDSA, worst", _words("dsar_split_allgather"), exact=True),
    Curve("words", "gTopk", _words("gtopk"), exact=True),
    Curve("words", "bound of Ok-Topk, 6k (P-1)/P", _bound, exact=True),
    Curve("words", "Ok-Topk, worst step", _ok_topk_words("worst"), exact=True),
    Curve("words", "Ok-Topk, even step", _ok_topk_words("even"), exact=True),
    Curve("words", "dense", _words("dense"), exact=True),
    Curve("fill_in", "a small VGG, 1 %", _union("images")),
    Curve("fill_in", "uniform selections, 1 %", _uniform("images"), exact=True),
    Curve("fill_in", "an LSTM, 2 %", _union("text")),
    Curve("fill_in", "uniform selections, 2 %", _uniform("text"), exact=True),
    Curve("missing_rows", "top-k of each layer", _missing(LAYERS)),
    Curve("missing_rows", "ADTopk", _missing("adtopk")),
    Curve("counts", "paper's schedule, local", _counts("paper", 0)),
    Curve("counts", "paper's schedule, global", _counts("paper", 1)),
    Curve("counts", "corrected thresholds, local", _counts("paper, corrected", 0)),
    Curve("counts", "corrected thresholds, global", _counts("paper, corrected", 1)),
    Curve("counts", "Gaussiank, local", _counts("gaussian", 0)),
    Curve("counts", "ours, local and global", _counts("ok_topk_sgd", 1)),
    Curve("xi", "a convolutional network", _xi("digits")),
    Curve("xi", "an LSTM", _xi("lstm")),
    Curve("xi", "a transformer", _xi("transformer")),
    Curve("xi", "the LSTM, a rate that falls to 1 %", _xi("lstm", falls=True)),
    *_magnitudes.CURVES,
    *_loads.CURVES,
    *_predicted.CURVES,
    *_learned.CURVES,
)
