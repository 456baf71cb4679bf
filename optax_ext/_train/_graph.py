"""Modules of flax nnx in the arguments and results of a step: one graph, as under ``nnx.jit``.

A pytree has a copy of a variable at each of its places. The graph has it once, with the references
and the static attributes of the modules, so that a step changes what the caller holds.
"""

import contextlib
from typing import Any, NamedTuple

import jax

from optax_ext._state import _nnx

_TAG = "optax_ext.data_parallel"


class Graph(NamedTuple):
    """The structure of some modules, and where its arrays are.

    Attributes:
      structure: the ``nnx.GraphDef``, which is static.
      state: the ``nnx.State``, with a variable at several places at the first of them.
    """

    structure: Any
    state: Any


def around(tree: Any) -> Any:
    """The context of a call with this argument: of its graph before, of the step, and of after."""
    return _nnx.nnx().update_context(_TAG) if _nodes(tree) else contextlib.nullcontext()


def of_arguments(kept: Any) -> Graph | None:
    """The graph of the arguments, outside of the step; None if they have no modules."""
    return _split(nodes) if (nodes := _nodes(kept)) else None


def without_arrays(graph: Graph | None) -> Graph | None:
    """The graph with the paths of its variables only."""
    return graph and Graph(
        graph.structure, [path for path, _ in _nnx.nnx().to_flat_state(graph.state)]
    )


def inside(kept: Any, graph: Graph | None) -> tuple[Any, list[Any]]:
    """The arguments in the step, as the graph connects them, and their modules."""
    if graph is None:
        return kept, []
    nnx, nodes = _nnx.nnx(), _nodes(kept)
    flat = dict(nnx.to_flat_state(nnx.state(nodes)))
    state = nnx.from_flat_state({path: flat[path] for path in graph.state})
    nodes = _merged(Graph(graph.structure, state), inner=True)
    return _with_nodes(kept, nodes), nodes


def of_results(returned: Any, nodes: list[Any]) -> Graph | None:
    """The graph of the modules of the arguments, and of the results, at the end of the step.

    Its arrays are numbers: their positions among the leaves of ``(returned, nodes)``.
    """
    found = _nodes(returned)
    if not nodes and not found:
        return None
    at = {id(x): i for i, x in enumerate(jax.tree.leaves((returned, nodes)))}
    structure, state = _split((nodes, found))
    leaves, treedef = jax.tree.flatten(state)
    return Graph(structure, (treedef, [at[id(x)] for x in leaves]))


def outside(returned: Any, leaves: list[Any], graph: Graph | None) -> Any:
    """The results, after the caller's modules have become as the step has left their copies.

    Args:
      returned: the results; a module in them that the caller has is the caller's.
      leaves: all leaves, of the results and of the copies.
      graph: the result of :func:`of_results`.
    """
    if graph is None:
        return returned
    treedef, at = graph.state
    _, found = _merged(
        Graph(graph.structure, treedef.unflatten([leaves[i] for i in at])), inner=False
    )
    return _with_nodes(returned, found)


def _split(nodes: Any) -> Graph:
    with _nnx.nnx().split_context(_TAG) as context:
        return Graph(*context.split(nodes))


def _merged(graph: Graph, inner: bool) -> Any:
    with _nnx.nnx().merge_context(_TAG, inner=inner) as context:
        return context.merge(*graph)


def _nodes(tree: Any) -> list[Any]:
    found = filter(_is_node, jax.tree.leaves(tree, is_leaf=_is_leaf))
    return list(found)


def _with_nodes(tree: Any, nodes: list[Any]) -> Any:
    left = iter(nodes)
    return jax.tree.map(lambda x: next(left) if _is_node(x) else x, tree, is_leaf=_is_leaf)


def _is_node(x: Any) -> bool:
    return _nnx.is_module(x) or _nnx.is_variable(x)


def _is_leaf(x: Any) -> bool:
    # A State is a value, of which the program returns a new one.
    return _is_node(x) or isinstance(x, getattr(_nnx.nnx(), "State", ()))
