"""SparCML: its lemmas and formulas on words, against programs that are traced or run."""

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc
from sparse_collectives import cost_model, traffic, wire

from ..network import _volumes
from ..training._unions import uniform
from ._words import least_and_most, rows_of

AXIS = "workers"
WORKERS = 8


def _switch() -> dict[str, float]:
    """The largest selection for which two workers still exchange pairs, / n."""
    size, low, high = 4096, 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        traced = _volumes.trace(sc.allreduce.published.ssar_recursive_double(), size, middle, 2)
        sparse = traffic.of_traced(traced).words == 2 * middle < size or 2 * middle == size
        low, high = (middle, high) if sparse else (low, middle)
    # Section 5.1: from n / 2 pairs of a float32 and an int32 on, a dense message is shorter.
    return {"switch / n": low / size, "formula / n": 1 / 2}


def useful_pairs(name: str, *, disjoint: bool) -> float:
    """Pairs that a worker sends, without padding, in units of k, as the mean of the workers."""
    size, k, allreduce = 8192, 16, cost_model.ALGORITHMS[name].factory()
    rows = np.arange(WORKERS)[:, None] if disjoint else np.zeros((WORKERS, 1), np.int64)
    # Spread over all regions.
    indices = (np.arange(k) * WORKERS + rows) * (size // (WORKERS * k))
    coo = sc.PaddedCOO(jnp.ones((WORKERS, k)), jnp.asarray(indices, jnp.int32), size)
    state = allreduce.init(size, WORKERS)

    def reduce(coo):
        return allreduce.reduce(coo, state, axis=AXIS)[3].useful

    return float(jnp.mean(sc.simulate(reduce, axis=AXIS, axis_size=WORKERS)(coo))) / (2 * k)


def _both_ends() -> dict[str, float]:
    cases = {"all": False, "nothing": True}
    pairs = {x: useful_pairs("ssar_recursive_double", disjoint=y) for x, y in cases.items()}
    return {f"{name} in common, k pairs": value for name, value in pairs.items()}


def _lower_bound() -> dict[str, float]:
    """Each algorithm's pairs over the minimum in Lemma 5.1, for disjoint selections."""
    names = ("ssar_recursive_double", "ring_sparse", "topk_a")
    ratios = [useful_pairs(name, disjoint=True) / (WORKERS - 1) for name in names]
    return least_and_most("pairs / bound", ratios)


def _split() -> dict[str, float]:
    rows = rows_of("ssar_split_allgather", (4, 8, 16, 32))
    most, least = (useful_pairs("ssar_split_allgather", disjoint=x) for x in (True, False))
    return {
        "words of the program / upper bound": max(row["worst"] / row["upper"] for row in rows),
        "pairs without padding / upper bound": most / WORKERS,
        "pairs without padding / lower bound": least / (2 * (WORKERS - 1) / WORKERS),
    }


def _dense_end() -> dict[str, float]:
    """The gain over a dense allreduce if the sum is sent dense."""
    names = ("dense", "dsar_split_allgather")
    pairs = zip(*(rows_of(name, (64, 128, 256), 0.02) for name in names), strict=True)
    gains = [dense["worst"] / sparse["worst"] for dense, sparse in pairs]
    return least_and_most("dense / DSAR", gains)


def _expected_union(seed: int, quick: bool) -> dict[str, float]:
    table = uniform(100_000, 0.01, trials=20 if quick else 100, seed=seed)
    return {"most standard errors off": float(max(abs(row["errors_off"]) for row in table["rows"]))}


def _low_precision(seed: int, quick: bool) -> dict[str, float]:
    """QSGD with 4 bits: how far the mean of many roundings is off, and its words."""
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.standard_normal(2048), jnp.float32)
    codec, draws = wire.qsgd(bits=4, bucket=1024), 200 if quick else 1000
    lost = jax.jit(lambda seed: codec.encode_dense(values, seed)[1])
    errors = np.stack([np.asarray(lost(jnp.uint32(i))) for i in range(draws)])
    # The probability of rounding up follows from the steps of the value's bucket, whose largest
    # magnitude is 7 steps. Values for which hardly any draw differs show nothing, and are left out.
    steps = np.abs(values).reshape(2, -1)
    width = steps.max(1, keepdims=True) / 7
    up = np.asarray((steps / width) % 1, np.float64).ravel()
    drawn = draws * up * (1 - up) > 10
    deviation = np.repeat(width, 1024) * np.sqrt(up * (1 - up) / draws)
    off = np.abs(errors.mean(0))[drawn] / deviation[drawn]
    words = codec.encode_dense(values, jnp.uint32(0))[0].size / values.size
    return {"most standard errors off": float(off.max()), "words for a value": words}


def _atis() -> dict[str, float]:
    size = 20_000_000
    shapes = [jax.ShapeDtypeStruct((2 * size // 512,), dtype) for dtype in ("float32", "int32")]
    codecs = {"exact pairs, short indices": wire.elias_fano(), "pairs of 8 bytes": wire.raw()}
    codecs |= {"16-bit pairs": wire.narrow16()}
    codecs |= {"pairs of 4-bit values": wire.qsgd(bits=4)}

    def megabytes(codec: sc.Codec) -> float:
        def encode(values, indices):
            return codec.encode(sc.PaddedCOO(values, indices, size), jnp.uint32(0)).message

        return 4e-6 * jax.eval_shape(encode, *shapes).size

    return {f"MB, {name}": megabytes(codec) for name, codec in codecs.items()}
