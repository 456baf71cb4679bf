"""What each array of a state is to the workers, written down again by the types of the states."""

import math
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state._wrappers import is_mask
from optax_ext._transforms._delayed import DelayedState
from optax_ext._transforms._local_steps import LocalStepsState
from optax_ext._transforms._multi_steps import MultiStepsState
from tests.fuzz.composed import LEAVES, Case


class Leaf(NamedTuple):
    """What an array of a state is to the workers."""

    role: str
    in_rounds: bool  # whether the mean over the workers counts, and not the sum


# The fields of a reduction that are not the same on all workers.
FIELDS = {
    **dict.fromkeys(("residual", "velocity", "dense_velocity", "missed"), "summed"),
    "local": "own",
    "owner": "new",
    "info": "new",
    "selector": "periodic",
    "allreduce": "periodic",
}
NODES = (
    *(SparseAllreduceState, LocalStepsState, MultiStepsState, DelayedState),
    optax.MultiStepsState,
)


REDUCTIONS = SparseAllreduceState | DenseState


def nodes(tree: Any, kinds: Any) -> list[Any]:
    """The outermost nodes of these types."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in leaves if isinstance(node, kinds)]


def sparse(tree: Any) -> list[SparseAllreduceState]:
    return nodes(tree, SparseAllreduceState)


def _names_in_rounds(tree: Any) -> set[str]:
    """The leaves that workers change on their own between exchanges."""
    found: set[str] = set()
    for node in nodes(tree, SparseAllreduceState | LocalStepsState):
        if isinstance(node, LocalStepsState):
            found |= names_of(node.moved)
        elif node.settings.every > 1:
            found |= names_of(jax.tree.unflatten(node.layout.treedef, node.layout.dense))
    return found


def names_of(tree: Any) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def roles(state: Any) -> list[Leaf]:
    """What each array of a state is, in the order of its leaves."""
    structure = jax.tree.structure(state)
    found = [Leaf("shared", False)] * structure.num_leaves

    def walk(tree: Any, leaf: Leaf) -> None:
        for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, NODES)):
            if not isinstance(node, NODES):
                found[node] = leaf
                continue
            fields: dict[str, str] = {}
            in_rounds = leaf.in_rounds
            if isinstance(node, SparseAllreduceState):
                fields, in_rounds = FIELDS, in_rounds or node.settings.every > 1
            elif isinstance(node, LocalStepsState):
                fields, in_rounds = {"missed": "summed", "moved": "moved", "inner": "own"}, True
            for name in node._fields:
                walk(getattr(node, name), Leaf(fields.get(name, leaf.role), in_rounds))
            if not fields and nodes(node, REDUCTIONS):
                # The exchanges inside take the accumulated gradients, leaf by leaf.
                names = _names_in_rounds(node.inner_opt_state)
                for path, number in jax.tree_util.tree_leaves_with_path(node.acc_grads):
                    within = jax.tree_util.keystr(path) in names
                    found[number] = Leaf("summed", in_rounds or within)

    walk(structure.unflatten(range(structure.num_leaves)), Leaf("shared", False))
    return found


def filled(case: Case, state: Any) -> Any:
    """The state with small integers of its own for each worker, and other numbers elsewhere."""
    rng = np.random.default_rng(case.seed)
    leaves, structure = jax.tree.flatten(state)
    dtypes = dict(zip(LEAVES, case.dtypes, strict=True))

    def fill(leaf: Any, known: Leaf) -> Any:
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        if known.role == "summed" or (known.role == "moved" and case.moving == "in a round"):
            # The sums of float16 accumulators stay finite.
            most = 1.0 if leaf.dtype == jnp.float16 else np.inf
            scale = min(case.scale, most) if floats else 1
            new = rng.integers(-9 if floats else 0, 9, leaf.shape) * scale
        elif known.role in ("own", "shared") and floats:
            new = rng.uniform(0.1, 1, leaf.shape)
        else:
            return leaf
        return jax.device_put(np.asarray(new).astype(leaf.dtype), leaf.sharding)

    state = structure.unflatten(map(fill, leaves, roles(state)))

    def without_padding(node: Any) -> Any:
        # A residual without entries has a column that stays 0.
        if not isinstance(node, SparseAllreduceState) or node.layout.size:
            return node
        return node._replace(residual=jnp.abs(0 * node.residual))

    is_sparse = lambda node: isinstance(node, SparseAllreduceState)  # noqa: E731
    state = jax.tree.map(without_padding, state, is_leaf=is_sparse)

    def within(node: Any) -> Any:
        if not isinstance(node, LocalStepsState):
            return node
        if case.moving == "in a round":
            return node._replace(count=jnp.ones_like(node.count))

        # At the end of a round narrow parameters leave an error, the same on every worker.
        def rounded(path: Any, leaf: Any) -> Any:
            if case.moving == "not" or dtypes[jax.tree_util.keystr(path)] == "float32":
                return leaf
            new = np.broadcast_to(2.0**-16 * rng.integers(-9, 9, leaf.shape[1:]), leaf.shape)
            return jax.device_put(new.astype(leaf.dtype), leaf.sharding)

        late = jax.tree.map(jnp.zeros_like, node.late)
        moved = jax.tree_util.tree_map_with_path(rounded, node.moved)
        return node._replace(count=jnp.zeros_like(node.count), moved=moved, late=late)

    return jax.tree.map(within, state, is_leaf=lambda node: isinstance(node, LocalStepsState))


def by_leaf(node: SparseAllreduceState) -> dict[str, np.ndarray]:
    """The residual as leaves ``f64[P, ...]`` by name."""
    layout, rows = node.layout, np.asarray(node.residual).astype(np.float64)
    numbers = layout.treedef.unflatten(range(len(layout.shapes)))
    found, start = {}, 0
    for path, i in jax.tree_util.tree_leaves_with_path(numbers):
        if not layout.dense[i]:
            stop = start + math.prod(layout.shapes[i])
            part = rows[:, start:stop].reshape(len(rows), *layout.shapes[i])
            found[jax.tree_util.keystr(path)] = part
            start = stop
    # Without entries there is one column.
    assert max(start, 1) == rows.shape[1]
    return found


def in_variables(state: Any) -> Any:
    """The state as ``nnx.Optimizer`` keeps it: each array and each mask in a variable."""
    return jax.tree.map(nnx.OptState, state, is_leaf=is_mask)


def named(tree: Any) -> dict[str, np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in pairs}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def check_says_what_to_do(error: BaseException) -> None:
    """It was raised by the library, in sentences."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    assert any(f"/{package}/" in last for package in ("optax_ext", "sparse_collectives")), error
    assert len(str(error)) > 60, error


def refused(function: Callable[[], Any], *kinds: type) -> str:
    """Checks that the library raises an error of its own; returns its text."""
    with pytest.raises(kinds or (ValueError, TypeError, NotImplementedError)) as found:
        function()
    check_says_what_to_do(found.value)
    return str(found.value)
