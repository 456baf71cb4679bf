"""Reads and annotates equations of a traced function: axes, effects, equations inside."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax


def jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation, alone or in tuples."""
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(x, "eqns"):
                found.append(x)
    return found


def open_jaxpr(x: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr, and the values of its constants."""
    return (x.jaxpr, x.consts) if hasattr(x, "consts") else (x, ())


def counts_of_scan(eqn: Any) -> tuple[int, int]:
    """How many operands of a ``scan`` are its constants, and how many are carried on."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # jax 0.12 has trees of the operands instead.
    constants, carry, *_ = (len(tree.vals) for tree in eqn.params["ft_in"].unpack())
    return constants, carry


def evaluated(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr."""
    from jax.extend import core  # Slow to import, and not needed by most programs.

    return core.jaxpr_as_fun(closed)(*arguments)


def is_variable(x: Any) -> bool:
    """Whether an operand or a result is a variable, and not a literal."""
    return not hasattr(x, "val")


# jax.checkpoint puts these around a computation that it repeats.
_SCOPES_OF_REMAT = ("checkpoint", "rematted_computation")


def named_scopes(eqn: Any) -> tuple[str, ...]:
    """The ``jax.named_scope`` names around an equation, from the start of its jaxpr."""
    stack = eqn.source_info.name_stack.stack
    # Its other entries are transformations: jvp, transpose, vmap.
    names = "/".join(part.name for part in stack if type(part).__name__ != "Transform")
    return tuple(name for name in names.split("/") if name and name not in _SCOPES_OF_REMAT)


def axes_of_effects(eqn: Any) -> set[Hashable]:
    """The mesh axes over which an equation, by its effects, synchronizes the workers."""
    return {effect.name for effect in eqn.effects if type(effect).__name__ == "NamedAxisEffect"}


def axes_of(eqn: Any) -> set[Hashable]:
    """The mesh axes of a collective, or of another equation that names axes; empty for the rest."""
    if eqn.primitive.name in ("pvary", "reduced_vary_cast_p"):
        return set()  # They change types only.
    found = axes_of_effects(eqn) if eqn.effects else set()  # Not every collective has one.
    for param in ("axes", "axis_name"):
        names = eqn.params.get(param, ())
        for name in names if isinstance(names, (tuple, frozenset)) else (names,):
            if not isinstance(name, int | None):  # Positions of dimensions are numbers.
                found.add(name)
    return found


def has_side_effects(eqn: Any) -> bool:
    """Whether an equation matters even if nothing uses its results."""
    return len(eqn.effects) > len(axes_of_effects(eqn))


def made_by(x: Any) -> Any:
    """The equation that computed a value of the function that is being traced.

    None for an argument, for a constant, and for anything that is not such a value. An equation has
    ``primitive``, ``params`` and ``invars``; the latter are values of the same kind.
    """
    return getattr(x, "parent", None)


def place_of(x: Any, eqn: Any) -> int | None:
    """The place of a value among the results of :func:`made_by`; None if JAX does not show it."""
    variable = getattr(x, "val", None)
    found = (i for i, out in enumerate(getattr(eqn, "outvars", ())) if out is variable)
    return next(found, None)


def captured(x: Any) -> Any:
    """The value outside of the function that is being traced for which ``x`` stands.

    There is one for an array, and for a value of an enclosing function that this function uses
    without receiving it. For an argument or a result of this function it is ``x`` itself.
    """
    lowered = getattr(x, "full_lower", None)
    try:
        return x if lowered is None else lowered()
    except NotImplementedError:
        return x  # A value of a shard_map that runs without jax.jit, equation by equation.


def annotated(x: jax.Array, fact: Hashable) -> jax.Array:
    """``x``, with a fact that :func:`fact_of` finds, in the function that is being traced."""
    return _annotated_primitive().bind(x, fact=fact)


def fact_of(x: Any) -> Any:
    """The fact that :func:`annotated` gave ``x``, or what ``x`` is cast from; None without one."""
    while (made := made_by(x)) is not None and len(made.invars) == 1:
        if made.primitive is _annotated_primitive():
            return made.params["fact"]
        (source,) = made.invars
        if source.shape != x.shape:
            return None
        x = source
    return None


@functools.cache
def _annotated_primitive() -> Any:
    return identity("annotated", lambda x, *, fact: x)


def identity(name: str, typed: Any) -> Any:
    """A primitive that returns its operand, and whose result has the type ``typed(x)``."""
    from jax.extend import core  # Slow to import, and only needed to trace.
    from jax.interpreters import batching, mlir

    primitive = core.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    batching.defvectorized(primitive)
    return primitive
