"""The parts of a round that is traced in pieces: its exchange, its local steps, and its last step.

The exchange is that of what waited when the round began. It needs nothing of the local steps, and
they need nothing of it, so that both may take place at the same time; the last step takes what has
arrived as if it had been exchanged there and then.
"""

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any, NamedTuple

LOCAL, EXCHANGE, LAST = "local", "exchange", "last"


class Phase(NamedTuple):
    """What is traced now.

    Attributes:
      kind: :data:`LOCAL`, :data:`EXCHANGE` or :data:`LAST`.
      arrived: an :class:`Arrived` for each sparse allreduce, in the order of the chain. An exchange
        adds to it, and a last step takes from it.
    """

    kind: str
    arrived: list["Arrived"]


class Arrived(NamedTuple):
    """What an exchange has made of the residuals with which a round began.

    Attributes:
      mean: ``f32[m]``, the same on every worker.
      changed: fields of the state, by name, after the exchange.
      kept: what makes the residual of this worker.
      before: ``f32[c]``, what this worker had in each slot of what it sent.
      replaced: ``f32[K]``, what it had at the indices of the total, of an allreduce that is
        complete; ``()`` of another.
    """

    mean: Any
    changed: dict[str, Any]
    kept: Any
    before: Any
    replaced: Any


_phase: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)


def current() -> Phase | None:
    """The phase that is traced; None in a step that is one program."""
    return _phase.get()


@contextlib.contextmanager
def of(kind: str, arrived: list[Arrived] | None = None) -> Generator[list[Arrived]]:
    """Steps that are traced here are such a part of a round."""
    arrived = [] if arrived is None else list(arrived)
    token = _phase.set(Phase(kind, arrived))
    try:
        yield arrived
    finally:
        _phase.reset(token)
