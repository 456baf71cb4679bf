"""The errors of docs/troubleshooting.md: each program there ends with its heading."""

import re
import warnings

import pytest

from tests.optax_ext.helpers import DOCS, programs_of

pytestmark = pytest.mark.usefixtures("default_promotion")
START, *_ = programs_of("troubleshooting")
# XLA prints these, one of them when it ends the process.
PRINTED = ["Termination timeout", "Loading XLA:CPU AOT result"]


def known_errors():
    """The text in each heading, and the program below it."""
    text = (DOCS / "troubleshooting.md").read_text().partition("\n## Errors\n")[2]
    for section in text.partition("\n## ")[0].split("\n### ")[1:]:
        (said,) = re.findall(r"`(.+?)`", section.partition("\n")[0])
        programs = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
        assert len(programs) == (said not in PRINTED), said
        yield from ((said, program) for program in programs)


KNOWN = list(known_errors())


@pytest.mark.parametrize(("said", "program"), KNOWN, ids=[said for said, _ in KNOWN])
def test_the_program_ends_with_the_error_of_its_heading(said, program):
    """Or it warns, and may go on."""
    names = {}
    exec(START, names)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(program, names)
            found = [str(warning.message) for warning in warned]
        except Exception as error:
            found = [str(error)]
    assert any(said in text for text in found), found
