"""What a gradient was made from, as the function that is being traced has it.

Types tell whether a value is the same on all workers under ``shard_map(check_vma=True)``. Under
``pmap``, ``check_vma=False`` and :func:`~sparse_collectives.simulate` they don't; but the
equations that made a value are there to be read, which costs nothing when the program runs. What
is not seen there, such as a gradient that another program has computed, proves nothing.
"""

from collections.abc import Iterable
from typing import Any

from jax.core import Tracer

from sparse_collectives import AxisName, _compat

# Their results are the same on all workers of their axes.
_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_REDUCTION, _OPERANDS, _OTHER = range(3)


def is_reduced(values: Iterable[Any], axis: AxisName) -> bool:
    """Whether the values are proven to be sums, or gathered, over the workers of ``axis``.

    Every way back from them ends in a reduction over ``axis`` or in a constant, and one at least
    in a reduction. Of several names it may be over any.
    """
    values = [_compat.captured(x) for x in values]
    if _compat.is_communicator(axis):
        # No equation of jax names a communicator.
        return False
    return any(_ends_in_reductions(values, name) for name in _compat.axis_names(axis))


def depends_on(values: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether any of the values was made from any of the sources, or is one."""
    wanted = {id(x) for x in map(_compat.captured, sources) if isinstance(x, Tracer)}
    seen: dict[int, Any] = {}
    stack = [_compat.captured(x) for x in values]
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue
        if id(x) in wanted:
            return True
        seen[id(x)] = x  # Kept, so that no other value gets its id.
        stack.extend(map(_compat.captured, _operands(x)))
    return False


def _operands(x: Any) -> list[Any]:
    eqn = _compat.made_by(x)
    return [] if eqn is None else list(eqn.invars)


def _ends_in_reductions(values: list[Any], name: Any) -> bool:
    reduced, seen, stack = False, {}, list(values)
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue  # A constant is the same everywhere.
        seen[id(x)] = x
        eqn = _compat.made_by(x)
        if eqn is None:
            return False  # An argument.
        kind = _kind(eqn, name)
        if kind == _OTHER:
            return False
        if kind == _REDUCTION:
            reduced = True
        else:
            stack.extend(map(_compat.captured, eqn.invars))
    return reduced


def _kind(eqn: Any, name: Any) -> int:
    """Whether what an equation makes is the same on all workers: as a sum, or if its operands are.

    Of what holds other equations (a call, a loop, a branch) it is the first only where all of it
    is a reduction, as of ``jax.jit(lambda x: jax.lax.pmean(x, axis))``.
    """
    inner = [_compat.open_jaxpr(jaxpr)[0] for jaxpr in _compat.jaxprs_in(eqn)]
    if not inner:
        if name in _compat.axes_of_effects(eqn):
            whole = eqn.params.get("axis_index_groups") is None
            return _REDUCTION if eqn.primitive.name in _REDUCTIONS and whole else _OTHER
        return _OTHER if _compat.has_side_effects(eqn) else _OPERANDS
    if any(_kind(e, name) == _OTHER for jaxpr in inner for e in jaxpr.eqns):
        return _OTHER
    return _REDUCTION if all(_all_reduced(jaxpr, name) for jaxpr in inner) else _OPERANDS


def _all_reduced(jaxpr: Any, name: Any) -> bool:
    """Whether every result of a jaxpr comes from reductions alone."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    stack = [x for x in jaxpr.outvars if _compat.is_variable(x)]
    reduced = bool(stack)
    while stack:
        eqn = made.get(stack.pop())
        if eqn is None:
            return False
        if _kind(eqn, name) == _OPERANDS:
            stack.extend(x for x in eqn.invars if _compat.is_variable(x))
    return reduced
