"""What every exchange obeys, checked on the states before and after a step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._error_feedback._nonfinite import LARGEST
from tests.fuzz.configurations import Configuration

_TINY = 2.0**-126


def flat(tree: Any, layout: Any, dense: bool) -> np.ndarray:
    """The leaves ``[P, ...]`` that are exchanged densely, or the others, ``f64[P, m]``."""
    leaves = jax.tree.leaves(tree)
    chosen = [
        np.asarray(leaf).astype(np.float64).reshape(len(leaf), -1)
        for leaf, is_dense in zip(leaves, layout.dense, strict=True)
        if is_dense == dense
    ]
    return np.concatenate(chosen, axis=1) if chosen else np.zeros((len(leaves[0]), 0))


def by_worker(tree: Any, configuration: Configuration) -> Any:
    """One axis for the workers instead of one for each name."""
    depth = len(configuration.shape)
    return jax.tree.map(
        lambda x: np.asarray(x).reshape(configuration.workers, *np.shape(x)[depth:]), tree
    )


def rows(state: Any, array: np.ndarray, configuration: Configuration) -> np.ndarray:
    """The workers' residuals, ``f64[rows, n]``: a row for each, or for each node of shards."""
    array = np.asarray(array).astype(np.float64)[:, 0]
    if not state.settings.shard_axis:
        return array[:, : state.layout.size]
    inside = configuration.shape[1]
    whole = array.reshape(-1, inside * array.shape[1])
    return whole[:, : state.layout.size]


def summed(x: np.ndarray) -> np.ndarray:
    """The exact sum over the workers, rounded once."""
    if not np.isfinite(x).all():
        return x.sum(axis=0)
    return np.array([math.fsum(column) for column in x.T])


def reductions(state: Any) -> list[Any]:
    """The states of the reductions inside the state of a wrapper, one for each bucket."""
    state = getattr(state, "inner_opt_state", state)
    return list(getattr(state, "buckets", (state,)))


def of_bucket(tree: dict[str, Any], state: Any) -> dict[str, Any]:
    """The leaves that are in a bucket; the others have no leaf in its layout."""
    mine = state.layout.treedef.unflatten([True] * state.layout.treedef.num_leaves)
    return {name: tree[name] for name, leaf in mine.items() if leaf is True}


def check_ahead(configuration: Configuration, state: Any, points: Any) -> None:
    """On average the workers look ahead to their share of the mean that waits."""
    points = by_worker(points, configuration)
    # Leaves of 16 bits round the points, and saturate.
    rounding, largest = (
        {k: np.full((1, *x.shape), of(x.dtype)) for k, x in configuration.params.items()}
        for of in (
            lambda dtype: 1e-5 if dtype == jnp.float32 else 2.0**-8,
            lambda dtype: float(jnp.finfo(dtype).max),
        )
    )
    for part in reductions(by_worker(state, configuration)):
        if not part.layout.size:
            continue
        waits = rows(part, part.residual, configuration)
        if not np.isfinite(waits).all():
            continue
        share = 0.0
        if part.settings.step_ahead:
            share = max(0.1, 1 / len(waits)) if configuration.every == 1 else 1.0
        expected = share * waits.sum(axis=0) / configuration.workers
        found = flat(of_bucket(points, part), part.layout, dense=False).mean(axis=0)
        of_entry = (flat(of_bucket(x, part), part.layout, dense=False) for x in (rounding, largest))
        (relative,), (limit,) = of_entry
        allowed = relative * np.abs(waits).sum(axis=0) + np.where(relative > 1e-5, 2.0**-24, _TINY)
        near = np.abs(found - expected) <= allowed
        held = (np.abs(waits) <= limit).all(axis=0)
        assert near[held].all(), "another point than the residuals say"


def check_replicas(update: Any, state: Any) -> None:
    """The same bits on every worker, except in the fields of single workers."""
    common = (state.count, state.skipped, state.dropped, state.withheld, state.info.words)
    if not state.settings.shard_axis:
        common += tuple(jax.tree.leaves(state.allreduce))
    for leaf in [*jax.tree.leaves(update), *common]:
        bits = np.ascontiguousarray(leaf).view(np.uint8).reshape(len(leaf), -1)
        assert (bits == bits[0]).all(), "workers differ"


def check_counters(before: Any, after: Any) -> None:
    info = after.info
    assert after.count[0] + after.skipped[0] == before.count[0] + before.skipped[0] + 1
    assert (after.dropped >= before.dropped).all()
    assert (after.withheld >= before.withheld).all()
    if after.count[0] == before.count[0]:
        return
    assert (info.selected >= info.arrived).all()
    assert (info.arrived >= 0).all()
    assert (info.overflow >= 0).all()
    assert 0 <= info.delivered[0] <= after.layout.size
    assert np.isfinite(info.words).all()
    # On average no more words are useful than are received.
    assert info.useful.mean() <= info.words[0] * (1 + 1e-5) + 1e-3
    assert (info.useful >= 0).all()


def check_finite(update: Any, state: Any) -> None:
    for leaf in (*jax.tree.leaves(update), state.residual, *jax.tree.leaves(state.velocity)):
        assert np.isfinite(np.asarray(leaf).astype(np.float32)).all(), "not finite"


def check_untouched(update: Any, before: Any, after: Any) -> None:
    """A skipped step changes nothing but the count of skipped steps."""
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(update))
    check_same(*(state._replace(skipped=0) for state in (before, after)))


def check_same(old: Any, new: Any) -> None:
    """The same bits in all leaves."""
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        # Bits, so that NaN equals NaN; of a number as of an array.
        bits = [np.atleast_1d(np.ascontiguousarray(x)).view(np.uint8) for x in (a, b)]
        np.testing.assert_array_equal(*bits)


def check_conserved(
    configuration: Configuration, before: Any, after: Any, update: Any, gradient: Any
) -> None:
    """The workers' accumulators add up to P times the update plus what they keep."""
    layout, workers = after.layout, configuration.workers
    dense = configuration.is_dense(before.count[0])
    if not layout.size:
        return
    # The accumulated increment is in the state of the recording transformation.
    doubtful = np.zeros(layout.size, bool)
    source = gradient if not after.local else jax.tree.map(lambda x: x[:, 0], after.local[1])
    with np.errstate(invalid="ignore", over="ignore"):
        increment = flat(source, layout, dense=False)
        decays = configuration.is_due(before.count[0])
        old = rows(before, before.residual, configuration)
        old = old * configuration.decay if decays else old
        if after.settings.shard_axis:
            # A node sums up before it accumulates, in float32.
            inside = configuration.shape[1]
            of_nodes = np.abs(increment).reshape(-1, inside, layout.size).sum(axis=1)
            spread = of_nodes.sum(axis=0)
            # Whether such a sum is finite depends on the order in which it is made.
            doubtful = (of_nodes > np.finfo(np.float32).max).any(axis=0)
            increment = increment.reshape(-1, inside, layout.size).sum(axis=1)
        else:
            spread = np.abs(increment).sum(axis=0)
        summed_up = increment
        if configuration.momentum is not None:
            u = rows(before, before.velocity, configuration) * configuration.momentum + increment
            increment = increment + configuration.momentum * u if configuration.nesterov else u
            spread = spread + 2 * np.abs(u).sum(axis=0) + np.abs(increment).sum(axis=0)
        if configuration.every > 1 and configuration.policy == "skip":
            # A worker or a node leaves out its own step.
            own = (after.missed == before.missed)[:, 0]
            own = own.reshape(len(increment), -1)[:, :1]
            increment, summed_up = (np.where(own, x, 0.0) for x in (increment, summed_up))
            spread = np.where(np.isfinite(spread), spread, 0.0)
        acc = old + increment
        # Nothing is computed with an entry that is left out.
        spread = np.where(np.isfinite(spread), spread, 0.0)
        narrow = np.where(np.isfinite(acc), np.clip(acc, -3.5e38, 3.5e38), acc)
        # Values beyond the range of float32 also count as non-finite for the policy.
        largest = float(np.finfo(np.float32).max)
        finite = np.isfinite(acc) & (np.abs(narrow) <= largest)
        if after.settings.shard_axis:
            # Such a sum of a node is also beyond it, whatever the residual.
            finite = finite & (np.abs(summed_up) <= largest) & (np.abs(increment) <= largest)
        # Every worker also keeps a part of a limited or a rounded mean.
        rounds = configuration.limited or any(
            shape.dtype != jnp.float32
            for shape, is_dense in zip(jax.tree.leaves(update), layout.dense, strict=True)
            if not is_dense
        )
        rounds = rounds and not configuration.products
        if (configuration.keeps_others or rounds) and configuration.policy != "propagate":
            large = np.abs(increment) >= LARGEST
            assert configuration.policy == "drop" or not large.any(), "a step was not skipped"
            finite = finite & ~large
    if configuration.policy == "propagate" and not finite.all():
        return
    if configuration.policy == "drop":
        acc = np.where(finite, acc, old)
    elif not finite.all():
        # A node's sum, which is rounded first, may be on the other side of the largest number.
        assert after.settings.shard_axis or np.abs(acc).max() < 3.41e38, "a step was not skipped"
        return
    kept = rows(after, after.residual, configuration)
    delivered = flat(update, layout, dense=False)[0]
    if configuration.policy == "propagate" and not (
        np.isfinite(delivered).all() and np.isfinite(kept).all()
    ):
        return
    missing = summed(np.concatenate([acc, -kept, -delivered[None] * workers]))
    if not configuration.is_due(before.count[0]):
        assert not delivered.any(), "a step without an exchange has an update"
    magnitude = np.abs(acc).sum(axis=0) + np.abs(kept).sum(axis=0) + workers * np.abs(delivered)
    if configuration.products:
        # The products of an entry's factors may cancel; each is at most as large as its row. What
        # workers send of an entry in codes may cancel as well.
        spread = spread + magnitude.max()
    # Half an ulp for each addition on the way, and arithmetic that flushes subnormals.
    allowed = (2 * workers + 8) * (2.0**-24 * (magnitude + spread) + _TINY)
    if dense:
        full = [np.full((1, *x.shape[1:]), x.dtype == jnp.float32) for x in jax.tree.leaves(update)]
        assert not kept[:, flat(full, layout, dense=False)[0] > 0].any(), "something waits"
        # A dense sum that is not finite is dropped.
        doubtful = doubtful | (np.abs(acc).sum(axis=0) > 0.99 * largest)
    if (after.dropped > before.dropped).all():
        allowed = np.where(doubtful, np.inf, allowed)
    if configuration.narrow_residual:
        allowed = allowed + 2.0**-7 * np.abs(kept).sum(axis=0)
    worst = np.argmax(np.abs(missing) - allowed)
    assert (np.abs(missing) <= allowed).all(), (
        f"entry {worst}: {missing[worst]} is missing, {allowed[worst]} is rounding"
    )
