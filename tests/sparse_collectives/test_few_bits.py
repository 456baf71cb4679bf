"""Sums in few bits: codes against an oracle, and that nothing is lost, starves or grows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives._sparse_ops import _bits, _elias_fano
from sparse_collectives.allreduce._parts import _codes, _few_bits
from tests.reference import few_bits as reference
from tests.sparse_collectives.helpers import completed, slow, slow_rows

PAIRS = [(1, 3), *slow((2, 4), (4, 4), (8, 8))]


def encoded(values, bits):
    """The message of one row of values, and what they arrive as."""
    length, block = len(values), _codes.BLOCK
    blocks = jnp.pad(jnp.asarray(values), (0, -length % block)).reshape(1, -1, block)
    message, found = _codes.encode(blocks, jnp.array([length]), length, bits)
    return message, np.asarray(found).reshape(-1)[:length]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("length", [1, 32, 255, 256, 700])
@pytest.mark.one_in(4)
def test_codes_stand_for_what_the_oracle_says(bits, length):
    rng = np.random.default_rng(length)
    values = rng.standard_t(3, length).astype(np.float32)
    values[rng.random(length) < 0.2] = 0
    message, found = encoded(values, bits)
    assert (message.dtype, message.shape) == (jnp.int32, (1, _codes.words(length, bits)))
    received = _codes.decode(message, length, bits)
    np.testing.assert_array_equal(received.reshape(-1)[:length], found)
    if bits < 3:
        # The mean of float32 may round to the other of two neighbors in bfloat16.
        np.testing.assert_allclose(found, reference.arrives(values, bits), rtol=2.0**-7)
    else:
        expected = reference.arrives(values, bits)
        step = np.abs(expected).max() / (2 ** (bits - 1) - 1)
        np.testing.assert_allclose(found, expected, atol=1.01 * step, rtol=2.0**-7)
        # A step that rounds to the other neighbor moves up to an eighth of its block, of three.
        assert np.mean(np.abs(found - expected) > 2.0**-7 * np.abs(expected)) < 0.05


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    "kind", ["normal", "one far above", "heavy tails", "zeros", "huge", "tiny"]
)
def test_an_error_is_smaller_than_its_block(bits, kind):
    """Then feedback bounds the residuals: the error of a block is a contraction of it."""
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.standard_normal(256),
        "one far above": np.where(np.arange(256) == 7, 1e6, 1.0),
        "heavy tails": rng.standard_cauchy(256),
        "zeros": np.zeros(256),
        "huge": 1e37 * rng.standard_normal(256),
        "tiny": 1e-37 * rng.standard_normal(256),
    }[kind].astype(np.float32)
    found = encoded(values, bits)[1].astype(np.float64)
    assert np.isfinite(found).all()
    assert np.linalg.norm(values - found) <= np.linalg.norm(values.astype(np.float64))
    if kind == "normal":
        assert np.linalg.norm(values - found) <= {1: 0.61, 2: 0.36}.get(bits, 0.34) * 16.5
    if kind == "one far above":
        # The others arrive as about what they are, since they do not share its scale.
        assert np.abs(np.delete(found, 7)).max() < 4


@pytest.mark.parametrize("bits", PAIRS)
@pytest.mark.parametrize(("size", "workers"), [(403, 3), *slow_rows((7, 2), (403, 8), (5_000, 16))])
def test_nothing_is_lost_over_steps(bits, size, workers):
    """All receive the same bits, and residuals hold the rest, to the rounding of P sums."""
    selector = sc.select.topk(density=0.1)
    run, states = completed(selector, sc.allreduce.partitioned_topk(bits=bits), size, workers)
    rng, residual = np.random.default_rng(0), np.zeros((workers, size), np.float32)
    largest = []
    for _ in range(3 * workers + 10):
        acc = residual + rng.standard_normal((workers, size)).astype(np.float32)
        out, states = run(acc, states)
        total, residual = np.asarray(out["total"]), np.asarray(out["kept"])
        np.testing.assert_array_equal(total, np.tile(total[0], (workers, 1)))
        missing = acc.sum(0, dtype=np.float64) - total[0] - residual.sum(0, dtype=np.float64)
        most = 2 * workers * 2.0**-24 * (np.abs(acc).sum(0) + np.abs(total[0]))
        assert (np.abs(missing) <= most + 1e-30).all()
        largest.append(np.abs(residual).max())
    # A tenth of the entries goes in a step, so no entry waits for long.
    assert max(largest) < 60


@pytest.mark.parametrize("bits", PAIRS)
def test_one_huge_entry_neither_waits_nor_starves_its_neighbors(bits):
    """An entry of 1e6 among gradients of 1 drains, and all others are delivered meanwhile."""
    size, workers, density = 600, 4, 0.2
    run, states = completed(
        sc.select.topk(density=density), sc.allreduce.partitioned_topk(bits=bits), size, workers
    )
    residual = np.zeros((workers, size), np.float32)
    residual[1, 100] = 1e4
    delivered = np.zeros(size)
    for _ in range(200):
        out, states = run(residual + np.float32(1), states)
        residual, delivered = np.asarray(out["kept"]), delivered + np.asarray(out["total"][0])
    others = np.delete(delivered, 100)
    assert others.min() > 0.5 * 200 * workers
    assert delivered[100] > 1e4
    assert np.abs(residual).max() < 1e3


def test_empty_slots_change_no_scale():
    """Codes of empty slots would make the mean of a block with few entries far too large."""
    size, slots, entries = 1000, 256, 20
    indices = np.full((2, slots), size, np.int32)
    indices[:, :entries] = np.arange(2 * entries).reshape(2, entries)
    acc = np.zeros((2, size), np.float32)
    acc[:, : 2 * entries] = 1
    acc[0, 0] = acc[1, entries] = 1000  # of the owners, exact in the sums

    def step(acc):
        coo = sc.PaddedCOO(jnp.zeros((1,)), jnp.full((1,), size, jnp.int32), size)
        return _few_bits.sum_at(jnp.asarray(indices), acc, coo, "w", _few_bits.FEW)[0].to_dense()

    total = np.asarray(sc.simulate(step, axis="w", axis_size=2)(jnp.asarray(acc))[0])
    ordinary = np.delete(total[: 2 * entries], [0, entries])
    assert (ordinary > 0.5).all()


# With 256 workers and lower densities a worker has so few entries that scales and whole words show.
@pytest.mark.parametrize(
    ("workers", "density"),
    [*((8, x) for x in (0.05, 0.01, 0.003, 0.001)), (64, 0.05), (64, 0.003), (256, 0.05)],
)
def test_bits_of_an_entry_do_not_grow_with_the_workers(workers, density):
    """The words of the cost model, which tests hold equal to the words of traced programs."""
    most = {0.05: 10.5, 0.01: 12.8, 0.003: 14.5, 0.001: 16.2}[density]
    load = sc.cost_model.Workload(10**8, round(1e8 * density), workers)
    words = sc.cost_model.predict("partitioned_topk(1, 3)", load).upper.words
    assert 32 * words / load.selected < most


@pytest.mark.parametrize("width", [5, 65_536, 65_537, 400_000, 2**31 - 1])
@pytest.mark.parametrize("slots", [0, 1, 40, 999])
@pytest.mark.one_in(3)
def test_elias_fano_has_any_number_of_entries(width, slots):
    rng = np.random.default_rng(0)
    for count in {0, min(1, slots), slots // 2, slots}:
        chosen = np.unique(rng.integers(0, width, count))
        if count:
            chosen[-1] = width - 1
        local = np.full(slots, width, np.int64)
        local[: len(chosen)] = chosen
        message = _elias_fano.encode(jnp.asarray(local, jnp.int32), width)
        assert message.shape == (_elias_fano.words(slots, width),)
        assert bool(jnp.any(message != 0)) == bool(len(chosen))
        np.testing.assert_array_equal(_elias_fano.decode(message, slots, width), local)


@pytest.mark.parametrize("density", [0.2, 0.05, 0.01, 0.001, 0.0001])
def test_elias_fano_takes_half_a_bit_more_than_the_entropy(density):
    size = 10**8
    slots = round(size * density)
    entropy = -np.log2(density) - (1 - density) / density * np.log2(1 - density)
    assert entropy < 32 * _elias_fano.words(slots, size) / slots < entropy + 0.7


@pytest.mark.parametrize("bits", [1, 3, 5, 17])
def test_planes_of_bits_have_no_gaps(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 3, 70), np.int32)
    words = jax.jit(_bits.pack_planes, static_argnums=1)(codes, bits)
    assert words.shape == (2, 3, 3 * bits)
    np.testing.assert_array_equal(_bits.unpack_planes(words, bits, 70), codes)


@pytest.mark.parametrize(
    "bits", [4, (1,), (0, 3), (1, 2), (9, 3), (1, 9), (1, 3, 3), "few", True, (1.5, 3)]
)
def test_other_bits_are_an_error(bits):
    with pytest.raises(ValueError, match=r"bits must be 32, 16, 10 or 8.* or a pair .*got"):
        sc.allreduce.partitioned_topk(bits=bits)
