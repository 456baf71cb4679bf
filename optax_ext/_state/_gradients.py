"""What can be told of gradients before a wrapper adds them to what waits, and no longer after."""

from typing import Any

from optax_ext._state import _find
from optax_ext._step import _gradient_checks
from sparse_collectives import _compat


def check_before_accumulation(updates: Any, inner: Any, params: Any) -> None:
    """They are this worker's own, and taken a step ahead where the optimizer asks for it.

    Args:
      updates: the gradients.
      inner: the state of what is wrapped.
      params: the parameters, or None.
    """
    axis = _find.axis_of(inner)
    if not _compat.ranks(axis) and _compat.axis_is_bound(axis):
        _gradient_checks.check_not_averaged(updates, axis)
    for state in _find.get_states(inner):
        _gradient_checks.warn_without_ahead(updates, state, params)
