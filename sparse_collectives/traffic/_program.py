"""Reads the collectives of a program from its jaxpr, through its calls, branches and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from sparse_collectives import _jaxprs
from sparse_collectives.traffic._collectives import collective_of
from sparse_collectives.traffic._traffic import CollectiveTraffic, Scope, shown
from sparse_collectives.traffic._trip_count import constants_of, forwarded, trip_count
from sparse_collectives.traffic._weights import Weights, scaled

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


class _Place(NamedTuple):
    """The surroundings of a jaxpr: scopes, and the bound mesh axes with their sizes."""

    weights: Weights
    scope: Scope = ()
    conditional: Scope = ()
    loop: Scope = ()
    axes: Mapping[Any, int] = {}


def read(jaxpr: Any, weights: Weights) -> list[CollectiveTraffic]:
    """The collectives of a closed jaxpr with their weights, in its order.

    Raises:
      ValueError: as :func:`collective_of`, or a primitive that is not known here
        holds collectives.
    """
    return _rows(jaxpr, _Place(weights))


def _rows(
    closed: Any,
    place: _Place,
    arguments: Mapping[int, int] = {},
    used: Sequence[bool] | None = None,
) -> list[CollectiveTraffic]:
    """The collectives of a jaxpr, weighted per execution of it.

    ``arguments`` has its constant arguments by position, and ``used`` says whether each result is
    used; None: all are.
    """
    jaxpr, constants = _jaxprs.open_jaxpr(closed)
    known = constants_of(jaxpr, constants, arguments)
    rows: list[CollectiveTraffic] = []
    for eqn, used_results in _live(jaxpr, used):
        scope = place.scope + _jaxprs.named_scopes(eqn)
        here = place._replace(scope=scope)
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            given, inside = forwarded(eqn.invars[1:], known), here._replace(conditional=scope)
            branches = [_rows(x, inside, given, used_results) for x in params["branches"]]
            weights = place.weights.of_branches(scope, place.conditional, branches)
            for branch, weight in zip(branches, weights, strict=True):
                rows += scaled(branch, weight)
        elif name in ("while", "scan"):
            trips = trip_count(eqn, known) if name == "while" else params["length"]
            condition, body = (
                _rows(params[part], here._replace(loop=scope)) if part in params else []
                for part in ("cond_jaxpr", "body_jaxpr" if name == "while" else "jaxpr")
            )
            has_collectives = bool(condition or body)
            trips = place.weights.of_loop(scope, place.loop, trips, has_collectives)
            # The condition is evaluated once more, to end the loop.
            rows += scaled(condition, trips + 1) + scaled(body, trips)
        elif name in _CALLS:
            inside = here._replace(axes={**place.axes, **_bound_by(eqn)})
            rows += _rows(_called(eqn), inside, forwarded(eqn.invars, known), used_results)
        else:
            if any(_has_collectives(inner, here) for inner in _jaxprs.jaxprs_in(eqn)):
                raise ValueError(
                    f"the program holds a {name} in scope {shown(scope)} with collectives in"
                    f" it, and the meter can't count how often that primitive of jax"
                    f" {jax.__version__} runs them; measure a program without it."
                )
            collective = collective_of(eqn, place.axes, scope)
            if collective is not None:
                rows.append(collective)
    return rows


def _has_collectives(jaxpr: Any, place: _Place) -> bool:
    return any(
        collective_of(eqn, place.axes, place.scope) is not None
        or any(_has_collectives(inner, place) for inner in _jaxprs.jaxprs_in(eqn))
        for eqn in _jaxprs.open_jaxpr(jaxpr)[0].eqns
    )


def _called(eqn) -> Any:
    """The one jaxpr that a call runs."""
    found = _jaxprs.jaxprs_in(eqn)
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
    live = {variable for variable, is_used in results if is_used and _jaxprs.is_variable(variable)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        used_results = [variable in live for variable in eqn.outvars]
        if any(used_results) or _jaxprs.has_side_effects(eqn):
            live.update(variable for variable in eqn.invars if _jaxprs.is_variable(variable))
            found.append((eqn, used_results))
    return found[::-1]
