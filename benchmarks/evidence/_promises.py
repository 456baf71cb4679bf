"""What this library promises of every step, and what Algorithm 1 of Ok-Topk delivers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc
from sparse_collectives import PaddedCOO

from ..training._replay import replay
from ..training._simulated_training import exact_top_k
from ._claims import Bound, Claim
from ._recording import DENSITIES, WORKERS, recording

AXIS = "workers"
SIZE, DENSITY = 4096, 0.02
# Several steps, as what found no slot in one of them waits for the next.
STEPS = 6
SMALL = "n = 4,096, density 2 %, P = 6, six steps of heavy-tailed gradients"


def _algorithms() -> dict[str, sc.SparseAllreduce]:
    a = sc.allreduce
    return {
        "topk_a": a.topk_a(),
        "gtopk": a.gtopk(density=DENSITY),
        "spardl": a.spardl(density=DENSITY),
        "ok_topk": a.ok_topk(density=DENSITY),
        "ssar_recursive_double": a.ssar_recursive_double(),
        "ssar_split_allgather": a.ssar_split_allgather(),
        "dsar_split_allgather": a.dsar_split_allgather(),
        "ring_sparse": a.ring_sparse(),
    }


def _step(allreduce: sc.SparseAllreduce, workers: int, density: float = DENSITY):
    """Error feedback on all workers: accumulators in; totals and residuals out."""
    selector = exact_top_k(density)

    def step(acc: jax.Array, state: Any) -> Any:
        coo, _, _ = selector.select(acc, ())
        total, undelivered, state, info = allreduce.reduce(coo, state, axis=AXIS)
        whole = total.to_dense() if isinstance(total, PaddedCOO) else total
        return whole, undelivered.residual(acc, coo), state, info.delivered

    return sc.simulate(step, axis=AXIS, axis_size=workers, in_axes=(0, None))


@functools.lru_cache(maxsize=4)
def _followed(seed: int, quick: bool) -> dict[str, float]:
    """All algorithms over some steps: what is lost, and by how much workers differ."""
    workers = 4 if quick else 6
    rng = np.random.default_rng(seed)
    lost, drift = 0.0, 0.0
    for allreduce in _algorithms().values():
        step, state = _step(allreduce, workers), allreduce.init(SIZE, workers)
        residual = np.zeros((workers, SIZE), np.float32)
        for _ in range(STEPS):
            acc = residual + rng.standard_t(3, (workers, SIZE)).astype(np.float32)
            totals, residual, states, _ = jax.device_get(step(jnp.asarray(acc), state))
            state = jax.tree.map(lambda x: x[0], states)
            drift = max(drift, float(np.abs(totals - totals[0]).max()))
            off = totals[0] + residual.sum(0, dtype=np.float64) - acc.sum(0, dtype=np.float64)
            lost = max(lost, float(np.abs(off).max() / np.abs(acc).max()))
    return {"lost, of the largest entry": lost, "largest difference": drift}


def _lost(seed: int, quick: bool) -> dict[str, float]:
    return {"lost, of the largest entry": _followed(seed, quick)["lost, of the largest entry"]}


def _drift(seed: int, quick: bool) -> dict[str, float]:
    return {"largest difference": _followed(seed, quick)["largest difference"]}


def _semantics(seed: int, quick: bool) -> dict[str, float]:
    """Topk(sum of Topk) in NumPy, which shares no code with what is checked."""
    workers, k = 4 if quick else 6, round(DENSITY * SIZE)
    acc = np.random.default_rng(seed).standard_t(3, (workers, SIZE)).astype(np.float32)
    chosen = np.abs(acc) >= np.sort(np.abs(acc), axis=1)[:, -k][:, None]
    sums = np.where(chosen, acc, 0).sum(0)
    inside = np.abs(sums) >= np.sort(np.abs(sums))[-k]
    allreduce = sc.allreduce.ok_topk(density=DENSITY, slack=float("inf"))
    step = _step(allreduce, workers)
    found = jax.device_get(step(jnp.asarray(acc), allreduce.init(SIZE, workers)))
    totals, residual, _, delivered = found
    kept = np.where(chosen & inside, 0, acc)
    return {
        "entries that differ": float(((totals[0] != 0) != inside).sum()),
        "largest difference of a sum": float(np.abs(totals[0] - np.where(inside, sums, 0)).max()),
        "largest difference of a residual": float(np.abs(residual - kept).max()),
        "entries / k": float(delivered[0]) / k,
    }


def _delivered(seed: int, quick: bool) -> dict[str, float]:
    """The ideal total of recorded selections beside what arrives with the default slots."""
    shares = {}
    for name in ("images", "text"):
        found = recording(name, seed, quick)
        k, missed = max(1, round(DENSITIES[name] * found.size)), []
        workers = min(16, WORKERS[name])
        results = replay(
            found.selections,
            workers=workers,
            density=DENSITIES[name],
            regions="hashed",
            balance="auto",
            period=64,
        )
        for step, result in zip(found.selections, results, strict=True):
            sums = np.zeros(found.size + 1, np.float32)
            np.add.at(sums, step.indices[:workers].ravel(), step.values[:workers].ravel())
            ideal = np.argpartition(np.abs(sums[:-1]), found.size - k)[found.size - k :]
            missed.append(1 - np.isin(ideal, result.indices.ravel()).mean())
        shares[f"missed, {name}"] = float(np.mean(missed))
    return shares


CLAIMS = (
    Claim(
        "ok-topk/semantics",
        "A step delivers the top k of the sum of all top k, and keeps the rest in the residuals.",
        "Ok-Topk, section 3 and Algorithm 1, line 14",
        "Topk(sum of Topk)",
        "n = 4,096, density 2 %, P = 6, room for everything, against NumPy",
        (
            Bound("entries that differ", 0, 0),
            Bound("largest difference of a sum", most=1e-4),
            Bound("largest difference of a residual", most=1e-5),
            Bound("entries / k", 1, 1),
        ),
        _semantics,
    ),
    Claim(
        "library/conserved",
        "Nothing is lost: what is applied and what stays in the residuals is what there was.",
        "This library, README",
        "0, to rounding",
        f"{SMALL}; eight algorithms",
        (Bound("lost, of the largest entry", most=1e-5),),
        _lost,
    ),
    Claim(
        "library/no-drift",
        "The update has the same bits on every worker.",
        "This library, README",
        "0",
        f"{SMALL}; eight algorithms",
        (Bound("largest difference", 0, 0),),
        _drift,
    ),
    Claim(
        "library/delivered",
        "With the default slots 0.0 % of the ideal total waits for a later step.",
        "This library, README",
        "0.0 %",
        "recorded selections of a small VGG (1 %) and an LSTM (2 %), P = 16",
        (Bound("missed, images", most=5e-4), Bound("missed, text", most=5e-4)),
        _delivered,
    ),
)
