"""Times of this machine, always as ratios of contestants that take turns."""

import tempfile
from pathlib import Path

import jax.numpy as jnp

from .._common import timing
from .._common.contestants import selector_factory
from ..local import data_cache
from ..local import select_speed as speed

SIZE = (2**20, 2**22)
# The size in docs/selectors.md.
LARGE = 2**24


def _ratios(
    names: tuple[str, ...], density: float, full: int, seed: int, quick: bool
) -> dict[str, float]:
    """The time of each selector over the time of `lax.top_k`."""
    size, rounds = (SIZE[0], 5) if quick else (full, 9)
    host = speed.accumulators(size, seed)
    data = [jnp.asarray(x) for x in host]
    base = speed.outside(density, max(1, round(density * size)), host[0])[speed.BASE]
    made = {name: selector_factory(name)(density=density) for name in names}
    runs = {speed.BASE: base} | {name: speed.stepper(s, data) for name, s in made.items()}
    for run in runs.values():
        run()
    turns = {name: lambda turn, run=run: run() for name, run in runs.items()}
    rows = timing.ratios(timing.in_turns(turns, rounds), speed.BASE)
    return {row["contestant"]: float(row["ratio"]) for row in rows}


def _compared(seed: int, quick: bool) -> dict[str, float]:
    names = {"topk": "our `topk`", "mstopk": "MSTopK", "dgc": "DGC", "adtopk": "ADTopk"}
    names |= {"threshold_reuse": "`threshold_reuse`"}
    found = _ratios(tuple(names), 0.001, SIZE[1], seed, quick)
    others = min(found[name] for name in ("mstopk", "adtopk", "dgc"))
    return {"our `topk` / the fastest of MSTopK, DGC and ADTopk": found["topk"] / others} | {
        f"{shown} / top-k": found[name] for name, shown in names.items()
    }


def _topk(seed: int, quick: bool) -> dict[str, float]:
    return {"our `topk` / top-k": _ratios(("topk",), 0.01, LARGE, seed, quick)["topk"]}


def _cached(seed: int, quick: bool) -> dict[str, float]:
    """The speed of the second epoch over the first, from two sources of limited speed."""
    found = {}
    for name, rate, latency in (("80 MB/s", 80e6, 5e-4), ("8 MB/s", 8e6, 2e-3)):
        with tempfile.TemporaryDirectory() as folder:
            images = Path(folder) / "images"
            images.mkdir()
            data_cache.write_images(images, 128 if quick else 512, seed)
            given = {"contestant": "DataCache", "images": str(images), "size": 96, "batch": 32}
            given |= {"cache": str(Path(folder) / "cache"), "threads": 8, "seed": seed}
            given |= {"bytes_per_second": rate, "latency": latency, "epochs": [0, 1]}
            rates, _ = data_cache.run(given)
        found[f"{name}: second epoch / first"] = rates[1] / rates[0]
    return found
