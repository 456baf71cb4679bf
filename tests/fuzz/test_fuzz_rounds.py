"""Exchanges in rounds, at their end or overlapping them, in a residual or around one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_ext
from tests.fuzz.configurations import SEEDS, flat_allreduces
from tests.fuzz.test_fuzz import _settings
from tests.optax_ext.helpers import mesh, train
from tests.sparse_collectives.table import SELECTORS
from tests.sparse_collectives.table import SHORT_CODECS as CODECS

# Errors of 2 bits are larger than most values and grow if they are fed back (docs/allreduces.md).
_CODECS = tuple(name for name in CODECS if name != "qsgd2")
PARAMS, SIZE, ROUNDS = {"a": (6, 11), "b": (31,)}, 97, 3


@st.composite
def drawn(draw):
    """An exchange in rounds, the workers, and which of their steps are not finite."""
    density = draw(st.sampled_from((0.1, 0.05, 0.3, 1.0)))
    name, allreduce = draw(flat_allreduces(density, _CODECS))
    chosen = draw(st.sampled_from(("topk", *SELECTORS)))
    workers, every = draw(st.sampled_from((4, 2, 3, 1, 7))), draw(st.sampled_from((2, 3, 6)))
    how = draw(st.sampled_from(("beside", "at the end", "around", "around, fragments")))
    bad, seed = draw(st.sampled_from((0.0, 0.2))), draw(SEEDS)
    return how, name, chosen, density, allreduce, workers, every, bad, seed


def optimizer(how, density, allreduce, chosen, every):
    selector = SELECTORS[chosen](density)
    given = {"density": density, "axis": "data", "allreduce": allreduce, "selector": selector}
    if not how.startswith("around"):
        return optax_ext.sparse_sgd(1.0, every=every, **given)
    fragments = 2 if "fragments" in how and every % 2 == 0 else 1
    outer = optax_ext.sparse_sgd(1.0, **given)
    return optax_ext.local_steps(optax.sgd(1.0), outer, every=every, fragments=fragments)


def gradients(workers, every, bad, seed):
    """``f32[steps, P, n]``, and whether each step of each worker is finite."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((ROUNDS * every, workers, SIZE)).astype(np.float32)
    finite = rng.random(steps.shape[:2]) >= bad
    steps[..., 5][~finite] = rng.choice([np.nan, np.inf, -np.inf])
    return steps, finite


def loss(params, batch):
    """Its gradient is the batch."""
    return jnp.sum(params["a"] * batch[0, :66].reshape(6, 11)) + jnp.sum(
        params["b"] * batch[0, 66:]
    )


def vector(tree, lead):
    leaves = [np.asarray(x, np.float64).reshape(*lead, -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=-1)


def waiting(how, state, workers):
    """The unsent entries, summed over the workers, ``f64[n]``."""
    if not how.startswith("around"):
        return np.asarray(optax_ext.get_state(state).residual, np.float64).sum(0)
    # Fragments are groups of leaves, in the order of the tree.
    residuals = [np.asarray(part.residual, np.float64) for part in state.outer]
    return (np.concatenate(residuals, axis=1) + vector(state.moved, (workers,))).sum(0)


@pytest.mark.slow
@given(drawn())
@_settings(60)
def test_parameters_and_what_waits_are_all_that_workers_have_moved(case):
    how, _, chosen, density, allreduce, workers, every, bad, seed = case
    tx, on = optimizer(how, density, allreduce, chosen, every), mesh(workers)
    steps, finite = gradients(workers, every, bad, seed)
    params = {name: jnp.zeros(shape) for name, shape in PARAMS.items()}
    if how == "beside":
        take = optax_ext.make_train_round(loss, tx, on, donate=False)
        found = [(params, optax_ext.init_state(tx, params, on))]
        for batches in steps.reshape(ROUNDS, every, workers, SIZE):
            found.append(take(*found[-1], batches)[:2])
        found, taken = found[1:], range(every, len(steps) + 1, every)
    else:
        found = [x[:2] for x in train(tx, loss, params, steps, on)[1:]]
        taken = range(1, len(steps) + 1)
    moved = -np.where(finite[..., None], steps, 0).astype(np.float64)
    for count, (common, state) in zip(taken, found, strict=True):
        delivered = workers * vector(common, ())
        sums = moved[:count].sum((0, 1))
        scale = np.abs(moved[:count]).sum((0, 1)).max() + 1
        np.testing.assert_allclose(
            delivered + waiting(how, state, workers), sums, atol=1e-5 * scale
        )
    missed = (state if how.startswith("around") else optax_ext.get_state(state)).missed
    assert np.asarray(missed).tolist() == (~finite).sum(0).tolist()
