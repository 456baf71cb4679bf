"""Sums at indices that all workers draw from one seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc


def run(allreduce, acc, steps):
    """Totals and what is left of ``acc f[P, n]``, which gets the same again at each step."""
    workers, size = acc.shape
    selector = sc.select.topk(0.5)

    def step(acc, states):
        mine, state = states
        seen = allreduce.local_view(acc, state, axis="w")
        coo, mine, _ = selector.select(seen, mine)
        coo = allreduce.to_global(coo, size, state, axis="w")
        total, undelivered, state, info = allreduce.reduce(coo, state, axis="w", acc=acc)
        return total.to_dense(), undelivered.residual(acc, coo), info, (mine, state)

    seen_size = jax.eval_shape(
        lambda x: allreduce.local_view(x, allreduce.init(size, workers), axis="w"), acc[0]
    ).shape[0]
    state = (selector.init(seen_size), allreduce.init(size, workers))
    state = jax.tree.map(lambda x: jnp.stack([x] * workers), state)
    made, left = jax.jit(sc.simulate(step, axis="w", axis_size=workers)), acc
    for _ in range(steps):
        total, kept, info, state = made(left, state)
        yield np.asarray(total), np.asarray(kept), info
        left = kept + acc


def gradients(workers, size):
    return jnp.asarray(np.random.default_rng(0).integers(1, 99, (workers, size)), jnp.float32)


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
@pytest.mark.parametrize(("size", "density"), [(97, 0.1), (12, 0.25), (7, 1.0), (1, 1.0)])
def test_each_permutation_delivers_every_index_once_and_all_of_it(workers, size, density):
    acc = gradients(workers, size)
    k = max(1, round(density * size))
    turns, delivered = -(-size // k), []
    had = np.asarray(acc)
    for total, kept, info in run(sc.allreduce.shared_random(density), acc, 2 * turns):
        drawn = np.flatnonzero(total[0])
        # All that all have at the drawn indices goes, and nothing else does.
        np.testing.assert_array_equal(total, np.tile(total[0], (workers, 1)))
        np.testing.assert_array_equal(total[0, drawn], had.sum(0)[drawn])
        assert not kept[:, drawn].any()
        np.testing.assert_array_equal(np.delete(kept, drawn, 1), np.delete(had, drawn, 1))
        assert set(np.asarray(info.delivered)) == {len(drawn)}
        np.testing.assert_allclose(info.words, 2 * k * (workers - 1) / workers, rtol=1e-6)
        delivered.append(drawn)
        had = kept + np.asarray(acc)
    for part in (delivered[:turns], delivered[turns:]):
        assert sorted(np.concatenate(part)) == list(range(size))
    if size > 20:
        assert any(set(a) != set(b) for a, b in zip(delivered, delivered[turns:], strict=False))


def test_another_seed_draws_others():
    acc = gradients(2, 97)
    first, second = (
        next(run(sc.allreduce.shared_random(0.1, seed=seed), acc, 1))[0] for seed in (0, 1)
    )
    assert set(np.flatnonzero(first[0])) != set(np.flatnonzero(second[0]))
    for arguments in ({"density": 0.0}, {"density": 0.1, "seed": 2**31}):
        with pytest.raises(ValueError, match=r"density|seed must be below 2\*\*31"):
            sc.allreduce.shared_random(**arguments)


@pytest.mark.parametrize("selected", [40, 0])
def test_a_worker_gives_what_it_selected_and_nothing_where_it_selected_nothing(selected):
    """So that a step can be skipped: all that the workers have stays with them."""
    allreduce, acc = sc.allreduce.shared_random(0.2), gradients(3, 40)

    def step(acc):
        indices = jnp.where(jnp.arange(40) < selected, jnp.arange(40), 40)
        coo = sc.PaddedCOO(jnp.where(indices < 40, acc, 0), indices.astype(jnp.int32), 40)
        given = {} if selected else {"acc": acc}
        total, undelivered, *_ = allreduce.reduce(coo, allreduce.init(40, 3), axis="w", **given)
        return total.to_dense(), undelivered.residual(acc, coo)

    total, kept = map(np.asarray, sc.simulate(step, axis="w", axis_size=3)(acc))
    np.testing.assert_array_equal(total[0] + kept.sum(0), np.asarray(acc).sum(0))
    assert np.count_nonzero(total[0]) == (8 if selected else 0)
