"""The phases of a round that is traced in pieces: exchange, local steps, and last step.

The exchange sends the residuals from the beginning of the round. It and the local steps do not
depend on each other, so both may run at the same time. The last step then uses the results as if
they had been exchanged in that step.
"""

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any, NamedTuple

LOCAL, EXCHANGE, LAST = "local", "exchange", "last"


class Phase(NamedTuple):
    """The phase that is traced now.

    Attributes:
      kind: :data:`LOCAL`, :data:`EXCHANGE` or :data:`LAST`.
      arrived: an :class:`Arrived` for each sparse allreduce, in the order of the chain. An exchange
        appends to it, and a last step removes from it.
    """

    kind: str
    arrived: list["Arrived"]


class Arrived(NamedTuple):
    """The result of an exchange of the residuals from the beginning of a round.

    Attributes:
      mean: ``f32[m]``, the same on every worker.
      changed: fields of the state, by name, after the exchange.
      kept: the :class:`._kept.Kept` of this worker.
      before: ``f32[c]``, the value of this worker in each slot that it sent.
      replaced: ``f32[K]``, its values at the indices of the total, if the allreduce has full sums
        (``SparseAllreduce.full_sums``); ``()`` otherwise.
    """

    mean: Any
    changed: dict[str, Any]
    kept: Any
    before: Any
    replaced: Any


_phase: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)


def current() -> Phase | None:
    """The phase that is traced now; None in a step that is one program."""
    return _phase.get()


def none() -> contextlib.AbstractContextManager[None]:
    """A step that is one program, as the context without a phase."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def of(kind: str, arrived: list[Arrived] | None = None) -> Generator[list[Arrived]]:
    """In this context steps are traced as a phase ``kind`` of a round."""
    arrived = [] if arrived is None else list(arrived)
    token = _phase.set(Phase(kind, arrived))
    try:
        yield arrived
    finally:
        _phase.reset(token)
