"""All claims, in the order of the page."""

from . import (
    _accuracies,
    _linear,
    _measured,
    _models,
    _more_lower_bound,
    _more_missing,
    _more_unreachable,
    _ok_topk_words,
    _promises,
    _selections,
    _sparcml_words,
    _times,
    _trainings,
    _unreachable,
)
from ._claims import Claim

CLAIMS: tuple[Claim, ...] = (
    *_ok_topk_words.CLAIMS,
    *_sparcml_words.CLAIMS,
    *_linear.CLAIMS,
    *_measured.CLAIMS,
    *_models.CLAIMS,
    *_promises.CLAIMS,
    *_selections.CLAIMS,
    *_accuracies.CLAIMS,
    *_trainings.CLAIMS,
    *_times.CLAIMS,
    *_more_lower_bound.CLAIMS,
    *_more_missing.CLAIMS,
    *_unreachable.CLAIMS,
    *_more_unreachable.CLAIMS,
)
