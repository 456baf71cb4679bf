"""Trip counts of loops that count from a constant to a constant by a constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_collectives import _jaxprs


def constants_of(jaxpr: Any, values: Sequence[Any], arguments: Mapping[int, int]) -> dict[Any, int]:
    """The variables of an open jaxpr that are constant integers.

    ``values`` are the values of its constants, and ``arguments`` has its constant arguments by
    position.
    """
    known = {jaxpr.invars[i]: value for i, value in arguments.items() if i < len(jaxpr.invars)}
    for variable, value in zip(jaxpr.constvars, values):
        if _is_counter(variable.aval):
            known[variable] = int(np.asarray(value))
    return known


def constant(value: Any, known: Mapping[Any, int]) -> int | None:
    """The integer value of an operand; None if it is not known."""
    if not _is_counter(value.aval):
        return None
    if _jaxprs.is_variable(value):
        return known.get(value)
    return int(value.val)


def forwarded(operands: Sequence[Any], known: Mapping[Any, int]) -> dict[int, int]:
    """The constants among the operands of a call, by position."""
    found = ((i, constant(operand, known)) for i, operand in enumerate(operands))
    return {i: number for i, number in found if number is not None}


def _is_counter(aval) -> bool:
    return aval.shape == () and np.issubdtype(aval.dtype, np.integer)


def trip_count(eqn: Any, known: Mapping[Any, int]) -> int | None:
    """The iterations of a `while` equation; None if they depend on data.

    A `fori_loop` from and to Python integers is a `scan`, which states its length itself.
    """
    condition, condition_values = _jaxprs.open_jaxpr(eqn.params["cond_jaxpr"])
    body, body_values = _jaxprs.open_jaxpr(eqn.params["body_jaxpr"])
    skip, body_skip = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_condition, of_body = eqn.invars[:skip], eqn.invars[skip : skip + body_skip]
    carried = eqn.invars[skip + body_skip :]
    in_condition = constants_of(condition, condition_values, forwarded(of_condition, known))
    in_body = constants_of(body, body_values, forwarded(of_body, known))
    # A carried value that the loop does not change is also a constant.
    for i, operand in enumerate(carried):
        value = constant(operand, known)
        if value is not None and body.outvars[i] is body.invars[body_skip + i]:
            in_condition[condition.invars[skip + i]] = value
            in_body[body.invars[body_skip + i]] = value

    test = _defined_by(condition, condition.outvars[0], ("lt", "le"))
    if test is None or test.invars[0] not in condition.invars[skip:]:
        return None
    counter = condition.invars[skip:].index(test.invars[0])
    increment = _defined_by(body, body.outvars[counter], ("add",))
    if increment is None or increment.invars[0] is not body.invars[body_skip + counter]:
        return None
    step = constant(increment.invars[1], in_body)
    start = constant(carried[counter], known)
    stop = constant(test.invars[1], in_condition)
    if step is None or start is None or stop is None or step < 1:
        return None
    stop += test.primitive.name == "le"
    return max(0, -(-(stop - start) // step))


def _defined_by(jaxpr, variable, names: Sequence[str]):
    """The equation that computes `variable`, if its primitive is one of `names`."""
    for eqn in jaxpr.eqns:
        if any(result is variable for result in eqn.outvars):
            return eqn if eqn.primitive.name in names else None
    return None
