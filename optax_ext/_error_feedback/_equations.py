"""Reads traced equations: what a value was made from, and whether workers may differ in it.

Types of JAX say the latter under ``shard_map(check_vma=True)``, but there a loop that starts from
zeros and goes on with values of one worker is an error, and with it much that was written for one
device.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.core import Tracer

from sparse_collectives import AxisName, _axes, _jaxprs, _varying, transport

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

# What a result of an equation may be made from. Each operand also has a bit.
_DIFFERS = 1  # Something that each worker has in its own way, such as its number.
_SUMMED = 2  # A reduction over all workers.
_FIRST = 2  # The place of the bit of the first operand.


def is_reduced(values: Iterable[Any], axis: AxisName) -> bool:
    """Whether the values are proven to be summed or gathered over the workers of ``axis``.

    Every path back from them ends in a reduction over ``axis`` or in a constant, and at least one
    in a reduction. If ``axis`` has several names, a reduction over one of them is enough.
    """
    if _axes.is_communicator(axis):
        # Equations of JAX name no communicator.
        return False
    values = list(values)
    proofs = [_Proof(name, typed=False) for name in _axes.axis_names(axis)]
    return any(all(map(proof.is_common, values)) and proof.summed for proof in proofs)


def depends_on(values: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether any of the values was made from one of the sources, or is one."""
    wanted = {id(x) for x in map(_jaxprs.captured, sources) if isinstance(x, Tracer)}
    return any(id(x) in wanted for x in _made_from(values))


def arguments_of(values: Iterable[Any]) -> list[Any]:
    """The arguments of the traced function that the values were made from."""
    return [x for x in _made_from(values) if _jaxprs.made_by(x) is None]


def _made_from(values: Iterable[Any]) -> Iterator[Any]:
    """Everything that the values were made from, and they themselves; each once."""
    seen: dict[int, Any] = {}
    stack = [_jaxprs.captured(x) for x in values]
    while stack:
        x = stack.pop()
        if not isinstance(x, Tracer) or id(x) in seen:
            continue
        seen[id(x)] = x  # Kept, so that no other value gets its id.
        yield x
        if (eqn := _jaxprs.made_by(x)) is not None:
            stack.extend(map(_jaxprs.captured, eqn.invars))


def common_among(axis: AxisName) -> Callable[[Any], bool]:
    """A function that says whether a value is the same on all workers, whatever its type says.

    Every path back from it ends in a constant, in a reduction, or in a value that is typed as the
    same: zeros in the type of a gradient, for example. A result of a branch or a loop depends on
    those operands only from which it is made.

    Calls share what they prove, since many leaves depend on the same values.
    After a call that returns False the function has no meaning.
    """
    proofs = [_Proof(name, typed=True) for name in _axes.axis_names(axis)]
    return lambda value: all(proof.is_common(value) for proof in proofs)


class _Proof:
    """The values that are known to be the same along an axis of that name.

    Attributes:
      summed: whether one of them is a reduction, or made from one.
    """

    def __init__(self, name: Any, *, typed: bool):
        self.name = name
        self.typed = typed
        self.summed = False
        self.seen: dict[int, Any] = {}
        # For each equation, what each of its results is made from.
        self.results: dict[int, list[int]] = {}

    def is_common(self, value: Any) -> bool:
        stack = [_jaxprs.captured(value)]
        while stack:
            x = stack.pop()
            if not isinstance(x, Tracer) or id(x) in self.seen:
                continue  # A constant is the same everywhere.
            if self.typed and self.name not in _varying.varying_axes(x):
                continue
            self.seen[id(x)] = x  # Kept, so that no other value gets its id.
            eqn = _jaxprs.made_by(x)
            if eqn is None:
                return False  # An argument.
            made_from = self._made_from(x, eqn)
            if made_from & _DIFFERS:
                return False
            self.summed |= bool(made_from & _SUMMED)
            for place, operand in enumerate(eqn.invars):
                if made_from >> (_FIRST + place) & 1:
                    stack.append(_jaxprs.captured(operand))
        return True

    def _made_from(self, value: Any, eqn: Any) -> int:
        if id(eqn) not in self.results:
            operands = [1 << (_FIRST + place) for place in range(len(eqn.invars))]
            self.results[id(eqn)] = _results(eqn, operands, self.name)
        place, results = _jaxprs.place_of(value, eqn), self.results[id(eqn)]
        return _union(results) if place is None else results[place]


def varying(closed: Any, inputs: Sequence[bool], axis: AxisName) -> list[bool]:
    """Which results of a traced function may differ between the workers of ``axis``.

    A result may differ if it is made from a value that may, and not by a sum or gather over all
    workers, which is the rule of the types of JAX. Loops and branches are followed.

    Args:
      closed: the function, as from ``jax.make_jaxpr``.
      inputs: for each argument, whether it may differ.
      axis: the axis, or several.
    """
    # One worker does not differ from others, and exchanges nothing that could show it.
    names = [name for name in _axes.axis_names(axis) if transport.axis_size(name) > 1]
    if not names:
        return [False] * len(_jaxprs.open_jaxpr(closed)[0].outvars)
    found = [_inside(closed, list(map(int, inputs)), name) for name in names]
    return [bool(_union(each) & _DIFFERS) for each in zip(*found, strict=True)]


def _union(of_each: Iterable[int]) -> int:
    return functools.reduce(operator.or_, of_each, 0)


def _inside(closed: Any, inputs: list[int], name: Any) -> list[int]:
    """What each result of a jaxpr is made from, for inputs that are made from something."""
    jaxpr, constants = _jaxprs.open_jaxpr(closed)
    of_constants = [_DIFFERS if isinstance(x, Tracer) else 0 for x in constants]
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*of_constants, *inputs), strict=True))
    for eqn in jaxpr.eqns:
        operands = [0 if hasattr(x, "val") else known[x] for x in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, operands, name), strict=True))
    return [0 if hasattr(x, "val") else known[x] for x in jaxpr.outvars]


def _results(eqn: Any, inputs: list[int], name: Any) -> list[int]:
    """What each result of an equation is made from, for operands that are made from something."""
    inner, params, count = _jaxprs.jaxprs_in(eqn), eqn.params, len(eqn.outvars)
    if not inner and name in _jaxprs.axes_of(eqn):
        whole = params.get("axis_index_groups") is None
        return [_SUMMED if eqn.primitive.name in _REDUCTIONS and whole else _DIFFERS] * count
    if eqn.primitive.name == "scan":
        fixed, carried = _jaxprs.counts_of_scan(eqn)
        end = fixed + carried
        results = _loop(params["jaxpr"], inputs[:fixed], inputs[fixed:end], inputs[end:], name)
        # Without a turn, the carried values are those at the start.
        begin = [*inputs[fixed:end], *[0] * (count - end + fixed)]
        return [a | b for a, b in zip(begin, results, strict=True)]
    if eqn.primitive.name == "while":
        first = params["cond_nconsts"]
        fixed = first + params["body_nconsts"]
        turned = _loop(params["body_jaxpr"], inputs[first:fixed], inputs[fixed:], [], name)
        results = [a | b for a, b in zip(inputs[fixed:], turned, strict=True)]
        end = _union(_inside(params["cond_jaxpr"], [*inputs[:first], *results], name))
        return [end | x for x in results]
    if eqn.primitive.name == "cond":
        branches = [_inside(branch, inputs[1:], name) for branch in params["branches"]]
        return [inputs[0] | _union(each) for each in zip(*branches, strict=True)]
    if len(inner) == 1:
        jaxpr, _ = _jaxprs.open_jaxpr(inner[0])
        if len(jaxpr.invars) == len(inputs) and len(jaxpr.outvars) == count:
            return _inside(inner[0], inputs, name)
    asks = inner and any(_names_axis(x, name) for x in inner)
    asks = asks or (eqn.effects and _jaxprs.has_side_effects(eqn))
    return [_union(inputs) | (_DIFFERS if asks else 0)] * count


def _loop(closed: Any, fixed: list[int], carry: list[int], more: list[int], name: Any) -> list[int]:
    """What the results of a body are made from whose first results are carried on."""
    while True:
        results = _inside(closed, [*fixed, *carry, *more], name)
        joined = [a | b for a, b in zip(carry, results, strict=False)]
        if joined == carry:
            return results
        carry = joined


def _names_axis(closed: Any, name: Any) -> bool:
    """Whether an equation inside may give each worker another result for equal operands."""
    jaxpr, _ = _jaxprs.open_jaxpr(closed)
    return any(
        name in _jaxprs.axes_of(eqn) or any(_names_axis(x, name) for x in _jaxprs.jaxprs_in(eqn))
        for eqn in jaxpr.eqns
    )
