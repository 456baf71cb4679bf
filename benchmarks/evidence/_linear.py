"""SparCML's linear models, whose gradients are sparse by themselves: nothing is selected."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from examples.linear_models import __main__ as program

from ._claims import Bound, Claim
from ._runs import quiet

PAPER = "SparCML, section 8.2"
URL = "rows like those of URL, 3.2M features, four workers"


@functools.lru_cache(maxsize=8)
def _trained(model: str, seed: int, quick: bool) -> dict[str, Any]:
    """What the example says of a training with a dense exchange and a sparse one."""
    rows = 2_000 if quick else 8_000
    given = {"generate": "url", "rows": rows, "method": "sgd", "model": model, "seed": seed}
    given |= {"batch": 250, "block": 100, "epochs": 1 if quick else 3}
    with tempfile.TemporaryDirectory() as folder, quiet():
        numbers = Path(folder) / "numbers.json"
        given |= {"json": numbers}
        argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        argv += ["--workers", "4", "--exchange", "dense", "ssar_recursive_double"]
        if program.main(argv):
            raise RuntimeError("examples.linear_models failed")
        return json.loads(numbers.read_text(encoding="utf-8"))


def _compared(model: str, seed: int, quick: bool) -> dict[str, float]:
    runs = list(_trained(model, seed, quick)["runs"].values())
    dense, sparse = runs[0], runs[1]
    return {
        "relative difference of the loss": sparse["difference"],
        "words, dense / sparse": dense["words"][0] / sparse["words"][0],
    }


def _lossless(seed: int, quick: bool) -> dict[str, float]:
    found = [_compared(model, seed, quick) for model in ("logistic", "svm")]
    return {
        "relative difference of the loss": max(
            numbers["relative difference of the loss"] for numbers in found
        ),
        "words, dense / sparse": min(numbers["words, dense / sparse"] for numbers in found),
    }


CLAIMS = (
    Claim(
        "sparcml/lossless",
        "Logistic regression and SVM lose nothing by a sparse exchange.",
        PAPER,
        "the same loss",
        f"{URL}: SGD, batches of 250 rows; the words of an epoch beside it",
        (Bound("relative difference of the loss", most=1e-5),),
        _lossless,
    ),
)
