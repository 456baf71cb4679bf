"""Other workers and the end of a training, for optimizers composed in any way.

States of drawn compositions go through `reshard`, `flush` and `consolidate`. Most are filled with
numbers, since no step has to be compiled for them; some are trained. What an array is to the
workers is written down here again, by the types of the states.
"""

import dataclasses
import functools
import math
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._transforms._delayed import DelayedState
from optax_ext._transforms._local_steps import LocalStepsState
from optax_ext._transforms._multi_steps import MultiStepsState
from tests.fuzz.configurations import SEEDS
from tests.fuzz.test_fuzz import PARTS, _settings
from tests.optax_ext.helpers import bits, mesh

FILLED, OTHER, TRAINED = 30, 15, 3  # examples
STEPS, ROUND, AXIS = 4, 2, "data"
WORKERS = (4, 2, 3, 1, 8)
LEAVES = ("['body']['bias']", "['body']['kernel']", "['head']", "['scale']")
SHAPES = ((7,), (5, 4), (4, 5), (), (1,), (2, 1, 3), (1, 1), (0,))
DTYPES = ("float32", "float32", "bfloat16", "float16")
# Half a unit in the last place, as a share of the number.
HALF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# A float16 below this has a fixed spacing.
SMALLEST = 2.0**-24


def _sgd(**options: Any) -> Any:
    return optax_ext.sparse_sgd(0.1, axis=AXIS, density=0.3, **options)


def _adamw(**options: Any) -> Any:
    return optax_ext.sparse_adamw(0.03, axis=AXIS, density=0.3, **options)


def _injected(make: Any, **options: Any) -> Any:
    static = ("density", "every")
    made = optax.inject_hyperparams(make, static_args=static, hyperparam_dtype=jnp.float32)
    return made(learning_rate=0.05, axis=AXIS, **options)


def _local(inner: Any, outer: Any, **options: Any) -> Any:
    return optax_ext.local_steps(inner, outer, every=ROUND, **options)


RESIDUAL = optax_ext.residual
SMALL = optax_ext.small_leaves(min_size=6)
CORRECTION = optax_ext.momentum_correction(0.9)
# Residuals that are updates and looked ahead to, which `flush` applies.
AHEAD: dict[str, Callable[[], Any]] = {
    "sparse_sgd": _sgd,
    "sparse_adamw": lambda: _adamw(weight_decay=0.1),
    "sparse_adamw, factors": lambda: _adamw(moments="factors", limit=None),
    "sparse_sgd, bfloat16": lambda: _sgd(residual=RESIDUAL(jnp.bfloat16, step_ahead=1.0)),
    "sparse_sgd, twice ahead": lambda: _sgd(residual=RESIDUAL(step_ahead=2.0)),
    "sparse_sgd, correction": lambda: _sgd(correction=CORRECTION, dense_leaves=SMALL),
    "sparse_sgd, dense at first": lambda: _sgd(dense_steps=1, nonfinite="drop"),
    "sparse_sgd, ok_topk": lambda: _sgd(allreduce=sc.allreduce.ok_topk(density=0.3)),
    "sparse_sgd, every": lambda: _sgd(every=3),
    "sparse_adamw, every": lambda: _adamw(every=ROUND, weight_decay=0.1),
    "sparse_optimizer": lambda: optax_ext.sparse_optimizer(
        optax.scale_by_rms(), 0.03, axis=AXIS, density=0.3, every=3
    ),
    "injected sparse_adamw": lambda: _injected(optax_ext.sparse_adamw, density=0.3),
    "injected sparse_sgd": lambda: _injected(optax_ext.sparse_sgd, density=0.3, every=3),
    "bucketed sparse_sgd": lambda: optax_ext.bucketed(_sgd(), 2),
    "quantized ahead": lambda: optax_ext.quantized(
        axis=AXIS, local=optax.scale(-0.1), residual=RESIDUAL(step_ahead=1.0)
    ),
    "local_steps, sparse": lambda: _local(optax.adam(0.03), _sgd()),
}
# Residuals that `flush` refuses, or none.
OTHERS: dict[str, Callable[[], Any]] = {
    "ok_topk_sgd": lambda: optax_ext.ok_topk_sgd(0.1, density=0.3, axis=AXIS),
    "ok_topk, adam": lambda: optax.chain(optax_ext.ok_topk(0.3, axis=AXIS), optax.adam(0.03)),
    "topk_a, MultiSteps": lambda: optax.chain(
        optax_ext.topk_a(0.3, axis=AXIS, residual=RESIDUAL(jnp.bfloat16)),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    ),
    "bucketed, if finite": lambda: optax.chain(
        optax_ext.bucketed(optax_ext.topk_a(0.3, axis=AXIS), 2),
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    ),
    "quantized, lion": lambda: optax.chain(optax_ext.quantized(axis=AXIS), optax.lion(0.01)),
    "powersgd, ema": lambda: optax.chain(
        optax_ext.powersgd(1, axis=AXIS), optax.ema(0.9), optax.sgd(0.1)
    ),
    "measured, adam": lambda: optax.chain(
        optax_ext.measure_xi(optax_ext.topk_a(0.3, axis=AXIS), axis=AXIS, every=2),
        optax.adam(0.03),
    ),
    "delayed inside": lambda: optax.chain(
        optax_ext.delayed(optax_ext.topk_a(0.3, axis=AXIS)), optax.sgd(0.1)
    ),
    "dense, adam": lambda: optax.chain(optax_ext.dense(axis=AXIS), optax.adam(0.03)),
    "dense, sgd": lambda: optax.chain(optax_ext.dense(axis=AXIS), optax.sgd(0.1)),
    "local_steps, dense": lambda: _local(
        optax.sgd(0.1), optax.chain(optax_ext.dense(axis=AXIS), optax.sgd(1.0))
    ),
    "diloco": lambda: optax_ext.published.diloco(optax.adam(0.03), axis=AXIS, every=ROUND),
    "sparse_loco": lambda: optax_ext.published.sparse_loco(
        optax.adam(0.03), density=0.3, axis=AXIS, every=ROUND
    ),
    "streaming": lambda: optax_ext.published.streaming_diloco(
        optax.sgd(0.1, momentum=0.9), axis=AXIS, every=2 * ROUND, fragments=1, delay=1
    ),
}
BEFORE: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.clip(3.0),
    "clip norm": lambda: optax_ext.local_clip_by_global_norm(9.0, axis=AXIS),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "scale": lambda: optax.scale(0.5),
}
# `flush` would leave them out, and refuses.
AFTER: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.clip(3.0),
    "ema": lambda: optax.ema(0.9, debias=False),
    "if finite": lambda: optax.apply_if_finite(optax.identity(), 3),
    "nothing": optax.identity,
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "multi_steps": lambda tx: optax_ext.multi_steps(tx, 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "delayed": optax_ext.delayed,
    "chain": optax.chain,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


class Composed(NamedTuple):
    """A transformation, and what it refuses, as functions of the shapes of its leaves by name."""

    text: str
    tx: Any
    starts: Callable[[dict], bool] = lambda leaves: True  # whether there can be a state
    # The leaves whose updates something else would change before they are applied.
    follows: Callable[[dict], frozenset] = lambda leaves: frozenset()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Case:
    """A composition and its parameters, the workers before and after, and the steps in between."""

    of: Composed
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    workers: tuple[int, int]
    steps: int
    moving: str  # how far workers have moved in a round of local steps
    scale: float  # a power of two, of the numbers that fill a state
    seed: int

    @property
    def leaves(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(LEAVES, self.shapes, strict=True))

    def params(self) -> Any:
        rng = np.random.default_rng(self.seed)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        made = [jnp.asarray(rng.uniform(0.5, 2, shape), dtype) for shape, dtype in pairs]
        bias, kernel, head, scale = made
        return {"body": {"bias": bias, "kernel": kernel}, "head": head, "scale": scale}

    def batch(self, workers: int, step: int) -> list[np.ndarray]:
        """The gradients of all workers, a leaf ``[P, ...]`` for each parameter."""
        rng = np.random.default_rng((self.seed, step))
        return [rng.standard_normal((workers, *s)).astype(np.float32) for s in self.shapes]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        return (
            f"{self.of.text}, {self.shapes}, {self.dtypes}, workers={self.workers}, "
            f"steps={self.steps}, moving={self.moving}, scale={self.scale}, seed={self.seed}"
        )


def _within(leaves: dict, names: frozenset) -> dict:
    return {name: shape for name, shape in leaves.items() if name in names}


def _by_name(names: frozenset, there: Any, elsewhere: Any) -> Callable[[Any], Any]:
    """A function of a tree that labels leaves by their names."""

    def labels(tree: Any) -> Any:
        def one(path: Any, _: Any) -> Any:
            return there if jax.tree_util.keystr(path) in names else elsewhere

        return jax.tree_util.tree_map_with_path(one, tree)

    return labels


@st.composite
def exchanges(draw: Any) -> Composed:
    name = draw(st.sampled_from((*AHEAD, *OTHERS)))
    made = (AHEAD | OTHERS)[name]()
    return Composed(name, made)


def _partition(draw: Any, inner: Composed) -> Composed:
    """Groups of leaves, of which some may have no leaves."""
    names = frozenset(name for name in LEAVES if draw(st.booleans()))
    frozen = Composed("frozen", optax.set_to_zero())
    other = draw(st.one_of(st.just(frozen), exchanges()))
    groups, text = {"a": inner.tx, "b": other.tx}, f"partition(a={inner.text}, b={other.text}"
    if draw(st.booleans()):
        unused = draw(exchanges())
        groups, text = {**groups, "unused": unused.tx}, f"{text}, unused={unused.text}"
    return Composed(
        f"{text}, a={sorted(names)})",
        optax.partition(groups, _by_name(names, "a", "b")),
        lambda leaves: inner.starts(_within(leaves, names)),
        lambda leaves: inner.follows(_within(leaves, names)),
    )


def _masked(draw: Any, inner: Composed) -> Composed:
    """Zeros for some of the leaves, and the others after it."""
    names = frozenset(name for name in LEAVES if draw(st.booleans()))
    zeros = optax.masked(optax.set_to_zero(), _by_name(names, False, True))
    return Composed(
        f"masked({inner.text}, {sorted(names)})",
        optax.chain(zeros, optax.masked(inner.tx, _by_name(names, True, False))),
        lambda leaves: inner.starts(_within(leaves, names)),
        lambda leaves: inner.follows(_within(leaves, names)),
    )


def _in_chain(draw: Any, inner: Composed) -> Composed:
    """Something before it, or after it, in a chain that may be named."""
    which = draw(
        st.sampled_from(("before", "before", "named", "named, masked", "named alone", "after"))
    )
    if which == "after":
        name = draw(st.sampled_from(tuple(AFTER)))
        text, tx = f"chain({inner.text}, {name})", optax.chain(inner.tx, AFTER[name]())
    elif which == "named alone":
        text, tx = f"named({inner.text})", optax.named_chain(("x", inner.tx))
    else:
        name = draw(st.sampled_from(tuple(BEFORE)))
        text, first = f"{which}({name}, {inner.text})", BEFORE[name]()
        if which.startswith("named"):
            parts = first, inner.tx
            if "masked" in which:
                parts = tuple(
                    optax.masked(x, _by_name(frozenset(LEAVES), True, False)) for x in parts
                )
            tx = optax.named_chain(*zip("za", parts, strict=True))
        else:
            tx = optax.chain(first, inner.tx)
    # The state of a named chain does not say its order.
    next_to = which in ("named", "named, masked", "after")
    return Composed(
        text,
        tx,
        inner.starts,
        lambda leaves: frozenset(leaves) if next_to else inner.follows(leaves),
    )


def _around(draw: Any, inner: Composed) -> Composed:
    name = draw(st.sampled_from((*AROUND, "multi_steps", "MultiSteps", "delayed", "chain")))

    def starts(leaves: dict) -> bool:
        # optax.MultiSteps has no axis for the workers in its accumulators.
        scalar = name == "MultiSteps" and () in leaves.values()
        return inner.starts(leaves) and name != "apply_if_finite" and not scalar

    return Composed(f"{name}({inner.text})", AROUND[name](inner.tx), starts, inner.follows)


@st.composite
def cases(draw: Any, *, most: int = 0) -> Case:
    """A composition of depth 1 to 3, with at most so many steps."""
    composed = draw(exchanges())
    for _ in range(draw(st.integers(1, 3))):
        composed = draw(st.sampled_from((_partition, _masked, _in_chain, _around)))(draw, composed)
    shapes = tuple(draw(st.sampled_from(SHAPES)) for _ in LEAVES)
    dtypes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    return Case(
        of=composed,
        shapes=shapes,
        dtypes=(*dtypes, *dtypes),
        workers=(draw(st.sampled_from(WORKERS)), draw(st.sampled_from(WORKERS))),
        steps=draw(st.integers(0, most)),
        moving=draw(st.sampled_from(("not", "in a round", "rounding"))),
        scale=2.0 ** draw(st.sampled_from((0, -12, 13))),
        seed=draw(SEEDS),
    )


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
    narrow = dict(zip(LEAVES, case.dtypes, strict=True))

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

    def within(node: Any) -> Any:
        if not isinstance(node, LocalStepsState):
            return node
        count = jnp.full_like(node.count, int(case.moving == "in a round"))
        if case.moving != "rounding":
            return node._replace(count=count)

        # At the end of a round narrow parameters leave an error in the movement.
        def rounded(path: Any, leaf: Any) -> Any:
            if narrow[jax.tree_util.keystr(path)] == "float32":
                return leaf
            return jax.device_put(2.0**-16 * rng.integers(-9, 9, leaf.shape), leaf.sharding)

        moved = jax.tree_util.tree_map_with_path(rounded, node.moved)
        return node._replace(count=count, moved=moved)

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
    assert start == rows.shape[1]
    return found


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


def column_sums(rows: np.ndarray) -> np.ndarray:
    """The exact sums over the workers, rounded once."""
    return np.array([math.fsum(column) for column in wide(rows).reshape(len(rows), -1).T])


def check_resharded(case: Case, old: Any, new: Any, fresh: Any, before: int, after: int) -> None:
    """Sums stay, or means in rounds; each worker takes statistics of one; all else is as it was."""
    assert jax.tree.structure(new) == jax.tree.structure(fresh)
    states = zip(*map(jax.tree.leaves, (old, new, fresh)), roles(old), strict=True)
    for i, (a, b, like, known) in enumerate(states):
        assert (b.shape, b.dtype, b.sharding) == (like.shape, like.dtype, like.sharding)
        a, b = np.asarray(a), np.asarray(b)
        if known.role == "shared":
            assert a.tobytes() == b.tobytes(), f"array {i} is another one"
        elif known.role == "new":
            np.testing.assert_array_equal(b, like)
        elif known.role == "own":
            a = a.reshape(before, -1)[np.arange(after) % before]
            np.testing.assert_array_equal(b.reshape(after, -1), a)
        elif known.role in ("summed", "moved"):
            # Counts go to the first worker.
            if before == after and not jnp.issubdtype(b.dtype, jnp.integer):
                np.testing.assert_array_equal(b, a)
            else:
                check_rows(a.reshape(before, -1), b.reshape(after, -1), known.in_rounds)


def check_rows(old: np.ndarray, new: np.ndarray, in_rounds: bool) -> None:
    if np.issubdtype(old.dtype, np.integer):
        np.testing.assert_array_equal(new.sum(axis=0), old.sum(axis=0))
        return
    half = HALF[old.dtype.name]
    if not in_rounds:
        expected = column_sums(old)
        # It is rounded where there are fewer workers.
        allowed = half * np.abs(expected) if len(new) < len(old) else 0.0
        assert (np.abs(column_sums(new) - expected) <= allowed).all(), "the sum is another one"
        return
    mean, scale = column_sums(old) / len(old), np.abs(wide(old)).max(axis=0, initial=0)
    # What a worker rounds off goes to the next ones.
    allowed = 2 * half * np.abs(mean) / len(new) + 2.0**-50 * scale
    assert (np.abs(column_sums(new) / len(new) - mean) <= allowed).all(), "the mean is another one"
    assert (np.abs(wide(new) - mean) <= 2 * len(new) * half * scale).all(), "workers differ"


def _share(node: SparseAllreduceState) -> float:
    """The part of its residual that a worker looks ahead by."""
    return min(1.0, node.settings.step_ahead * max(1 / node.workers, 0.1))


def _is_in_a_round(state: Any) -> bool:
    """Whether movements of workers are in no parameters."""
    for node in nodes(state, LocalStepsState):
        every = ROUND if node.late == () else 2 * ROUND
        moved = any(np.asarray(x).any() for x in jax.tree.leaves(node.moved))
        if moved and int(node.count) % every:
            return True
    return False


def why_not_flushed(case: Case, state: Any) -> list[str]:
    """What an error of `flush` may say; empty if there must be none."""
    reasons, held = [], {}
    if _is_in_a_round(state):
        reasons.append("in the middle of a round")
    for node in sparse(state):
        leaves = {name for name, rows in by_leaf(node).items() if rows.size}
        held |= dict.fromkeys(leaves, node.settings.step_ahead)
    if not all(held.values()):
        reasons.append("may be gradients")
    if held.keys() & case.of.follows(case.leaves):
        reasons.append("has a transformation")
    return reasons


def without_residuals(state: Any) -> Any:
    def one(node: Any) -> Any:
        return node._replace(residual=()) if isinstance(node, SparseAllreduceState) else node

    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, SparseAllreduceState))


def with_zeros(state: Any) -> Any:
    def one(node: Any) -> Any:
        is_one = isinstance(node, SparseAllreduceState)
        return node._replace(residual=jnp.zeros_like(node.residual)) if is_one else node

    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, SparseAllreduceState))


def check_flushed(case: Case, params: Any, state: Any) -> Any:
    """Parameters move by the shares that workers look ahead by, and residuals keep the rest."""
    if reasons := why_not_flushed(case, state):
        said = refused(lambda: optax_ext.flush(params, state), ValueError)
        assert any(reason in said for reason in reasons), said
        return params, state
    moved, rest = optax_ext.flush(params, state)
    assert jax.tree.structure((moved, rest)) == jax.tree.structure((params, state))
    assert bits(without_residuals(rest)) == bits(without_residuals(state))
    old, new = named(params), named(moved)
    for before, after in zip(sparse(state), sparse(rest), strict=True):
        assert after.residual.sharding == before.residual.sharding
        assert after.residual.dtype == before.residual.dtype
        held, left = by_leaf(before), by_leaf(after)
        for name, rows in held.items():
            check_leaf(before, old.pop(name), new.pop(name), rows, left[name])
    assert bits(old) == bits(new), "a leaf without a residual moved"
    same, still = optax_ext.flush(params, with_zeros(state))
    assert bits((same, still)) == bits((params, with_zeros(state))), "zeros moved something"
    return moved, rest


def check_leaf(
    node: SparseAllreduceState, old: np.ndarray, new: np.ndarray, held: Any, left: Any
) -> None:
    assert new.dtype == old.dtype
    workers, share, half = len(held), _share(node), HALF[old.dtype.name]
    most = float(jnp.finfo(old.dtype).max)
    stored = HALF[node.residual.dtype.name]
    old, new, size = wide(old), wide(new), np.abs(held).sum(axis=0)
    float32 = 2.0**-22 * size + workers * 2.0**-23 * np.abs(new)
    # A residual in bfloat16 is rounded, and the share is a part of the rounded one.
    narrow = 0.0 if stored == HALF["float32"] else 2 * stored * np.abs(left).sum(axis=0)
    missing = workers * (new - old) + left.sum(axis=0) - held.sum(axis=0)
    assert (np.abs(missing) <= float32 + narrow).all(), "something is lost"
    point = old + share * held.mean(axis=0)
    rounding = 2.0**-22 * (size + np.abs(old)) + stored * size / workers
    expected = np.clip(point, -most, most)
    allowed = rounding + half * np.abs(expected) + SMALLEST
    assert (np.abs(new - expected) <= allowed).all(), "not the mean of the points"
    # Each worker keeps what a narrow parameter did not take.
    missed = 0.0 if half == HALF["float32"] else point - new
    wrong = np.abs(left - (1 - share) * held - missed)
    allowed = 0.0 if half == HALF["float32"] else rounding
    assert (wrong <= allowed + 2 * stored * (np.abs(held) + np.abs(left))).all(), "not the rest"
    assert share < 1 or half > HALF["float32"] or not left.any(), "something waits"


def check_consolidated(case: Case, params: Any, state: Any) -> None:
    """The mean of all residuals, and a state without them."""
    if _is_in_a_round(state):
        said = refused(lambda: optax_ext.consolidate(params, state), ValueError)
        assert "in the middle of a round" in said
        return
    if not nodes(state, REDUCTIONS):
        return
    gradient, empty = optax_ext.consolidate(params, state)
    assert bits(empty) == bits(with_zeros(state))
    got = named(gradient)
    for node in sparse(state):
        for name, rows in by_leaf(node).items():
            found = got.pop(name)
            most = float(jnp.finfo(found.dtype).max)
            mean = np.clip(rows.mean(axis=0), -most, most)
            allowed = HALF[found.dtype.name] * np.abs(mean) + 2.0**-22 * np.abs(rows).sum(axis=0)
            assert (np.abs(wide(found) - mean) <= allowed + SMALLEST).all(), "not the mean"
    assert not any(x.any() for x in got.values())


def _moves(state: Any) -> bool:
    """Whether `reshard` takes a state: P can't be read from joined accumulators alone."""
    tree = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, NODES))
    joined = rows = False
    while tree:
        node = tree.pop()
        if not isinstance(node, NODES):
            continue
        if isinstance(node, optax.MultiStepsState):
            joined |= bool(nodes(node, REDUCTIONS) and jax.tree.leaves(node.acc_grads))
        elif isinstance(node, SparseAllreduceState | LocalStepsState):
            rows = True
        else:
            rows |= bool(jax.tree.leaves(node.acc_grads))
        tree += jax.tree.leaves(tuple(node), is_leaf=lambda node: isinstance(node, NODES))
    return rows or not joined


def fresh_state(case: Case, params: Any, workers: int) -> Any:
    return optax_ext.init_state(case.of.tx, params, mesh(workers))


def check_moved(case: Case, params: Any, state: Any) -> Any:
    """All laws of a state without a step; returns the states of the workers before and after."""
    before, after = case.workers
    fresh = {n: fresh_state(case, params, n) for n in case.workers}
    if not _moves(state):
        refused(lambda: optax_ext.reshard(state, fresh[after]), ValueError)
        return state, None
    moved = optax_ext.reshard(state, fresh[after])
    check_resharded(case, state, moved, fresh[after], before, after)
    back = optax_ext.reshard(moved, fresh[before])
    check_resharded(case, moved, back, fresh[before], after, before)
    same = optax_ext.reshard(state, fresh[before])
    check_resharded(case, state, same, fresh[before], before, before)
    for now in (state, moved):
        check_consolidated(case, params, now)
    return same, moved


def check_filled(case: Case) -> None:
    """The laws of a state that is filled with numbers."""
    params = case.params()
    if not case.of.starts(case.leaves):
        refused(lambda: fresh_state(case, params, case.workers[0]))
        return
    state = filled(case, fresh_state(case, params, case.workers[0]))
    _, moved = check_moved(case, params, state)
    for now in (state, moved):
        if now is not None and nodes(now, REDUCTIONS):
            check_flushed(case, params, now)


def check_pair(pair: tuple[Case, Case]) -> None:
    """A state for another optimizer, or for other parameters, is moved or refused in words."""
    given = [(case, case.params()) for case in pair if case.of.starts(case.leaves)]
    if len(given) < 2:
        return
    states = [fresh_state(case, params, case.workers[0]) for case, params in given]
    for (_, params), state, other in zip(given, states, states[::-1], strict=True):
        calls = [functools.partial(optax_ext.reshard, state, other)]
        if nodes(other, REDUCTIONS):
            calls += [
                functools.partial(f, params, other)
                for f in (optax_ext.flush, optax_ext.consolidate)
            ]
        for call in calls:
            try:
                made = call()
            except (ValueError, TypeError, NotImplementedError) as error:
                found = error
            else:
                if call is calls[0] and pair[0].of is pair[1].of:
                    check_same_leaves(state, made)
                continue
            check_says_what_to_do(found)


def check_same_leaves(old: Any, new: Any) -> None:
    """The rows of a worker have the shapes that they had, whatever the workers."""
    for a, b, known in zip(jax.tree.leaves(old), jax.tree.leaves(new), roles(old), strict=True):
        if known.role in ("summed", "moved"):
            assert a.shape[1:] == b.shape[1:], "a residual moved to other leaves"


@st.composite
def pairs(draw: Any) -> tuple[Case, Case]:
    """Two cases with the same optimizer, parameters of the same shapes, or neither."""
    first, second = draw(cases()), draw(cases())
    common = draw(st.sampled_from((("of",), ("of", "dtypes"), ("shapes", "dtypes"), ())))
    return first, dataclasses.replace(second, **{x: getattr(first, x) for x in common})


def loss_fn(params: Any, batch: list[jax.Array]) -> jax.Array:
    """Its gradient is the batch."""
    pairs = zip(jax.tree.leaves(params), batch, strict=True)
    return sum((jnp.sum(p.astype(jnp.float32) * x[0]) for p, x in pairs), jnp.zeros(()))


def check_trained(case: Case) -> None:
    """The laws of a state after some steps, and the step after them."""
    params, (before, after) = case.params(), case.workers
    if not case.of.starts(case.leaves):
        refused(lambda: fresh_state(case, params, before))
        return
    state = fresh_state(case, params, before)

    @functools.cache
    def stepper(workers: int) -> Any:
        return optax_ext.make_train_step(loss_fn, case.of.tx, mesh(workers), donate=False)

    def stepped(params: Any, state: Any, workers: int) -> Any:
        found = stepper(workers)(params, state, case.batch(workers, case.steps))[:2]
        assert jax.tree.structure(found) == jax.tree.structure((params, state))
        assert all(np.isfinite(wide(x)).all() for x in jax.tree.leaves(found))
        return found

    for i in range(case.steps):
        params, state, _ = stepper(before)(params, state, case.batch(before, i))
    same, moved = check_moved(case, params, state)
    if not _restarts(state):
        assert bits(stepped(params, same, before)[0]) == bits(stepped(params, state, before)[0])
    for now, workers in ((same, before), (moved, after)):
        if now is not None:
            here = jax.device_get(params)
            stepped(here, now, workers)
            stepped(*check_flushed(case, here, now), workers)


def _restarts(state: Any) -> bool:
    """Whether something in it is evaluated again after a move: regions, thresholds, periods."""
    return any("ok_topk" in x.settings.allreduce for x in sparse(state))


@hypothesis.given(cases())
@_settings(FILLED)
def test_states_move_and_are_flushed_in_a_few_compositions(case):
    check_filled(case)


@hypothesis.given(pairs())
@_settings(OTHER)
def test_a_few_states_for_something_else_are_refused_in_words(pair):
    check_pair(pair)


@hypothesis.given(cases(most=STEPS))
@_settings(TRAINED)
def test_training_goes_on_in_a_few_compositions(case):
    check_trained(case)


CHECKS = {
    "filled": (cases(), check_filled, 4 * FILLED),
    "for something else": (pairs(), check_pair, 4 * OTHER),
    "trained": (cases(most=STEPS), check_trained, 4 * TRAINED),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("which", CHECKS)
def test_the_laws_hold_in_any_composition(which, part):
    drawn, check, examples = CHECKS[which]

    @hypothesis.seed(part)
    @hypothesis.given(drawn)
    @_settings(examples)
    def holds(given):
        check(given)

    holds()
