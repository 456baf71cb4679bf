"""Reads traced equations: what a value was made from, and whether workers may differ in it.

Types of JAX say the latter under ``shard_map(check_vma=True)``, but there a loop that starts from
zeros and goes on with values of one worker is an error, and with it much that was written for one
device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.core import Tracer

from sparse_collectives import AxisName, _compat, _jaxprs, transport

# Their results are the same on all workers of their axes.
_REDUCTIONS = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "to_invarying",
}

_REDUCTION, _OPERANDS, _OTHER = range(3)


def is_reduced(values: Iterable[Any], axis: AxisName) -> bool:
    """Whether the values are proven to be summed or gathered over the workers of ``axis``.

    Every path back from them ends in a reduction over ``axis`` or in a constant, and at least one
    in a reduction. If ``axis`` has several names, a reduction over one of them is enough.
    """
    values = [_jaxprs.captured(x) for x in values]
    if _compat.is_communicator(axis):
        # Equations of JAX name no communicator.
        return False
    return any(_ends_in_reductions(values, name) for name in _compat.axis_names(axis))


def depends_on(values: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether any of the values was made from one of the sources, or is one."""
    wanted = {id(x) for x in map(_jaxprs.captured, sources) if isinstance(x, Tracer)}
    seen: dict[int, Any] = {}
    stack = [_jaxprs.captured(x) for x in values]
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue
        if id(x) in wanted:
            return True
        seen[id(x)] = x  # Kept, so that no other value gets its id.
        stack.extend(map(_jaxprs.captured, _operands(x)))
    return False


def common_among(axis: AxisName) -> Callable[[Any], bool]:
    """A function that says whether a value is the same on all workers, whatever its type says.

    Every path back from it ends in a constant, in a reduction, or in a value that is typed as the
    same: zeros in the type of a gradient, for example. A result of a branch or a loop depends on
    those operands only from which it is made.

    Calls share what they prove, since many leaves depend on the same values.
    After a call that returns False the function has no meaning.
    """
    proofs = [_Proof(name) for name in _compat.axis_names(axis)]

    def is_common(value: Any) -> bool:
        x = _jaxprs.captured(value)
        return all(proof.is_common(x) for proof in proofs)

    return is_common


class _Proof:
    """The values that are known to be the same along an axis of that name."""

    def __init__(self, name: Any):
        self.name = name
        self.seen: dict[int, Any] = {}
        # For each equation with inner ones, which results may differ.
        self.results: dict[int, list[bool]] = {}

    def is_common(self, value: Any) -> bool:
        name, stack = self.name, [value]
        while stack:
            x = stack.pop()
            if not isinstance(x, Tracer) or id(x) in self.seen:
                continue
            if name not in _compat.varying_axes(x):
                continue
            self.seen[id(x)] = x  # Kept, so that no other value gets its id.
            eqn = _jaxprs.made_by(x)
            if eqn is not None and not self._may_differ(x, eqn):
                continue
            if eqn is None or (kind := _kind(eqn, name)) == _OTHER:
                return False
            if kind == _OPERANDS:
                stack.extend(map(_jaxprs.captured, eqn.invars))
        return True

    def _may_differ(self, value: Any, eqn: Any) -> bool:
        """Whether this result of an equation may differ if all operands do that are typed so."""
        place = _jaxprs.place_of(value, eqn)
        if place is None or not _jaxprs.jaxprs_in(eqn):
            return True
        if id(eqn) not in self.results:
            operands = map(_jaxprs.captured, eqn.invars)
            inputs = [
                isinstance(x, Tracer) and self.name in _compat.varying_axes(x) for x in operands
            ]
            self.results[id(eqn)] = _varying_results(eqn, inputs, self.name)
        return self.results[id(eqn)][place]


def _operands(x: Any) -> list[Any]:
    eqn = _jaxprs.made_by(x)
    return [] if eqn is None else list(eqn.invars)


def _ends_in_reductions(values: list[Any], name: Any) -> bool:
    reduced, seen, stack = False, {}, list(values)
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue  # A constant is the same everywhere.
        seen[id(x)] = x
        eqn = _jaxprs.made_by(x)
        if eqn is None:
            return False  # An argument.
        kind = _kind(eqn, name)
        if kind == _OTHER:
            return False
        if kind == _REDUCTION:
            reduced = True
        else:
            stack.extend(map(_jaxprs.captured, eqn.invars))
    return reduced


def _kind(eqn: Any, name: Any) -> int:
    """Whether the results of an equation are the same on all workers: a sum, or if operands are.

    An equation with inner equations (a call, a loop, a branch) is a reduction only if all of its
    results are reduced, as in ``jax.jit(lambda x: jax.lax.pmean(x, axis))``.
    """
    inner = [_jaxprs.open_jaxpr(jaxpr)[0] for jaxpr in _jaxprs.jaxprs_in(eqn)]
    if not inner:
        if name in _jaxprs.axes_of(eqn):
            whole = eqn.params.get("axis_index_groups") is None
            return _REDUCTION if eqn.primitive.name in _REDUCTIONS and whole else _OTHER
        return _OTHER if _jaxprs.has_side_effects(eqn) else _OPERANDS
    if any(_kind(e, name) == _OTHER for jaxpr in inner for e in jaxpr.eqns):
        return _OTHER
    return _REDUCTION if all(_all_reduced(jaxpr, name) for jaxpr in inner) else _OPERANDS


def _all_reduced(jaxpr: Any, name: Any) -> bool:
    """Whether every result of a jaxpr comes from reductions only."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    stack = [x for x in jaxpr.outvars if _jaxprs.is_variable(x)]
    reduced = bool(stack)
    while stack:
        eqn = made.get(stack.pop())
        if eqn is None:
            return False
        if _kind(eqn, name) == _OPERANDS:
            stack.extend(x for x in eqn.invars if _jaxprs.is_variable(x))
    return reduced


def varying(closed: Any, inputs: Sequence[bool], axis: AxisName) -> list[bool]:
    """Which results of a traced function may differ between the workers of ``axis``.

    A result may differ if it is made from a value that may, and not by a sum or gather over all
    workers, which is the rule of the types of JAX. Loops and branches are followed.

    Args:
      closed: the function, as from ``jax.make_jaxpr``.
      inputs: for each argument, whether it may differ.
      axis: the axis, or several.
    """
    jaxpr, constants = _jaxprs.open_jaxpr(closed)
    of_constants = [isinstance(x, Tracer) for x in constants]
    # One worker does not differ from others, and exchanges nothing that could show it.
    names = [name for name in _compat.axis_names(axis) if transport.axis_size(name) > 1]
    if not names:
        return [False] * len(jaxpr.outvars)
    found = [_varying(jaxpr, [*of_constants, *inputs], name) for name in names]
    return [any(each) for each in zip(*found, strict=True)]


def _varying(jaxpr: Any, inputs: Sequence[bool], name: Any) -> list[bool]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def of(x: Any) -> bool:
        return _jaxprs.is_variable(x) and known[x]

    for eqn in jaxpr.eqns:
        results = _varying_results(eqn, list(map(of, eqn.invars)), name)
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _varying_results(eqn: Any, inputs: list[bool], name: Any) -> list[bool]:
    """Which results of an equation may differ, for operands that may."""
    inner, params = _jaxprs.jaxprs_in(eqn), eqn.params
    count = len(eqn.outvars)
    if not inner and name in _jaxprs.axes_of(eqn):
        return [_kind(eqn, name) != _REDUCTION] * count

    def inside(closed: Any, given: list[bool]) -> list[bool]:
        jaxpr, constants = _jaxprs.open_jaxpr(closed)
        return _varying(jaxpr, [*[isinstance(x, Tracer) for x in constants], *given], name)

    def loop(closed: Any, fixed: list[bool], carry: list[bool], more: list[bool]) -> Any:
        """The results of a body whose first results are carried on."""
        while True:
            results = inside(closed, [*fixed, *carry, *more])
            joined = [a or b for a, b in zip(carry, results, strict=False)]
            if joined == carry:
                return results
            carry = joined

    if eqn.primitive.name == "scan":
        fixed, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        results = loop(params["jaxpr"], inputs[:fixed], inputs[fixed:end], inputs[end:])
        # Without a turn, the carried values are those at the start.
        begin = [*inputs[fixed:end], *[False] * (count - end + fixed)]
        return [a or b for a, b in zip(begin, results, strict=True)]
    if eqn.primitive.name == "while":
        first = params["cond_nconsts"]
        fixed = first + params["body_nconsts"]
        loop_results = loop(params["body_jaxpr"], inputs[first:fixed], inputs[fixed:], [])
        results = [a or b for a, b in zip(inputs[fixed:], loop_results, strict=True)]
        ends = inside(params["cond_jaxpr"], [*inputs[:first], *results])
        return [True] * count if any(ends) else results
    if eqn.primitive.name == "cond":
        of_branches = [inside(branch, inputs[1:]) for branch in params["branches"]]
        return [inputs[0] or any(each) for each in zip(*of_branches, strict=True)]
    if len(inner) == 1:
        jaxpr, _ = _jaxprs.open_jaxpr(inner[0])
        if len(jaxpr.invars) == len(inputs) and len(jaxpr.outvars) == count:
            return inside(inner[0], inputs)
    asks = any(_names_axis(x, name) for x in inner)
    return [any(inputs) or asks or _jaxprs.has_side_effects(eqn)] * count


def _names_axis(closed: Any, name: Any) -> bool:
    """Whether an equation inside may give each worker another result for equal operands."""
    jaxpr, _ = _jaxprs.open_jaxpr(closed)
    return any(
        name in _jaxprs.axes_of(eqn) or any(_names_axis(x, name) for x in _jaxprs.jaxprs_in(eqn))
        for eqn in jaxpr.eqns
    )
