"""SparCML: what its lemmas and formulas say of words, against programs that are traced or run."""

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc
from sparse_collectives import cost_model, traffic, wire

from ..network import _volumes
from ..training._unions import uniform
from ._claims import Bound, Claim, Elsewhere
from ._words import words_of

PAPER = "SparCML"
AXIS = "workers"
# Of the alpha-beta model of section 5.2: a supercomputer's network.
ARIES = cost_model.network("1.3us", "10GB/s")


def _switch(_seed: int, _quick: bool) -> dict[str, float]:
    """The largest selection whose exchange between two workers is still one of pairs, / n."""
    size, low, high = 4096, 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        traced = _volumes.trace(sc.allreduce.ssar_recursive_double(), size, middle, 2)
        sparse = traffic.of_traced(traced).words == 2 * middle < size or 2 * middle == size
        low, high = (middle, high) if sparse else (low, middle)
    return {
        "switch / n": low / size,
        "formula / n": cost_model.sparse_limit(size) / size,
    }


def useful_pairs(allreduce: sc.SparseAllreduce, workers: int, *, disjoint: bool) -> float:
    """Pairs that a worker sends, without padding, in units of k: the mean of the workers."""
    size, k = 8192, 16
    rows = np.arange(workers)[:, None] if disjoint else np.zeros((workers, 1), np.int64)
    spacing = size // (workers * k)
    # Spread over all regions.
    indices = (np.arange(k) * workers + rows) * spacing
    coo = sc.PaddedCOO(jnp.ones((workers, k)), jnp.asarray(indices, jnp.int32), size)
    state = allreduce.init(size, workers)

    def reduce(coo):
        return allreduce.reduce(coo, state, axis=AXIS)[3].useful

    return float(jnp.mean(sc.simulate(reduce, axis=AXIS, axis_size=workers)(coo))) / (2 * k)


def _both_ends(_seed: int, _quick: bool) -> dict[str, float]:
    pairs = sc.allreduce.ssar_recursive_double()
    return {
        "all in common, k pairs": useful_pairs(pairs, 8, disjoint=False),
        "nothing in common, k pairs": useful_pairs(pairs, 8, disjoint=True),
    }


def _lower_bound(_seed: int, _quick: bool) -> dict[str, float]:
    """Each algorithm beside the least that Lemma 5.1 allows where nothing is in common."""
    names = ("ssar_recursive_double", "ring_sparse", "topk_a")
    made = {name: getattr(sc.allreduce, name)() for name in names}
    ratios = [useful_pairs(made[name], 8, disjoint=True) / 7 for name in names]
    return {"least of pairs / bound": min(ratios), "most of pairs / bound": max(ratios)}


def _split(_seed: int, _quick: bool) -> dict[str, float]:
    rows = [words_of("ssar_split_allgather", 10**6, 0.01, p) for p in (4, 8, 16, 32)]
    found = [row for row in rows if row]
    split = sc.allreduce.ssar_split_allgather()
    return {
        "words of the program / upper bound": max(row["worst"] / row["upper"] for row in found),
        "pairs without padding / upper bound": useful_pairs(split, 8, disjoint=True) / 8,
        "pairs without padding / lower bound": useful_pairs(split, 8, disjoint=False) / (2 * 7 / 8),
    }


def _dense_end(_seed: int, _quick: bool) -> dict[str, float]:
    """The gain over a dense allreduce where the sum goes out dense."""
    gains = []
    for workers in (64, 128, 256):
        rows = [words_of(name, 10**6, 0.02, workers) for name in ("dense", "dsar_split_allgather")]
        dense, sparse = (row["worst"] for row in rows if row)
        gains.append(dense / sparse)
    return {"most of dense / DSAR": max(gains), "least of dense / DSAR": min(gains)}


def _expected_union(seed: int, quick: bool) -> dict[str, float]:
    table = uniform(100_000, 0.01, trials=20 if quick else 100, seed=seed)
    return {"most standard errors off": float(max(abs(row["errors_off"]) for row in table["rows"]))}


def _order(_seed: int, _quick: bool) -> dict[str, float]:
    """Modelled seconds of the three algorithms at three densities, as ratios."""

    def seconds(name: str, k: int) -> float:
        load = cost_model.Workload(16_777_216, k, 8)
        return cost_model.predict(name, load).expected.seconds(ARIES)

    double, split, dense = "ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather"
    few, some, many = 50, 100_000, 4_000_000
    return {
        "50 entries: doubling / split": seconds(double, few) / seconds(split, few),
        "0.6 %: split / doubling": seconds(split, some) / seconds(double, some),
        "24 %: DSAR / split": seconds(dense, many) / seconds(split, many),
    }


def _low_precision(seed: int, quick: bool) -> dict[str, float]:
    """QSGD with 4 bits: how far the mean of many roundings is off, and its words."""
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.standard_normal(2048), jnp.float32)
    codec, draws = wire.qsgd(bits=4, bucket=1024), 200 if quick else 1000
    lost = jax.jit(lambda seed: codec.encode_dense(values, seed)[1])
    errors = np.stack([np.asarray(lost(jnp.uint32(i))) for i in range(draws)])
    # The probability to be rounded up follows from the steps of the value's bucket: the largest
    # magnitude is 7 of them. Where hardly any draw differs there is nothing to see.
    steps = np.abs(values).reshape(2, -1)
    width = steps.max(1, keepdims=True) / 7
    up = np.asarray((steps / width) % 1, np.float64).ravel()
    drawn = draws * up * (1 - up) > 10
    deviation = np.repeat(width, 1024) * np.sqrt(up * (1 - up) / draws)
    off = np.abs(errors.mean(0))[drawn] / deviation[drawn]
    words = codec.encode_dense(values, jnp.uint32(0))[0].size
    return {
        "most standard errors off": float(off.max()),
        "words for a value": words / values.size,
    }


def _atis(_seed: int, _quick: bool) -> dict[str, float]:
    size = 20_000_000
    k = 2 * size // 512
    words = {
        "exact pairs": wire.raw,
        "16-bit pairs": wire.narrow16,
        "pairs of 4-bit values": lambda: wire.qsgd(bits=4),
    }

    def megabytes(codec: sc.Codec) -> float:
        def encode(values, indices):
            return codec.encode(sc.PaddedCOO(values, indices, size), jnp.uint32(0)).message

        shapes = (jax.ShapeDtypeStruct((k,), "float32"), jax.ShapeDtypeStruct((k,), "int32"))
        return 4e-6 * jax.eval_shape(encode, *shapes).size

    return {f"MB, {name}": megabytes(make()) for name, make in words.items()}


CLAIMS = (
    Claim(
        "sparcml/delta",
        "Pairs take less than a dense vector up to N isize / (c + isize) of them.",
        f"{PAPER}, section 5.1",
        "N / 2",
        "where our recursive doubling turns dense: n = 4,096, two workers, all k traced",
        (Bound("switch / n", 0.5, 0.5), Bound("formula / n", 0.5, 0.5)),
        _switch,
        exact=True,
    ),
    Claim(
        "sparcml/lemma-5.1",
        "Without indices in common nobody gets by with less than (P-1) k pairs.",
        f"{PAPER}, Lemma 5.1",
        "at least 1, and reached",
        "P = 8, pairs sent without padding, of `ssar_recursive_double`, `ring_sparse`, `topk_a`",
        (Bound("least of pairs / bound", 1, 1.001),),
        _lower_bound,
        exact=True,
    ),
    Claim(
        "sparcml/recursive-doubling",
        "SSAR_Recursive_double takes from log P to P - 1 times k pairs.",
        f"{PAPER}, section 5.3.1",
        "3 and 7 for P = 8",
        "P = 8, pairs sent without padding, selections all the same and all different",
        (Bound("all in common, k pairs", 3, 3), Bound("nothing in common, k pairs", 7, 7)),
        _both_ends,
        exact=True,
    ),
    Claim(
        "sparcml/split-allgather",
        "SSAR_Split_allgather takes from 2 (P-1)/P to P times k pairs.",
        f"{PAPER}, section 5.3.2",
        "inside both bounds",
        "n = 1e6, density 1 %, P = 4 to 32, slots included; without padding: P = 8",
        (Bound("words of the program / upper bound", most=1),),
        _split,
        exact=True,
        elsewhere=Elsewhere(
            "without the padding of slots",
            (
                Bound("pairs without padding / upper bound", most=1),
                Bound("pairs without padding / lower bound", least=0.99),
            ),
        ),
    ),
    Claim(
        "sparcml/lemma-5.2",
        "Once the sum is dense, sparsity alone gains at most 2 / kappa = 4 over a dense allreduce.",
        f"{PAPER}, Lemma 5.2",
        "at most 4",
        "n = 1e6, density 2 %, P = 64 to 256, DSAR in its dense form",
        (Bound("most of dense / DSAR", most=4), Bound("least of dense / DSAR", least=1)),
        _dense_end,
        exact=True,
    ),
    Claim(
        "sparcml/expected-union",
        "Uniform selections have n (1 - (1 - k/n)^P) distinct indices in the mean.",
        f"{PAPER}, appendix B",
        "the formula",
        "n = 100,000, density 1 %, P = 2 to 64, drawn at random",
        (Bound("most standard errors off", most=4),),
        _expected_union,
    ),
    Claim(
        "sparcml/figure-3-order",
        "Doubling is best for few entries, the split for more, DSAR where sums are dense.",
        f"{PAPER}, section 8.1, Figure 3",
        "all below 1",
        "our programs' words in the alpha-beta model of Aries (1.3 us, 10 GB/s), N = 16M, P = 8",
        (
            Bound("50 entries: doubling / split", most=1),
            Bound("0.6 %: split / doubling", most=1),
            Bound("24 %: DSAR / split", most=1),
        ),
        _order,
        exact=True,
        elsewhere=Elsewhere(
            "but for a tie where sums are dense, as our split turns dense, too",
            (
                Bound("50 entries: doubling / split", most=1),
                Bound("0.6 %: split / doubling", most=1),
                Bound("24 %: DSAR / split", most=1.001),
            ),
        ),
    ),
    Claim(
        "sparcml/qsgd",
        "Rounding at random to 4 bits is right in the mean, and about 8 times shorter.",
        f"{PAPER}, section 6",
        "unbiased; 1/8",
        "2,048 normal values, buckets of 1,024, 1,000 draws",
        (Bound("most standard errors off", most=5), Bound("words for a value", most=0.13)),
        _low_precision,
    ),
    Claim(
        "sparcml/atis-size",
        "With 2 of each 512 of 20M gradients a message has less than 0.5 MB instead of 80 MB.",
        f"{PAPER}, section 8.3",
        "below 0.5 MB",
        "one worker's selection in exact pairs of 8 bytes, as the paper quantizes nothing there; "
        "beside it our other encodings",
        (Bound("MB, exact pairs", most=0.5),),
        _atis,
        exact=True,
    ),
)
