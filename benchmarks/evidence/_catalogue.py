"""All claims, in the order of the page, and all lines of the figures, as in their legends."""

from pathlib import Path

from . import (
    _learned,
    _linear,
    _loads,
    _lower_bound,
    _measured,
    _missing,
    _predicted,
    _promises,
    _selections,
    _sparcml_words,
    _times,
    _trainings,
    _words,
)
from ._claims import read

_CHECKING = (
    _linear,
    _lower_bound,
    _measured,
    _missing,
    _predicted,
    _promises,
    _selections,
    _sparcml_words,
    _times,
    _trainings,
    _words,
)
_DRAWN = (_words, _selections, _trainings, _loads, _predicted, _learned)

CLAIMS = read(
    Path(__file__).with_name("claims.toml"),
    {id: check for module in _CHECKING for id, check in module.CHECKS.items()},
)
CURVES = tuple(curve for module in _DRAWN for curve in module.CURVES)
