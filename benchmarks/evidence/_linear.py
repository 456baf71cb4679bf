"""SparCML's linear models, whose gradients are sparse by themselves: nothing is selected."""

import json
import tempfile
from pathlib import Path

from examples.linear_models import __main__ as program

from ._runs import quiet


def _trained(model: str, seed: int, quick: bool) -> dict[str, float]:
    """What the example says of a training with a dense exchange and a sparse one."""
    given = {"generate": "url", "rows": 2_000 if quick else 8_000, "method": "sgd", "model": model}
    given |= {"batch": 250, "block": 100, "epochs": 1 if quick else 3, "seed": seed, "workers": 4}
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    argv += ["--exchange", "dense", "ssar_recursive_double"]
    with tempfile.TemporaryDirectory() as folder, quiet():
        numbers = Path(folder) / "numbers.json"
        if program.main([*argv, "--json", str(numbers)]):
            raise RuntimeError("examples.linear_models failed")
        dense, sparse, *_ = json.loads(numbers.read_text(encoding="utf-8"))["runs"].values()
    return {"difference": sparse["difference"], "words": dense["words"][0] / sparse["words"][0]}


def _lossless(seed: int, quick: bool) -> dict[str, float]:
    found = [_trained(model, seed, quick) for model in ("logistic", "svm")]
    return {
        "relative difference of the loss": max(numbers["difference"] for numbers in found),
        "words, dense / sparse": min(numbers["words"] for numbers in found),
    }
