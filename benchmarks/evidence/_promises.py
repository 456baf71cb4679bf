"""The promises of this library for every step, and what Algorithm 1 of Ok-Topk delivers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc

from ..training._replay import on_workers, replay
from ..training._simulated_training import exact_top_k
from ._recording import DENSITIES, WORKERS, recording, top_of_sum

SIZE, DENSITY = 4096, 0.02
# Several steps, since entries that find no slot stay in the residual for the next one.
STEPS = 6
_GATHERED = sc.allreduce.topk_a()


def _algorithms() -> list[sc.SparseAllreduce]:
    names = ("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather", "ring_sparse")
    ours, given = sc.allreduce, {"density": DENSITY}
    first = [ours.topk_a(), ours.published.gtopk(**given), ours.spardl(**given)]
    others = [getattr(ours.published, name)() for name in names]
    return [*first, ours.ok_topk(**given), *others]


@functools.lru_cache(maxsize=4)
def _followed(seed: int, quick: bool) -> dict[str, float]:
    """All algorithms over some steps: the loss of mass, and the differences between workers."""
    return _all_algorithms(4 if quick else 6, np.random.default_rng(seed))


def _all_algorithms(workers: int, rng: np.random.Generator) -> dict[str, float]:
    lost, drift = 0.0, 0.0
    for allreduce in _algorithms():
        step = on_workers(allreduce, workers, exact_top_k(DENSITY))
        state = allreduce.init(SIZE, workers)
        residual = np.zeros((workers, SIZE), np.float32)
        for _ in range(STEPS):
            acc = residual + rng.standard_t(3, (workers, SIZE)).astype(np.float32)
            _, totals, residual, state, _ = jax.device_get(step(jnp.asarray(acc), state))
            drift = max(drift, float(np.abs(totals - totals[0]).max()))
            off = totals[0] + residual.sum(0, dtype=np.float64) - acc.sum(0, dtype=np.float64)
            lost = max(lost, float(np.abs(off).max() / np.abs(acc).max()))
    return {"lost, of the largest entry": lost, "largest difference": drift}


def _of_followed(name: str, seed: int, quick: bool) -> dict[str, float]:
    return {name: _followed(seed, quick)[name]}


def _any_workers(seed: int, quick: bool) -> dict[str, float]:
    """The worst over numbers of workers that are no powers of two, and one worker."""
    rng = np.random.default_rng(seed)
    each = [_all_algorithms(workers, rng) for workers in ((3,) if quick else (1, 3, 5, 6, 7))]
    return {name: max(found[name] for found in each) for name in each[0]}


def _bfloat16(seed: int, quick: bool) -> dict[str, float]:
    """Sums of bfloat16, compared with sums of what the workers gave up, in float64."""
    workers, rng = 4 if quick else 6, np.random.default_rng(seed)
    error, drift, given = 0.0, 0.0, {"density": DENSITY}
    for allreduce in (sc.allreduce.ok_topk(**given), sc.allreduce.spardl(**given), _GATHERED):
        step = on_workers(allreduce, workers, exact_top_k(DENSITY))
        acc = jnp.asarray(rng.standard_t(3, (workers, SIZE)), jnp.bfloat16)
        found = jax.device_get(step(acc, allreduce.init(SIZE, workers)))
        totals, residual = (np.asarray(x, np.float64) for x in found[1:3])
        exact = (np.asarray(acc, np.float64) - residual).sum(0)
        drift = max(drift, float(np.abs(totals - totals[0]).max()))
        sums = exact != 0
        off = np.abs(totals[0] - exact)[sums] / np.abs(exact[sums])
        error = max(error, float(off.max()))
    return {"largest error of a sum, of the sum": error, "largest difference": drift}


def _semantics(seed: int, quick: bool) -> dict[str, float]:
    """Topk(sum of Topk) in NumPy, which shares no code with the library."""
    workers, k = 4 if quick else 6, round(DENSITY * SIZE)
    acc = np.random.default_rng(seed).standard_t(3, (workers, SIZE)).astype(np.float32)
    chosen = np.abs(acc) >= np.sort(np.abs(acc), axis=1)[:, -k][:, None]
    sums = np.where(chosen, acc, 0).sum(0)
    inside = np.abs(sums) >= np.sort(np.abs(sums))[-k]
    allreduce = sc.allreduce.ok_topk(density=DENSITY, slack=float("inf"))
    step = on_workers(allreduce, workers, exact_top_k(DENSITY))
    found = jax.device_get(step(jnp.asarray(acc), allreduce.init(SIZE, workers)))
    _, totals, residual, _, info = found
    kept = np.where(chosen & inside, 0, acc)
    return {
        "entries that differ": float(((totals[0] != 0) != inside).sum()),
        "largest difference of a sum": float(np.abs(totals[0] - np.where(inside, sums, 0)).max()),
        "largest difference of a residual": float(np.abs(residual - kept).max()),
        "entries / k": float(info.delivered[0]) / k,
    }


def _delivered(seed: int, quick: bool) -> dict[str, float]:
    """The share of the ideal total of recorded selections that the default slots miss."""
    shares = {}
    for name in ("images", "text"):
        found, missed = recording(name, seed, quick), []
        workers = min(16, WORKERS[name])
        given = {"workers": workers, "density": DENSITIES[name], "period": 64}
        results = replay(found.selections, **given, regions="hashed", balance="auto")
        for step, result in zip(found.selections, results, strict=True):
            ideal = top_of_sum(step, workers, DENSITIES[name])
            missed.append(1 - np.isin(ideal, result.indices.ravel()).mean())
        shares[f"missed, {name}"] = float(np.mean(missed))
    return shares
