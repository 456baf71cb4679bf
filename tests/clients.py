"""Programs of the pages docs/clients.md and docs/gallery.md, as the tests of both see them."""

import difflib
import re

import numpy as np

import optax_ext
from benchmarks.learning._page_programs import held, programs_of, text_of

WORKERS = 8


def changed_lines(before, after):
    """A line that is replaced, added or deleted counts once."""
    found = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in found if kind != "equal")


def shows_the_lines_that_it_counts(page, count, more=None):
    """The table of a page has a row for each program, with five lines, or ``more`` for some."""
    counts = re.findall(r"^\| \[(.+?)\]\(#.*?\| (\d+) \|$", text_of(page), re.MULTILINE)
    said = {name.lower(): int(count) for name, count in counts}
    programs = programs_of(page)
    assert len(programs) == count
    assert said == {name.lower(): changed_lines(*lines) for name, lines in programs.items()}
    assert all(lines <= (more or {}).get(name, 5) for name, lines in said.items())


def sends_little(names):
    """Each worker has a residual of its own, and sends a small part of what a dense one would."""
    state, info = optax_ext.get_state(held(names)), optax_ext.get_info(held(names))
    rows = np.asarray(state.residual).reshape(WORKERS, -1)
    assert len({row.tobytes() for row in rows}) == WORKERS
    dense = 2 * rows.shape[1] * (WORKERS - 1) / WORKERS
    assert 0 < float(np.max(info.words)) < 0.2 * dense
