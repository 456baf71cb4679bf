"""TopkA and the sparse allgather: everyone receives everyone's selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives.allreduce._parts import _step
from tests.reference import topk_a as oracle
from tests.reference import windows
from tests.sparse_collectives import helpers

SIZE, DENSITY = 403, 0.05
SELECTOR = sc.select.topk(density=DENSITY)
TOPK_A, ALLGATHER = sc.allreduce.topk_a(), sc.allreduce.sparse_allgather()


def as_entries(vectors):
    return [{int(i): v[i] for i in np.flatnonzero(v)} for v in np.asarray(vectors)]


@pytest.mark.parametrize("workers", [2, *helpers.slow(5)])
def test_topk_a_is_the_sum_of_all_selections(workers):
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        if name == "subnormal":
            continue  # sums of them may be flushed to zero
        out = helpers.run_once(SELECTOR, TOPK_A, acc)
        total = oracle.topk_a(as_entries(out["sent"]), SIZE)
        np.testing.assert_array_equal(out["total"], np.broadcast_to(total, acc.shape), name)
        assert (np.asarray(out["info"].delivered) == np.count_nonzero(total)).all()
        assert not np.asarray(out["kept"]).any()


@pytest.mark.parametrize("workers", [2, 5])
def test_sparse_allgather_delivers_each_index_for_its_first_worker(workers):
    for count, (name, acc) in enumerate(helpers.hard_accumulators(workers, SIZE).items()):
        out = helpers.run_once(SELECTOR, ALLGATHER, acc, sc.allreduce.StepState(jnp.int32(count)))
        first = windows.start(int(_step.turn(jnp.int32(count), 0)), workers)
        # Bits, so that subnormals count too.
        total, kept = oracle.sparse_allgather(as_entries(out["sent"]), SIZE, first)
        np.testing.assert_array_equal(out["total"], np.broadcast_to(total, acc.shape), name)
        counts = [len(entries) for entries in kept]
        np.testing.assert_array_equal(out["info"].overflow, counts, name)
        if name == "subnormal":
            continue  # the tests add up what is kept
        assert as_entries(out["kept"]) == kept, name
        if name == "disjoint":
            assert sum(counts) == 0


def test_sparse_allgather_delivers_for_each_worker_in_turn():
    """An index that all select at every step, also where they do in a period of their own."""
    workers, steps = 7, 400
    first = [windows.start(int(_step.turn(jnp.int32(t), 0)), workers) for t in range(steps)]
    for period in (1, 2, 3, 7):
        # In phase with the others, and so with whatever moves on by one.
        for worker in range(workers):
            turns = [t for t in range(0, steps, period) if first[t] == worker]
            waits = np.diff([0, *turns, steps])
            assert waits.max() <= period * windows.longest_wait(steps, 1, workers)

    def train(gradient):
        def step(carry, _):
            residual, state = carry
            acc = residual + gradient
            coo, _, _ = SELECTOR.select(acc, SELECTOR.init(SIZE))
            _, undelivered, state, _ = ALLGATHER.reduce(coo, state, axis="w")
            residual = undelivered.residual(acc, coo)
            return (residual, state), residual

        start = jnp.zeros(SIZE), ALLGATHER.init(SIZE, workers)
        return jax.lax.scan(step, start, length=steps)[1]

    gradient = np.ones((workers, SIZE), np.float32)
    gradient[:, 5] = 1e3
    residuals = sc.simulate(train, axis="w", axis_size=workers)(gradient)[:, :, 5]
    assert np.max(residuals) <= 1e3 * windows.longest_wait(steps, 1, workers)


@pytest.mark.parametrize(
    "factory", [sc.allreduce.sparse_allgather, *helpers.slow(sc.allreduce.topk_a)]
)
def test_a_lossy_codec_loses_nothing(factory):
    allreduce = factory(codec=helpers.lossy_codec())
    acc = helpers.hard_accumulators(4, SIZE)["normal"]
    out = helpers.run_once(SELECTOR, allreduce, acc)
    total, sent, kept = (np.asarray(out[name], np.float64) for name in ("total", "sent", "kept"))
    np.testing.assert_allclose(sent.sum(0) - kept.sum(0), total[0], rtol=0, atol=1e-6)
    # Also a worker's own values are the decoded ones.
    assert (total * 256 == np.round(total * 256)).all()
    assert (np.asarray(out["info"].overflow) >= round(DENSITY * SIZE) // 7).all()
    state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
    assert state.count == 1
    again = helpers.run_once(SELECTOR, allreduce, acc, state)
    assert (np.asarray(again["total"]) != total).any()  # another seed


@pytest.mark.parametrize("factory", [sc.allreduce.topk_a, sc.allreduce.sparse_allgather])
def test_what_is_kept_is_said_slot_by_slot(factory):
    """With the indices of the selection itself, which saves its reader a scatter."""

    def step(values, indices):
        coo = sc.PaddedCOO(values, indices, 10)
        allreduce = factory()
        _, undelivered, _, _ = allreduce.reduce(coo, allreduce.init(10, 2), axis="workers")
        assert undelivered.others.capacity == 0
        return undelivered.slots

    sc.simulate(step, axis_size=2)(jnp.ones((2, 3)), jnp.arange(6, dtype=jnp.int32).reshape(2, 3))


@pytest.mark.parametrize("factory", [sc.allreduce.topk_a, sc.allreduce.sparse_allgather])
def test_one_collective_of_the_pairs(factory):
    for workers in (1, 2, 7, 1024):
        traffic = sc.traffic.of_allreduce(factory(), size=5000, capacity=50, axis_size=workers)
        assert traffic.words == 2 * 50 * (workers - 1)
        assert len(traffic.collectives) == (workers > 1)


@pytest.mark.parametrize("check_vma", [False, *helpers.slow(True)])
@pytest.mark.parametrize(
    "allreduce", [TOPK_A, *helpers.slow(ALLGATHER)], ids=["topk_a", "sparse_allgather"]
)
def test_on_a_mesh_the_total_is_replicated(allreduce, check_vma):
    workers = 4
    mesh = jax.make_mesh(
        (workers,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]

    def step(acc):
        coo, _, _ = SELECTOR.select(acc[0], SELECTOR.init(SIZE))
        total, _, state, info = allreduce.reduce(coo, allreduce.init(SIZE, workers), axis="w")
        info = info._replace(overflow=info.overflow[None], useful=info.useful[None])
        return total, state, info

    everywhere = sc.allreduce.StepState(P()) if allreduce is TOPK_A else P()
    specs = (P(), everywhere, sc.ReduceInfo(P(), P("w"), P(), P(), P("w")))
    run = jax.shard_map(step, mesh=mesh, in_specs=P("w"), out_specs=specs, check_vma=check_vma)
    total, _, info = jax.jit(run)(acc)
    total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
    expected = helpers.run_once(SELECTOR, allreduce, acc)
    np.testing.assert_array_equal(total, expected["total"][0])
    np.testing.assert_array_equal(info.overflow, expected["info"].overflow)
