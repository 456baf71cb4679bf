"""Claims of the papers on accuracy, thresholds and convergence, checked on small networks."""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from examples.linear_models import __main__ as linear_models
from sparse_collectives import cost_model

from . import _runs
from ._code import Points
from ._runs import DENSITY, digits, on_regression, quiet, run, xi

COUNTS = ("local", "global")
# A step consists of the exchange alone, since computing depends on the machine and not on the link.
LINK = cost_model.network("0.1ms", "100Mbit")


def _points_above(sparse: str, other: str, seed: int, quick: bool) -> dict[str, float]:
    """How many points the accuracy of the first is above the second's, and the first's accuracy."""
    given = [("noisy digits", name, seed, quick) for name in (sparse, other)]
    one, two = (100 * run(*each).values[-1] for each in given)
    return {"points above": one - two, f"{sparse}, %": one}


def _worse(sparse: str, seed: int, quick: bool) -> dict[str, float]:
    """By how many percent the loss is above the loss of the dense AdamW."""
    one, other = (run("text", name, seed, quick).values[-1] for name in (sparse, "dense"))
    return {"% above dense": 100 * (one / other - 1), "loss": one}


def counts(name: str, seed: int, quick: bool) -> np.ndarray:
    """The entries that a worker selects, and those delivered, at each step, / k."""
    return run("digits", name, seed, quick).counts / round(DENSITY * _size(digits().init(0)))


def _size(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _deviation(name: str, which: str, seed: int, quick: bool) -> dict[str, float]:
    """How far a count of Ok-Topk as published is from k, after the first 10 % of the steps."""
    shares = counts(name, seed, quick)[COUNTS.index(which)]
    late = shares[max(1, len(shares) // 10) :]
    return {
        f"deviation of the {which} count": float(np.abs(late - 1).mean()),
        "mean count, k": float(late.mean()),
    }


def _gaussian(seed: int, quick: bool) -> dict[str, float]:
    shares = counts("gaussian", seed, quick)[0]
    tenth, quarter = (max(1, len(shares) // parts) for parts in (10, 4))
    return {
        "first tenth, k": float(shares[:tenth].mean()),
        "last quarter, k": float(shares[-quarter:].mean()),
    }


def _xi_below(model: str, seed: int, quick: bool) -> dict[str, float]:
    """The xi of a training with a constant learning rate."""
    found = xi(model, 0.01, False, seed, quick)
    return {
        "mean xi": float(found.mean()),
        "mean xi, first half": float(found[: len(found) // 2].mean()),
        "largest xi": float(found.max()),
    }


def _xi_falls(seed: int, quick: bool) -> dict[str, float]:
    stays, falls = (xi("lstm", 0.01, falls, seed, quick) for falls in (False, True))
    last = len(stays) * 9 // 10
    return {"falling / constant rate, last tenth": float(falls[last:].mean() / stays[last:].mean())}


def _xi_density(seed: int, quick: bool) -> dict[str, float]:
    one, two = (xi("lstm", density, False, seed, quick) for density in (0.01, 0.02))
    return {"xi at 2 % / at 1 %": float(two.mean() / one.mean())}


def _two_bits(seed: int, quick: bool) -> dict[str, float]:
    coarse, exact = (on_regression(bits, seed, quick).values for bits in (2, None))
    return {
        "loss / loss with exact values": coarse[-1] / exact[-1],
        "loss / loss before": coarse[-1] / coarse[0],
    }


def _line_of_counts(name: str, which: str, seed: int, quick: bool) -> Points:
    found = counts(name, seed, quick)[COUNTS.index(which)]
    return np.arange(1, len(found) + 1), found


def _line_of_xi(model: str, rate: str, seed: int, quick: bool) -> Points:
    found = xi(model, 0.01, rate == "falls", seed, quick)
    return np.arange(1, len(found) + 1), found


# Accuracy or loss over the predicted time.


def seconds(algorithm: str, density: float, size: int, workers: int) -> float:
    """The predicted time of the exchange of a step over LINK."""
    load = cost_model.Workload(size, max(1, round(density * size)), workers)
    return cost_model.predict(algorithm, load).expected.seconds(LINK)


def _line_over_time(
    task: str, name: str, algorithm: str, density: float, seed: int, quick: bool
) -> Points:
    """The accuracy on the digits, or the loss of the text, along a training."""
    found = run(task, name, seed, quick)
    y, made, workers = found.losses, _runs.characters("transformer"), _runs.TEXT_WORKERS
    if task == "digits":
        y, made, workers = 100 * np.array(found.values[1:]), digits(), _runs.WORKERS
    step = seconds(algorithm, density, _size(made.init(seed)), workers)
    return np.array(found.steps[1:]) * step, np.array(y)


# SparCML's linear models, whose gradients are already sparse, so nothing is selected.


def _lossless(seed: int, quick: bool) -> dict[str, float]:
    """The results of the example with a dense exchange and with a sparse one."""
    differences, words = [], []
    given = {"generate": "url", "rows": 2_000 if quick else 8_000, "method": "sgd", "seed": seed}
    given |= {"batch": 250, "block": 100, "epochs": 1 if quick else 3, "workers": 4}
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    argv += ["--exchange", "dense", "ssar_recursive_double"]
    for model in ("logistic", "svm"):
        with tempfile.TemporaryDirectory() as folder, quiet():
            numbers = Path(folder) / "numbers.json"
            if linear_models.main([*argv, "--model", model, "--json", str(numbers)]):
                raise RuntimeError("examples.linear_models failed")
            dense, sparse, *_ = json.loads(numbers.read_text(encoding="utf-8"))["runs"].values()
        differences.append(sparse["difference"])
        words.append(dense["words"][0] / sparse["words"][0])
    return {
        "relative difference of the loss": max(differences),
        "words, dense / sparse": min(words),
    }
