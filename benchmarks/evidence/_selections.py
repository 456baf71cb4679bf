"""Selections of real trainings: fill-in, balance, thresholds, missing rows."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from sparse_collectives import cost_model
from sparse_collectives.allreduce._parts import _hashed

from ..training._measures import DENSITIES
from ..training._replay import received, replay, unevenness
from ._code import Points
from ._measured import read
from ._recording import DENSITIES as SELECTED
from ._recording import ROW_CHOICES, WORKERS, recorder, recording, top_of_sum

LAYERS, MATRICES = "top-k of each layer", "mean of matrices"
# Longer runs of the same networks on other data, with one seed.
LONG, QUALITY, LOADS = "fill_in.json", "select_quality.json", "load_balance.json"
NETWORKS = ("images", "text")
# Steps for which a threshold is used, tau'.
PERIOD = 32
# Points of a line over rows.
_RANKS = 32
Owner = Callable[[np.ndarray], np.ndarray]


def _uniform(name: str, size: int, workers: int) -> float:
    """The union of uniform selections, / n."""
    k = max(1, round(SELECTED[name] * size))
    return cost_model.expected_union(size, k, workers) / size


def _settled(name: str) -> dict[str, float]:
    """The last quarter of 120 steps, from `benchmarks.training.fill_in`: it has settled."""
    rows = [row for rows in read(LONG)["runs"] for row in rows]
    (row,) = [row for row in rows if (row["run"], row["workers"]) == (name, WORKERS[name])]
    assert row["steps"] == 120
    union = row["union"]["last_quarter"]
    return {
        "union / n": union,
        "of uniform selections": union / row["uniform"],
        "union / k": union / row["density"],
    }


def _expansion() -> dict[str, float]:
    return {f"{name}, union / k": _settled(name)["union / k"] for name in NETWORKS}


def _grows(seed: int, quick: bool) -> dict[str, float]:
    """The smallest and the largest growth of the union as the number of workers doubles."""
    ratios = []
    for mean in (recording(name, seed, quick).unions.mean(0) for name in NETWORKS):
        doubled = mean[[p - 1 for p in (1, 2, 4, 8, 16, 32) if p <= len(mean)]]
        ratios += (doubled[1:] / doubled[:-1]).tolist()
    return {"least growth as P doubles": min(ratios), "most": max(ratios)}


@functools.lru_cache(maxsize=8)
def _received(regions: str, workers: int, name: str, seed: int, quick: bool) -> float:
    """The entries that the fullest owner receives, as the mean of the recorded steps."""
    steps = recording(name, seed, quick).selections
    given = {"workers": workers, "density": SELECTED[name], "period": 64}
    results = replay(steps, regions=regions, balance="auto", **given)
    pairs = [(np.asarray(x.indices)[:workers], y.boundaries) for x, y in zip(steps, results)]
    return float(np.mean([received(*pair).max() for pair in pairs]))


def _balanced_reduce(seed: int, quick: bool) -> dict[str, float]:
    cases = [(*case, seed, quick) for case in ((16, "text"), (32, "text"), (32, "scaled"))]
    few, many, scaled = (_received("equal", *x) / _received("balanced", *x) for x in cases)
    (vgg,) = [
        {(row["workers"], row["regions"]): row["received_of_k"] for row in run["rows"]}
        for run in read(LOADS)["runs"]
        if (run["run"], run["case"]) == ("images", "as trained")
    ]
    return {
        "naive / balanced, P = 16": few,
        "a small VGG, P = 16": vgg[16, "equal"] / vgg[16, "balanced"],
        "P = 32 / P = 16": many / few,
        "one layer 100 times as large": scaled,
    }


def _balanced_volume(seed: int, quick: bool) -> dict[str, float]:
    k = SELECTED["text"] * recording("text", seed, quick).size
    loads = [_received("balanced", workers, "text", seed, quick) for workers in (16, 32)]
    return {"fullest owner, k entries": max(loads) / k}


def _missing(seed: int, quick: bool) -> dict[str, float]:
    rates = recording("text", seed, quick).missing.rates("accumulator", LAYERS)[MATRICES]
    (long,) = [run for run in read(QUALITY)["runs"] if run["run"] == "text"]
    late = long["missing_rows"]["accumulator"][LAYERS][MATRICES]
    assert long["steps"] == 600
    return {
        "600 steps: at 0.1 %": late[0],
        "600 steps: at 5 %": late[-1],
        "least fall from density to density": float(-np.diff(rates).max()),
        "30 steps: at 0.1 %": rates[DENSITIES.index(0.001)],
        "30 steps: at 5 %": rates[DENSITIES.index(0.05)],
    }


def _none_missing(seed: int, quick: bool) -> dict[str, float]:
    missing, both = recording("text", seed, quick).missing, ("adtopk", "every nonzero entry")
    rows, unseen = (max(missing.rates("accumulator", name)["all rows"]) for name in both)
    return {"rows missed that have entries": rows - unseen}


def _magnitude(seed: int, quick: bool) -> dict[str, float]:
    shares = recording("text", seed, quick).by_row
    early, late = np.split(shares, [len(shares) // 2])
    return {
        "most of ADTopk / top-k": max(shares),
        "second half / first half": float(late.mean()) / float(early.mean()),
    }


def _same(seed: int, quick: bool) -> dict[str, float]:
    return {
        "least share in common": min(x for n in NETWORKS for x in recording(n, seed, quick).same)
    }


def reused(exact: np.ndarray, period: int = PERIOD) -> np.ndarray:
    """The threshold that Ok-Topk uses at each step: the exact one at the start of its period."""
    steps = np.arange(len(exact))
    return exact[steps - steps % period]


def _threshold(name: str, guess: str, seed: int, quick: bool) -> Points:
    """A guessed threshold over the exact one, by step."""
    exact, gaussian = np.array(recording(name, seed, quick).thresholds).T
    guessed = gaussian if guess == "gaussian" else reused(exact)
    return np.arange(1, len(exact) + 1), guessed / exact


def _union(name: str, seed: int, quick: bool) -> Points:
    unions = recording(name, seed, quick).unions.mean(0)
    return np.arange(1, len(unions) + 1), unions


def _uniform_union(name: str) -> Points:
    size, workers = recorder(name, 0).size, np.arange(1, WORKERS[name] + 1)
    return workers, np.array([_uniform(name, size, int(p)) for p in workers])


def _missing_by_density(name: str, seed: int, quick: bool) -> Points:
    rates = recording("text", seed, quick).missing.rates("accumulator", name)
    return 100 * np.array(DENSITIES), 100 * np.array(rates[MATRICES])


def _row_sums(choice: str, seed: int, quick: bool) -> Points:
    """The sums of all rows at the last recorded step, the largest first, by rank in percent."""
    _, sums = recording("text", seed, quick).rows[-1]
    ordered = np.sort(sums[ROW_CHOICES.index(choice)])[::-1]
    ranks = np.linspace(0, len(ordered) - 1, _RANKS).round().astype(int)
    return 100 * ranks / (len(ordered) - 1), ordered[ranks]


def _mean_sums(choice: str, seed: int, quick: bool) -> Points:
    """The mean of the sums of all rows, by step."""
    steps, sums = zip(*recording("text", seed, quick).rows, strict=True)
    row = ROW_CHOICES.index(choice)
    return np.array(steps) + 1, np.array([x[row].mean() for x in sums])


# The entries of each owner in the scaled training, for which equal regions are worst. They are
# assigned here without an allreduce, so that any number of workers is cheap.


def owners(regions: str, size: int, first: list[np.ndarray], step: int) -> Owner:
    """The owner of each index at a step: hashes depend on its number, cuts on the first step."""
    workers = len(first)
    if regions == "hashed":
        given = size, workers, jnp.int32(step)
        of = _hashed.row_and_owner
        return lambda indices: np.asarray(of(jnp.asarray(indices, jnp.int32), *given)[1])
    edges = np.arange(workers + 1) * size // workers
    if regions == "balanced":
        # The paper's boundaries: the mean of those that are even for each worker.
        own = [row[np.arange(1, workers) * len(row) // workers] for row in first]
        edges[1:-1] = np.floor(np.mean(own, axis=0))
    return lambda indices: np.searchsorted(edges, indices, side="right") - 1


def load(phase: str, chosen: list[np.ndarray], delivered: np.ndarray, owner: Owner) -> np.ndarray:
    """Entries that each owner gets from the others, or sends to all as its result, ``[P]``."""
    if phase == "gather":
        return np.bincount(owner(delivered), minlength=len(chosen))
    counts = np.stack([np.bincount(owner(row), minlength=len(chosen)) for row in chosen])
    np.fill_diagonal(counts, 0)
    return counts.sum(0)


@functools.lru_cache(maxsize=16)
def _dealt(workers: int, seed: int, quick: bool) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """The first workers' selections, and the top k of their sum, for each recorded step."""
    found, steps = recording("scaled", seed, quick), []
    for coo in found.selections:
        chosen = [row[row < found.size] for row in np.asarray(coo.indices)[:workers]]
        steps.append((chosen, top_of_sum(coo, workers, SELECTED["scaled"])))
    return steps


def _fullest(regions: str, phase: str, seed: int, quick: bool) -> Points:
    """The fullest owner over the mean, averaged over the recorded steps, by workers."""
    size, means, workers = recording("scaled", seed, quick).size, [], (2, 4, 8, 16, 32)
    for steps in (_dealt(p, seed, quick) for p in workers):
        given = [(x, owners(regions, size, steps[0][0], i)) for i, x in enumerate(steps)]
        means.append(np.mean([unevenness(load(phase, *x, owner)) for x, owner in given]))
    return np.array(workers), np.array(means)
