"""The laws of `reshard`, `flush` and `consolidate` for optimizers composed in any way."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._transforms._local_steps import LocalStepsState
from tests.fuzz.composed import HALF, ROUND, SMALLEST, Case
from tests.fuzz.composed_states import (
    NODES,
    REDUCTIONS,
    by_leaf,
    check_says_what_to_do,
    filled,
    in_variables,
    named,
    nodes,
    refused,
    roles,
    sparse,
    wide,
)
from tests.optax_ext.helpers import bits, mesh


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


def _is_in_a_round(state: Any) -> bool:
    """Whether movements of workers are in no parameters."""
    for node in nodes(state, LocalStepsState):
        every = ROUND if node.late == () else 2 * ROUND
        moved = any(np.asarray(x).any() for x in jax.tree.leaves(node.moved))
        if moved and int(node.count) % every:
            return True
    return False


def movements(state: Any) -> dict[str, np.ndarray]:
    """The movement of each worker, as leaves ``f64[P, ...]`` by name."""
    found: dict[str, np.ndarray] = {}
    for node in nodes(state, LocalStepsState):
        found |= {name: wide(rows) for name, rows in named(node.moved).items()}
    return found


def why_not_flushed(case: Case, state: Any) -> list[str]:
    """Phrases of the errors of `flush`; empty if there must be none."""
    reasons, held, still = [], {}, []
    late = [node.late for node in nodes(state, LocalStepsState)]
    if any(np.asarray(x).any() for x in jax.tree.leaves(late)):
        reasons.append("on its way")
    for node in sparse(state):
        leaves = {name for name, rows in by_leaf(node).items() if rows.size}
        held |= dict.fromkeys(leaves, node.settings.step_ahead)
        still += [node.settings.whole] if leaves and not node.settings.step_ahead else []
    if still:
        reasons.append("flush has nothing to move" if all(still) else "may be gradients")
    names = held.keys() | {name for name, rows in movements(state).items() if rows.size}
    if names & case.of.follows(case.leaves):
        reasons.append("has a transformation")
    return reasons


def replaced(state: Any, of: Callable[[Any], Any]) -> Any:
    """The state with other residuals and movements, as a function of each array."""

    def one(node: Any) -> Any:
        if isinstance(node, SparseAllreduceState):
            return node._replace(residual=of(node.residual))
        if isinstance(node, LocalStepsState):
            moved = jax.tree.map(of, node.moved)
            return node._replace(moved=moved, outer=replaced(node.outer, of))
        return node

    kinds = SparseAllreduceState | LocalStepsState
    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, kinds))


def check_flushed(case: Case, params: Any, state: Any) -> Any:
    """Parameters move by what workers look ahead by, and residuals keep the rest."""
    if reasons := why_not_flushed(case, state):
        said = refused(lambda: optax_ext.flush(params, state), ValueError)
        assert any(reason in said for reason in reasons), said
        return params, state
    moved, rest = optax_ext.flush(params, state)
    assert jax.tree.structure((moved, rest)) == jax.tree.structure((params, state))
    assert bits(replaced(rest, lambda x: ())) == bits(replaced(state, lambda x: ()))
    old, new = named(params), named(moved)
    went, stayed = movements(state), movements(rest)
    held: dict[str, Held] = {}
    for before, after in zip(sparse(state), sparse(rest), strict=True):
        assert after.residual.sharding == before.residual.sharding
        assert after.residual.dtype == before.residual.dtype
        # The part of its residual that a worker looks ahead by.
        share = min(1.0, before.settings.step_ahead * max(1 / before.workers, 0.1))
        stored, left = HALF[before.residual.dtype.name], by_leaf(after)
        held |= {
            name: Held(rows, left[name], share, stored) for name, rows in by_leaf(before).items()
        }
    for name, rows in went.items():
        nothing = np.zeros_like(rows)
        held.setdefault(name, Held(nothing, nothing, 1.0, HALF["float32"]))
    for name, of in held.items():
        nothing = np.zeros_like(of.before)
        went_and_stayed = went.get(name, nothing), stayed.get(name, nothing)
        check_leaf(of, *went_and_stayed, old.pop(name), new.pop(name))
    assert bits(old) == bits(new), "a leaf without a residual moved"
    nothing = params, replaced(state, jnp.zeros_like)
    assert bits(optax_ext.flush(*nothing)) == bits(nothing), "zeros moved something"
    return moved, rest


class Held(NamedTuple):
    """The residuals of a leaf before and after a flush, ``f64[P, ...]``."""

    before: np.ndarray
    after: np.ndarray
    share: float
    rounding: float  # of their dtype


def check_leaf(of: Held, went: Any, stayed: Any, old: np.ndarray, new: np.ndarray) -> None:
    """A leaf of the parameters, the residuals, and the movements before and after."""
    assert new.dtype == old.dtype
    workers, half, most = len(went), HALF[old.dtype.name], float(jnp.finfo(old.dtype).max)
    is_narrow, (held, left, share, stored) = old.dtype != np.float32, of
    old, new, size = wide(old), wide(new), np.abs(held).sum(axis=0) + np.abs(went).sum(axis=0)
    # A residual in bfloat16 is rounded, and the share is a part of the rounded one.
    of_stored = 0.0 if stored == HALF["float32"] else 2 * stored * np.abs(left).sum(axis=0)
    allowed = 2.0**-22 * size + workers * 2.0**-23 * np.abs(new) + of_stored
    missing = workers * (new - old) + (left + stayed - held - went).sum(axis=0)
    assert (np.abs(missing) <= allowed).all(), "something is lost"
    point = old + share * held.mean(axis=0) + went.mean(axis=0)
    rounding = 2.0**-22 * (size + np.abs(old)) + stored * size / workers
    expected = np.clip(point, -most, most)
    allowed = rounding + half * np.abs(expected) + SMALLEST
    assert (np.abs(new - expected) <= allowed).all(), "not the mean of the points"
    # Each worker keeps what a narrow parameter did not take.
    missed = point - new if is_narrow else 0.0
    wrong = np.abs(left + stayed - (1 - share) * held - missed)
    allowed = rounding if is_narrow else 0.0
    assert (wrong <= allowed + 2 * stored * (np.abs(held) + np.abs(left))).all(), "not the rest"
    assert is_narrow or not stayed.any(), "a movement stays"
    assert is_narrow or share < 1 or not left.any(), "something waits"


def without_residuals(state: Any) -> Any:
    def one(node: Any) -> Any:
        return node._replace(residual=()) if isinstance(node, SparseAllreduceState) else node

    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, SparseAllreduceState))


def check_consolidated(case: Case, params: Any, state: Any) -> None:
    """The mean of all residuals, and a state without them."""
    if _is_in_a_round(state):
        said = refused(lambda: optax_ext.consolidate(params, state), ValueError)
        assert "in the middle of a round" in said
        return
    if not nodes(state, REDUCTIONS):
        return
    gradient, empty = optax_ext.consolidate(params, state)
    assert not any(np.asarray(x.residual).any() for x in sparse(empty))
    assert bits(without_residuals(empty)) == bits(without_residuals(state))
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
    assert bits(optax_ext.reshard(in_variables(state), fresh[after])) == bits(moved)
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
