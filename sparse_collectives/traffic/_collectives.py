"""Which primitives of jax are collectives, and the words that each moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from sparse_collectives import _jaxprs
from sparse_collectives.traffic._traffic import CollectiveTraffic, Scope, shown
from sparse_collectives.transport import _dispatch

# By the primitive's name; `check_vma=True` turns them into `psum_invariant` and the like.
_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "unreduced_psum": "all_reduce",
    "unreduced_pmax": "all_reduce",
    "unreduced_pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "ppermute": "collective_permute",
    "pbroadcast": "collective_broadcast",
}
_VOLUMES = {
    "all_reduce": _dispatch.words_of_all_reduce,
    "all_gather": _dispatch.words_of_all_gather,
    "all_to_all": _dispatch.words_of_all_to_all,
    "reduce_scatter": _dispatch.words_of_reduce_scatter,
    "collective_broadcast": _dispatch.words_of_broadcast,
}
# These primitives name an axis but move nothing.
_FREE = {
    "axis_index",
    "preduced",
    "pvary",
    "reduced_vary_cast",
    "to_invarying",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
}


def collective_of(eqn: Any, axes: Mapping[Any, int], scope: Scope) -> CollectiveTraffic | None:
    """The collective that an equation is, executed once; None if it is none.

    ``axes`` has the sizes of the mesh axes that are bound around it.

    Raises:
      ValueError: a collective that is not in the table above, or one whose volume depends on data.
      ValueError: an exchange over MPI.
      ValueError: an axis that is not bound.
    """
    name = eqn.primitive.name
    # If a pair starts and awaits an exchange, the start holds all that matters.
    kind = _KINDS.get(name.removesuffix("_start"))
    if kind is not None:
        return _measured(eqn, kind, axes, scope)
    if name.endswith("_mpi"):
        raise ValueError(
            f"the program holds a {name} in scope {shown(scope)}: an exchange over MPI, whose"
            " size this can't read; measure the same program over the axis of a mesh, where as"
            " many words are received."
        )
    if name == "ragged_all_to_all":
        raise ValueError(
            f"the program holds a {name} in scope {shown(scope)}, whose volume depends on data;"
            " measure a program with `all_to_all`."
        )
    over = _named(eqn, axes)
    if over and name not in _FREE and name.removesuffix("_done") not in _KINDS:
        raise ValueError(
            f"the program holds a {name} over {over} in scope {shown(scope)}: a collective of jax"
            f" {jax.__version__} whose words the meter can't count; measure a program that"
            " exchanges by psum, all_gather, all_to_all, psum_scatter or ppermute."
        )
    return None


def _measured(eqn, kind: str, axes: Mapping[Any, int], scope: Scope) -> CollectiveTraffic:
    params = eqn.params
    over = params["axes"] if "axes" in params else params["axis_name"]
    over = over if isinstance(over, (tuple, list)) else (over,)
    # A number is a dimension of the operand, which is summed locally.
    names = [name for name in over if not isinstance(name, int)]
    unbound = [name for name in names if name not in axes]
    if unbound:
        raise ValueError(
            f"the program holds a {eqn.primitive.name} over {unbound} in scope {shown(scope)},"
            f" outside of a `shard_map` or `pmap` over it; bound are {list(axes)}."
        )
    workers = math.prod(axes[name] for name in names)
    dimensions = [axis for axis in over if isinstance(axis, int)]
    words = sum(_words(variable.aval, dimensions) for variable in eqn.invars)
    if kind == "collective_permute":
        received, group = _dispatch.words_of_ppermute(words, workers, params["perm"]), workers
    else:
        groups = params.get("axis_index_groups")
        sizes = [len(group) for group in groups] if groups else [workers]
        # With groups of several sizes: the mean over workers.
        received = sum(_VOLUMES[kind](words, size) * size for size in sizes) / sum(sizes)
        group = max(sizes)
    return CollectiveTraffic(kind, "/".join(scope), received, 1.0, group, tuple(names))


def _words(aval, dimensions) -> float:
    """Words of an operand; booleans and integers narrower than a byte take a byte each."""
    kept = [size for axis, size in enumerate(aval.shape) if axis not in dimensions]
    return math.prod(kept) * aval.dtype.itemsize / 4


def _named(eqn, axes: Mapping[Any, int]) -> list[Any]:
    """The bound axes that a parameter or an effect of `eqn` names."""
    # The effects of an equation with jaxprs are the effects of its jaxprs.
    found = set() if _jaxprs.jaxprs_in(eqn) else _jaxprs.axes_of_effects(eqn)
    for key, value in eqn.params.items():
        if "axis" in key or "axes" in key:
            several = isinstance(value, (tuple, list, set, frozenset))
            found.update(value if several else [value])
    return [name for name in axes if name in found]
