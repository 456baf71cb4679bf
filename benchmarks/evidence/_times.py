"""Times of this machine, always as ratios of contestants that take turns."""

import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp

from sparse_collectives import select

from .._common import timing
from ..local import data_cache
from ..local import partitioned_norms as norms
from ..local import select_speed as speed
from ._claims import Bound, Claim

DENSITY, SIZE = 0.001, (2**20, 2**22)
SETTING = "n = 4M, density 0.1 %, one CPU, medians of 9 rounds, as a ratio to `lax.top_k`"


@functools.lru_cache(maxsize=4)
def _selection(
    seed: int,
    quick: bool,
    density: float = DENSITY,
    names: tuple[str, ...] = ("topk", "mstopk", "adtopk", "dgc"),
) -> dict[str, float]:
    """The ratio of each selector to `lax.top_k`."""
    size, rounds = (SIZE[0], 5) if quick else (SIZE[1], 9)
    host = speed.accumulators(size, seed)
    data = [jnp.asarray(x) for x in host]
    base = speed.outside(density, max(1, round(density * size)), host[0])[speed.BASE]
    made = {name: getattr(select, name)(density=density) for name in names}
    runs = {speed.BASE: base} | {name: speed.stepper(s, data) for name, s in made.items()}
    for run in runs.values():
        run()
    turns = {name: lambda turn, run=run: run() for name, run in runs.items()}
    rows = timing.ratios(timing.in_turns(turns, rounds), speed.BASE)
    return {row["contestant"]: float(row["ratio"]) for row in rows}


def _mstopk(seed: int, quick: bool) -> dict[str, float]:
    found = _selection(seed, quick)
    return {
        "MSTopK / top-k": found["mstopk"],
        "MSTopK / DGC": found["mstopk"] / found["dgc"],
    }


def _adtopk(seed: int, quick: bool) -> dict[str, float]:
    found = _selection(seed, quick)
    return {
        "ADTopk / top-k": found["adtopk"],
        "ADTopk / our `topk`": found["adtopk"] / found["topk"],
    }


def _topk(seed: int, quick: bool) -> dict[str, float]:
    return {"our `topk` / top-k": _selection(seed, quick, 0.01, ("topk",))["topk"]}


def _norms(seed: int, quick: bool) -> dict[str, float]:
    """The norms of LARS on one of 8 workers, beside all of them on each."""
    layers = 8 if quick else 24
    params = norms.model(layers, 512, seed)
    gradients = [jnp.asarray(0.01 * p) for p in norms.model(layers, 512, seed + 1)]
    rows = norms.measure("norms", params, gradients, [8], 7 if quick else 15)
    shared = next(row for row in rows if row["contestant"] == "P = 8")
    return {"norms, shared / all": float(str(shared["ratio"]))}


def _cached(seed: int, quick: bool) -> dict[str, float]:
    """The second epoch beside the first, from a source with a limited rate."""
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        images.mkdir()
        data_cache.write_images(images, 128 if quick else 512, seed)
        given = {"contestant": "DataCache", "images": str(images), "size": 96, "batch": 32}
        given |= {"cache": str(Path(folder) / "cache"), "threads": 8, "seed": seed}
        given |= {"bytes_per_second": 8e6, "latency": 2e-3, "epochs": [0, 1]}
        rates, _ = data_cache.run(given)
    return {"second epoch / first": rates[1] / rates[0]}


CLAIMS = (
    Claim(
        "mstopk/speed",
        "MSTopK is much faster than an exact top-k, and faster than DGC.",
        "MSTopK, section 5.2, Figure 6",
        "negligible beside both",
        SETTING,
        (Bound("MSTopK / top-k", most=0.5), Bound("MSTopK / DGC", most=1)),
        _mstopk,
    ),
    Claim(
        "adtopk/speed",
        "Sorting by row takes 27 to 51 % less time than top-k of a layer.",
        "ADTopk, experiment 4",
        "0.49 to 0.73",
        f"{SETTING}; beside it our exact `topk`, which sorts nothing",
        (Bound("ADTopk / top-k", most=0.73),),
        _adtopk,
    ),
    Claim(
        "library/topk-speed",
        "Exact selection here is 20 times as fast as `lax.top_k`.",
        "This library, selectors",
        "0.05",
        SETTING.replace("0.1 %", "1 %"),
        (Bound("our `topk` / top-k", most=0.1),),
        _topk,
    ),
    Claim(
        "mstopk/pto",
        "Sharing out the norms of LARS halves their time.",
        "MSTopK, section 4.2 and 5.4",
        "about 0.5",
        "24 layers of 512 x 512 and 512 x 2,048, P = 8, one worker without the exchange",
        (Bound("norms, shared / all", most=0.67),),
        _norms,
    ),
    Claim(
        "mstopk/data-cache",
        "From the second epoch on DataCache makes reading over 10 times as fast.",
        "MSTopK, section 5.4, Figure 9",
        "above 10",
        "512 JPEG images over 8 MB/s and 2 ms a read, decoded to 96 x 96: samples per second",
        (Bound("second epoch / first", least=10),),
        _cached,
    ),
)
