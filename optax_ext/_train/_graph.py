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
    """The structure of some modules, which is static: ``nnx.GraphDef``, and where its arrays are.

    A variable at several places of a tree is at the first of them.
    """

    structure: Any
    paths: tuple[Any, ...]


def around(tree: Any) -> Any:
    """The context of a call with this argument: of its graph before, of the step, and of after."""
    return _nnx.nnx().update_context(_TAG) if _nodes(tree) else contextlib.nullcontext()


def of_arguments(kept: Any) -> Graph | None:
    """The graph of the arguments, outside of the step; None if they have no modules."""
    return _split(nodes) if (nodes := _nodes(kept)) else None


def inside(kept: Any, graph: Graph | None) -> tuple[Any, list[Any]]:
    """The arguments in the step, as the graph connects them, and their modules."""
    if graph is None:
        return kept, []
    nodes = _merged(_nodes(kept), graph, inner=True)
    return _with_nodes(kept, nodes), nodes


def of_results(nodes: list[Any], results: Any) -> Graph | None:
    """The graph of the modules of the arguments, and of the results, at the end of the step."""
    found = _nodes(results)
    return _split((nodes, found)) if nodes or found else None


def outside(nodes: list[Any], results: Any, graph: Graph | None) -> Any:
    """The results, after the caller's modules have become as the step has left their copies.

    Args:
      nodes: these copies, the first argument of :func:`of_results`.
      results: the second one; a module in it that the caller has is the caller's.
      graph: what it returned.
    """
    if graph is None:
        return results
    _, found = _merged((nodes, _nodes(results)), graph, inner=False)
    return _with_nodes(results, found)


def _split(nodes: Any) -> Graph:
    nnx = _nnx.nnx()
    with nnx.split_context(_TAG) as context:
        structure, state = context.split(nodes)
    return Graph(structure, tuple(path for path, _ in nnx.to_flat_state(state)))


def _merged(nodes: Any, graph: Graph, inner: bool) -> Any:
    nnx = _nnx.nnx()
    flat = dict(nnx.to_flat_state(nnx.state(nodes)))
    state = nnx.from_flat_state({path: flat[path] for path in graph.paths})
    with nnx.merge_context(_TAG, inner=inner) as context:
        return context.merge(graph.structure, state)


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
