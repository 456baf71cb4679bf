"""SparDL: its messages, what it cuts off and who keeps it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives.allreduce._parts import _halving, _hashed
from tests.reference import spardl as oracle
from tests.sparse_collectives import helpers

SIZE, DENSITY = 403, 0.05
K = round(DENSITY * SIZE)
SELECTOR = sc.select.topk(density=DENSITY)
SPARDL = sc.allreduce.spardl(density=DENSITY)


def as_entries(vectors):
    return [{int(i): v[i] for i in np.flatnonzero(v)} for v in np.asarray(vectors)]


def check_against_the_oracle(allreduce, workers, k, steps=(0,)):
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        if name == "subnormal":
            continue  # sums of them may be flushed to zero
        for step in steps:
            state = sc.allreduce.StepState(jnp.int32(step))
            out = helpers.run_once(SELECTOR, allreduce, acc, state)
            indices = jnp.arange(SIZE, dtype=jnp.int32)
            _, owner = _hashed.row_and_owner(indices, SIZE, workers, jnp.int32(step))
            selected = as_entries(out["sent"])
            total, kept, lengths = oracle.spardl(selected, np.asarray(owner), k)
            np.testing.assert_array_equal(out["total"], np.broadcast_to(total, acc.shape), name)
            np.testing.assert_allclose(out["kept"], kept, rtol=1e-6, err_msg=name)
            info = out["info"]
            assert (np.asarray(info.overflow) == 0).all(), name
            assert (np.asarray(info.delivered) == (total != 0).sum()).all(), name
            smallest = np.abs(total[total != 0]).min(initial=np.inf)
            assert info.threshold[0] == np.float32(0 if np.isinf(smallest) else smallest), name
            useful = 2 * np.sum(lengths[:-1], axis=0) + 2 * (workers - 1) * np.asarray(lengths[-1])
            np.testing.assert_allclose(info.useful, useful, rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 2, 5, 7, 8])
def test_it_is_the_exchange_of_the_paper(workers):
    # k is no multiple of any of them but 2, 4 and 5.
    check_against_the_oracle(SPARDL, workers, K, steps=(0, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "k"), [(5, 3), (8, 3), (6, 13), (7, 1)])
def test_of_a_larger_selection_the_largest_take_part(workers, k):
    check_against_the_oracle(sc.allreduce.spardl(density=k / SIZE), workers, k)


@pytest.mark.slow
def test_a_smaller_selection_takes_part_whole():
    check_against_the_oracle(sc.allreduce.spardl(density=4 * DENSITY), 3, round(4 * DENSITY * SIZE))


@pytest.mark.parametrize("workers", [*range(1, 70), 100, 384, 1000, 1024])
def test_every_part_of_a_block_reaches_its_owner_once(workers):
    plan = _halving.make_plan(10**6, 10**4, workers, 10**4)
    assert len(plan.rounds) == math.ceil(math.log2(workers))
    assert sum(step.blocks for step in plan.rounds) == workers - 1
    # From whom the part of its own block at each distance came: it is the same for all.
    parts = [[0] for _ in range(workers)]
    for step in plan.rounds:
        assert step.blocks <= step.distance < len(parts) <= 2 * step.distance
        going, parts = parts[step.distance :], parts[: step.distance]
        assert len(going) == step.blocks
        for place, sources in enumerate(going):
            parts[place] += [source + step.distance for source in sources]
    assert len(parts) == 1
    assert sorted(parts[0]) == list(range(workers))


def words_and_messages(density, size, workers, codec=None):
    k = max(1, round(density * size))
    allreduce = sc.allreduce.spardl(density=density, codec=codec)
    traffic = sc.traffic.of_allreduce(allreduce, size=size, capacity=k, axis_size=workers)
    return traffic.words, [each.kind for each in traffic.collectives]


@pytest.mark.parametrize(
    "workers",
    [3, *helpers.slow(2, 5, 7, 8, 48, 1000)],
)
@pytest.mark.parametrize("density", [0.01, *helpers.slow(1e-5)])
def test_words_and_messages_are_those_of_the_formula(density, workers):
    size = 10**5
    words, kinds = words_and_messages(density, size, workers)
    k = round(density * size)
    assert words == 4 * math.ceil(k / workers) * (workers - 1)
    if k % workers == 0:
        assert words == 4 * k * (workers - 1) / workers
    rounds = math.ceil(math.log2(workers))
    assert kinds == ["collective_permute"] * rounds + ["all_gather"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "narrow16", "narrow8"])
def test_a_codec_encodes_every_message(name):
    workers, size, density = 6, 10**5, 0.01
    codec = getattr(sc.wire, name)()
    words, _ = words_and_messages(density, size, workers, codec)
    slots, width = math.ceil(density * size / workers), math.ceil(size / workers)
    assert words == 2 * (workers - 1) * sc.cost_model.codec_sizes(name).pairs(slots, width)


@pytest.mark.slow
def test_a_lossy_codec_loses_nothing():
    allreduce = sc.allreduce.spardl(density=DENSITY, codec=helpers.lossy_codec())
    for name in ("normal", "one worker", "same on all"):
        acc = helpers.hard_accumulators(3, SIZE)[name]
        out = helpers.run_once(SELECTOR, allreduce, acc)
        total, sent, kept = (np.asarray(out[n], np.float64) for n in ("total", "sent", "kept"))
        np.testing.assert_allclose(sent.sum(0) - kept.sum(0), total[0], rtol=0, atol=1e-6)
        assert (total == total[0]).all()
        assert (total * 256 == np.round(total * 256)).all()
    assert np.asarray(out["info"].overflow).sum() > 0


def test_its_total_is_typed_as_replicated():
    mesh = jax.sharding.AbstractMesh((6,), ("w",), axis_types=(AxisType.Auto,))

    def step(values, indices):
        state = SPARDL.init(SIZE, 6)
        return SPARDL.reduce(sc.PaddedCOO(values, indices, SIZE), state, axis="w")[0]

    run = jax.shard_map(step, mesh=mesh, in_specs=P("w"), out_specs=P(), check_vma=True)
    entries = [jax.ShapeDtypeStruct((6 * K,), dtype) for dtype in (jnp.float32, jnp.int32)]
    assert jax.eval_shape(run, *entries).size == SIZE


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_the_total_is_replicated(check_vma):
    helpers.check_replicated_on_a_mesh(SELECTOR, SPARDL, SIZE, check_vma=check_vma)
