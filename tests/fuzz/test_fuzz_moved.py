"""Other workers and the end of a training, for optimizers composed in any way.

States of drawn compositions go through `reshard`, `flush` and `consolidate`. Most are filled with
numbers, since no step has to be compiled for them; some are trained.
"""

import hypothesis
import pytest

from tests.fuzz.composed import STEPS, cases, pairs
from tests.fuzz.moved_laws import check_filled, check_pair, check_trained
from tests.fuzz.test_fuzz import PARTS, _settings, check_part

# Gradients of the linear loss do not depend on the parameters, but a decay before an exchange does.
pytestmark = pytest.mark.filterwarnings("ignore:the gradients were taken at params")
FILLED, OTHER, TRAINED = 15, 8, 2  # examples


@hypothesis.given(cases())
@_settings(FILLED)
def test_states_move_and_are_flushed_in_a_few_compositions(case):
    check_filled(case)


@hypothesis.given(pairs())
@_settings(OTHER)
def test_a_few_states_for_something_else_are_refused_in_words(pair):
    check_pair(pair)


@hypothesis.given(cases(most=STEPS))
@_settings(TRAINED)
def test_training_goes_on_in_a_few_compositions(case):
    check_trained(case)


CHECKS = {
    "filled": (cases(), check_filled, 2 * FILLED),
    "for something else": (pairs(), check_pair, 2 * OTHER),
    "trained": (cases(most=STEPS), check_trained, 2 * TRAINED),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("which", CHECKS)
def test_the_laws_hold_in_any_composition(which, part):
    check_part(part, *CHECKS[which])
