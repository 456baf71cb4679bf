"""Ok-Topk as published: Algorithms 1 and 2 over many steps, with tau and tau'."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives.transport import _dispatch
from tests.optax_ext.helpers import refused, run, slow
from tests.reference.ok_topk import Published, balanced
from tests.sparse_collectives.helpers import as_coo, sum_of_parts

WORKERS, SIZE, DENSITY, K, STEPS = 4, 300, 0.05, 15, 20
TAU, TAU_PRIME = 6, 4


def gradients(workers=WORKERS):
    """Multiples of 2**-10 with exact sums; they grow and shrink, later mostly in one place."""
    rng = np.random.default_rng(0)
    shape = (STEPS, workers, SIZE)
    x = rng.standard_t(3, shape) * (1 + np.sin(np.arange(STEPS)))[:, None, None]
    x[STEPS // 2 :, :, : SIZE // 10] *= 6
    return (np.round(x * 2**10) / 2**10).astype(np.float32)


@functools.cache
def steps_of(workers=WORKERS, paper=True, **options):
    options = {"repartition_period": TAU, "global_period": TAU_PRIME, **options}
    tx = optax_ext.ok_topk(DENSITY, axis="w", paper=paper, **options)
    found = run(tx, gradients(workers))
    return found.updates, (found.residuals, found.state.info, found.state.allreduce.boundaries)


def agreed_words(t, workers):
    """Words besides the entries: the boundaries, and three counts of each worker."""
    boundaries = _dispatch.words_of_all_reduce(2 * (workers - 1), workers) * (t % TAU == 0)
    return boundaries + _dispatch.words_of_all_gather(3, workers)


@pytest.mark.parametrize(
    ("workers", "paper"), [(8, True), (4, "corrected"), slow(4, True), slow(8, "corrected")]
)
@pytest.mark.one_in(2)
def test_ok_topk_paper_steps_are_those_of_the_paper(workers, paper):
    oracle = Published(workers, SIZE, K, TAU_PRIME, TAU, corrected=paper == "corrected")
    updates, (residuals, info, boundaries) = steps_of(workers, paper, slack=float("inf"))
    steps = []
    for t, given in enumerate(gradients(workers)):
        step = oracle.step(given)
        np.testing.assert_array_equal(workers * updates[t, 0].astype(np.float64), step.total)
        np.testing.assert_array_equal(residuals[t], oracle.residuals)
        assert info.selected[t, :, 0].tolist() == step.selected
        assert (info.delivered[t] == step.delivered).all()
        words = np.add(step.words, agreed_words(t, workers))
        np.testing.assert_allclose(info.useful[t, :, 0], words, rtol=1e-6)
        steps.append(step)
    assert not info.overflow.any()
    # In between, the counts differ from k.
    whole = [step.delivered for step in steps]
    assert set(np.ravel([step.selected for step in steps[::TAU_PRIME]])) == {K}
    assert set(whole[::TAU_PRIME]) == {K}
    assert max(whole) > 1.5 * K
    assert min(whole) < 0.75 * K
    # With four workers, no worker can have over four times the mean.
    assert any(step.held != step.owned for step in steps) == (workers > 4)
    # The regions are cut again every tau steps, and at no other step.
    boundaries = boundaries[:, 0]
    changes = [t for t in range(1, STEPS) if (boundaries[t] != boundaries[t - 1]).any()]
    assert changes == list(range(TAU, STEPS, TAU))


# 8 workers: one has all, two have all, one has just four times the mean, and one more than that.
OWNED = [[32, *[0] * 7], [0, 0, 0, 20, 12, 0, 0, 0], [16, 16, *[0] * 6], [17, 15, *[0] * 6]]
OWNED += [[0] * 7 + [3], [0] * 8, [4] * 8]
# More than the paper's mean allows, more than a worker's slots, and more than all slots.
CROWDED = [[32, 32, 16, 16, 8, 8, 8, 8], [17, 16, 16, 16, 15, 16, 16, 16], [32] * 8]


@functools.cache
def published_reduce():
    """A step of 8 workers that reuses the threshold 1, with the default slack."""
    allreduce = sc.allreduce.ok_topk(density=0.05, paper=True)
    state = allreduce.init(640, 8)
    state = state._replace(count=state.count + 1, threshold=jnp.float32(1), overflowed=False)
    state = jax.tree.map(jnp.asarray, state)

    def reduce(indices, values):
        coo = sc.PaddedCOO(values, indices, 640)
        total, undelivered, _, _ = allreduce.reduce(coo, state, axis="w")
        return total.indices, total.to_dense(), sum_of_parts(as_coo(coo, undelivered))

    return sc.simulate(reduce, axis="w", axis_size=8)


SHARES = [0.4, 0.3, *[0.05] * 6]
RANDOM = np.random.default_rng(0).multinomial(32, SHARES, 6).tolist()


@pytest.mark.parametrize("owned", [*OWNED, *CROWDED, *RANDOM])
@pytest.mark.one_in(3)
def test_ok_topk_paper_gate_gives_each_worker_its_share(owned):
    # Each worker has 4 entries in each region of 80, and no other worker the same ones.
    place = np.arange(8)[:, None, None], np.arange(8)[:, None], np.arange(4)
    indices = 80 * place[1] + 4 * place[0] + place[2]
    large = indices % 80 < np.asarray(owned)[:, None]
    values = np.where(large, 2 + indices / 1024, 0.25).astype(np.float32).reshape(8, 32)
    indices = indices.reshape(8, 32).astype(np.int32)
    slots, total, kept = map(np.asarray, published_reduce()(indices, values))
    # One row of the allgather's slots for each worker, the same on all.
    held = (slots[0].reshape(8, -1) < 640).sum(1).tolist()
    assert held == ([16] * 8 if owned in CROWDED else balanced(owned)[0])
    everything = np.zeros(640)
    np.add.at(everything, indices.ravel(), values.ravel().astype(np.float64))
    np.testing.assert_array_equal(total[0] + kept.sum(0, dtype=np.float64), everything)


@pytest.mark.parametrize(("paper", "servo"), [(True, False), ("corrected", "fixed")])
def test_algorithm_2_has_one_period_and_one_room_for_both_halves(paper, servo):
    tx = optax_ext.ok_topk_sgd(0.5, density=DENSITY, axis="w", paper=paper)
    settings = optax_ext.get_state(optax_ext.init_state(tx, jnp.zeros(SIZE), {"w": 4})).settings
    for part in (f"servo={servo!r}", "headroom=3.0", "period=32"):
        assert part in settings.selector
    for part in ("global_period=32", "slack=4.0", f"paper={paper!r}", "schedule='rotation'"):
        assert part in settings.allreduce


def test_algorithm_2_takes_the_periods_of_the_experiments():
    tx = optax_ext.ok_topk_sgd(
        0.5, density=DENSITY, axis="w", paper=True, repartition_period=64, global_period=128
    )
    settings = optax_ext.get_state(optax_ext.init_state(tx, jnp.zeros(SIZE), {"w": 4})).settings
    assert "period=128" in settings.selector
    for part in ("repartition_period=64", "global_period=128"):
        assert part in settings.allreduce


def test_paper_sends_by_destination_rotation():
    """Section 3.1.1, Figure 2: at distance s worker i sends to worker i + s."""
    workers = 8
    tx = optax_ext.ok_topk_sgd(0.5, density=DENSITY, axis="w", paper=True)

    def step(gradient):
        return tx.update(gradient, tx.init(gradient))

    text = str(jax.make_jaxpr(step, axis_env=[("w", workers)])(jnp.zeros(SIZE)))
    steps = re.findall(r"ppermute\[\s*axis_name=\S+\s*perm=\((.*)\)", text)
    sent = [{(int(a), int(b)) for a, b in re.findall(r"\((\d+), (\d+)\)", x)} for x in steps]
    assert sent == [
        {(i, (i + distance) % workers) for i in range(workers)} for distance in range(1, workers)
    ]


@pytest.mark.parametrize("paper", [True, "corrected"])
@pytest.mark.one_in(2)
def test_algorithm_2_has_the_rate_of_each_step_inside_the_accumulation(paper):
    rate = optax.piecewise_constant_schedule(0.5, {3: 0.5})
    tx = optax_ext.ok_topk_sgd(rate, density=DENSITY, axis="w", paper=paper)
    # The overflow is small after the first steps, as there is room for four times k.
    given = gradients()[:6] * np.float32([1, 0.5, 0.5, 0.5, 0.5, 0.5])[:, None, None]

    found = run(tx, given)
    assert not found.state.info.overflow.any()
    oracle, counts = Published(WORKERS, SIZE, K, 32, corrected=paper == "corrected"), []
    for t, gradient in enumerate(given):
        step = oracle.step(float(rate(t)) * gradient)
        np.testing.assert_array_equal(-WORKERS * found.updates[t, 0].astype(np.float64), step.total)
        counts.append(step.delivered)
    assert counts[0] == K
    assert len(set(counts)) > 2


def test_ok_topk_paper_refuses_what_has_no_place_beside_it():
    for name, value in (("regions", "equal"), ("balance", "never")):
        for paper in (True, "corrected"):
            message = f"paper={paper!r} .*{name}='{value}'"
            refused(message, sc.allreduce.ok_topk, density=0.1, paper=paper, **{name: value})
    message = "paper must be one of False, True, 'corrected', got 'yes"
    refused(message, optax_ext.ok_topk_sgd, 0.1, density=0.1, axis="w", paper="yes")
