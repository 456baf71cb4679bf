"""Reads the collectives, conditionals and loops of a program from its jaxpr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from sparse_collectives import _compat
from sparse_collectives.traffic._collectives import collective_of
from sparse_collectives.traffic._traffic import Branches, Loop, Node, Scope, shown
from sparse_collectives.traffic._trip_count import constants_of, forwarded, trip_count

# These primitives run the one jaxpr among their parameters once.
_CALLS = {
    "checkpoint",
    "closed_call",
    "composite",
    "compute_on",
    "core_call",
    "core_closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
    "xla_pmap",
}


def read(jaxpr: Any) -> list[Node]:
    """The collectives, conditionals and loops of a closed jaxpr, in its order.

    Raises:
      ValueError: as :func:`collective_of`, or a primitive that is not known here
        holds collectives.
    """
    return list(_walk(jaxpr, (), {}, {}, None))


def _walk(
    closed: Any,
    scope: Scope,
    axes: Mapping[Any, int],
    arguments: Mapping[int, int],
    used: Sequence[bool] | None,
) -> Iterator[Node]:
    """The nodes of a jaxpr, with absolute scopes.

    ``scope`` is the scope of the equation that runs it, ``axes`` has the bound mesh axes and their
    sizes, ``arguments`` the constant arguments by position, and ``used`` says whether each result
    is used; None: all are.
    """
    jaxpr, constants = _compat.open_jaxpr(closed)
    known = constants_of(jaxpr, constants, arguments)
    for eqn, used_results in _live(jaxpr, used):
        here = scope + _compat.named_scopes(eqn)
        name, params = eqn.primitive.name, eqn.params

        def inside(jaxpr: Any, here: Scope = here) -> list[Node]:
            return list(_walk(jaxpr, here, axes, {}, None))

        if name == "cond":
            given = forwarded(eqn.invars[1:], known)
            branches = (_walk(x, here, axes, given, used_results) for x in params["branches"])
            yield Branches(here, [list(branch) for branch in branches])
        elif name == "while":
            condition, body = inside(params["cond_jaxpr"]), inside(params["body_jaxpr"])
            yield Loop(here, trip_count(eqn, known), condition, body)
        elif name == "scan":
            yield Loop(here, params["length"], [], inside(params["jaxpr"]))
        elif name in _CALLS:
            inner = {**axes, **_bound_by(eqn)}
            known_arguments = forwarded(eqn.invars, known)
            yield from _walk(_called(eqn), here, inner, known_arguments, used_results)
        else:
            for unknown in _compat.jaxprs_in(eqn):
                if inside(unknown):
                    raise ValueError(
                        f"the program holds a {name} in scope {shown(here)} with collectives in"
                        f" it, and the meter can't count how often that primitive of jax"
                        f" {jax.__version__} runs them; measure a program without it."
                    )
            collective = collective_of(eqn, axes, here)
            if collective is not None:
                yield collective


def _called(eqn) -> Any:
    """The one jaxpr that a call runs."""
    found = _compat.jaxprs_in(eqn)
    if len(found) != 1:
        raise ValueError(
            f"cannot read the primitive {eqn.primitive.name} of jax {jax.__version__}: it has"
            f" {len(found)} jaxprs among its parameters {sorted(eqn.params)}, and not one."
        )
    return found[0]


def _bound_by(eqn) -> dict[Any, int]:
    """The mesh axes that a mapped function binds, and their sizes."""
    if eqn.primitive.name == "shard_map":
        return dict(eqn.params["mesh"].shape)
    if eqn.primitive.name == "xla_pmap":
        return {eqn.params["axis_name"]: eqn.params["global_axis_size"]}
    return {}


def _live(jaxpr, used: Sequence[bool] | None) -> list[tuple[Any, list[bool]]]:
    """The equations that matter, each with a flag for every result: whether it is used.

    Lowering leaves out the others: their results are unused, and they have no effect
    except that they run on the workers of an axis.
    """
    results = zip(jaxpr.outvars, used or [True] * len(jaxpr.outvars))
    live = {variable for variable, is_used in results if is_used and _compat.is_variable(variable)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        used_results = [variable in live for variable in eqn.outvars]
        if any(used_results) or _compat.has_side_effects(eqn):
            live.update(variable for variable in eqn.invars if _compat.is_variable(variable))
            found.append((eqn, used_results))
    return found[::-1]
