"""The phases of a round that is traced in pieces: exchange, local steps, and last step.

The exchange sends the residuals from the beginning of the round. It and the local steps do not
depend on each other, so both may run at the same time. The last step then uses the results as if
they had been exchanged in that step.

The states of the exchanges say which phase it is. A phase therefore passes through any wrapper
around them, and a jitted ``update`` is traced once for each phase.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from optax_ext._error_feedback._sparse_state import SparseAllreduceState

LOCAL, EXCHANGE = "local", "exchange"


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


def of(phase: str | None, opt_state: Any) -> Any:
    """The optimizer state for a step that is traced as ``phase``; None: as a whole step."""

    def marked(state: SparseAllreduceState) -> SparseAllreduceState:
        return state._replace(settings=dataclasses.replace(state.settings, phase=phase))

    return _map(marked, opt_state)


def arrived(opt_state: Any) -> list[Arrived]:
    """What an ``update`` in the phase :data:`EXCHANGE` left for a last step, in each state."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Arrived))
    return [leaf for leaf in leaves if isinstance(leaf, Arrived)]


def with_arrived(opt_state: Any, given: Sequence[Arrived]) -> Any:
    """The optimizer state for a last step, which applies :func:`arrived`."""
    left = iter(given)
    return _map(
        lambda state: state._replace(allreduce=next(left)) if state.layout.size else state,
        opt_state,
    )


def _map(function: Callable[[SparseAllreduceState], Any], opt_state: Any) -> Any:
    def is_state(node: Any) -> bool:
        return isinstance(node, SparseAllreduceState)

    return jax.tree.map(
        lambda node: function(node) if is_state(node) else node, opt_state, is_leaf=is_state
    )
