"""Times of this machine, always as ratios of contestants that take turns."""

import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp

from sparse_collectives import select

from .._common import timing
from ..local import data_cache
from ..local import select_speed as speed
from ._claims import Bound, Claim, Elsewhere

DENSITY, SIZE = 0.001, (2**20, 2**22)
# That of docs/selectors.md.
LARGE = 2**24
SETTING = "n = 4M, density 0.1 %, one CPU, medians of 9 rounds, as a ratio to `lax.top_k`"


@functools.lru_cache(maxsize=4)
def _selection(
    seed: int,
    quick: bool,
    density: float = DENSITY,
    names: tuple[str, ...] = ("topk", "mstopk", "adtopk", "dgc", "threshold_reuse"),
    full: int = SIZE[1],
) -> dict[str, float]:
    """The ratio of each selector to `lax.top_k`."""
    size, rounds = (SIZE[0], 5) if quick else (full, 9)
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


def _compared(seed: int, quick: bool) -> dict[str, float]:
    found = _selection(seed, quick)
    others = min(found[name] for name in ("mstopk", "adtopk", "dgc"))
    return {
        "our `topk` / the fastest of MSTopK, DGC and ADTopk": found["topk"] / others,
        "our `topk` / top-k": found["topk"],
        "MSTopK / top-k": found["mstopk"],
        "DGC / top-k": found["dgc"],
        "ADTopk / top-k": found["adtopk"],
        "`threshold_reuse` / top-k": found["threshold_reuse"],
    }


def _topk(seed: int, quick: bool) -> dict[str, float]:
    return {"our `topk` / top-k": _selection(seed, quick, 0.01, ("topk",), LARGE)["topk"]}


def _cached(seed: int, quick: bool) -> dict[str, float]:
    """The second epoch beside the first, from two sources with a limited rate."""
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


CLAIMS = (
    Claim(
        "library/selector-speed",
        "On a CPU our exact selection is faster than MSTopK, DGC and ADTopk.",
        "This library, selectors.md",
        "below 1",
        f"{SETTING}; beside them a threshold that is reused, which is faster still",
        (Bound("our `topk` / the fastest of MSTopK, DGC and ADTopk", most=1),),
        _compared,
    ),
    Claim(
        "library/topk-speed",
        "Exact selection here is 20 times as fast as `lax.top_k`.",
        "This library, selectors.md",
        "0.05",
        SETTING.replace("0.1 %", "1 %").replace("4M", "16.8M"),
        (Bound("our `topk` / top-k", most=0.05),),
        _topk,
    ),
    Claim(
        "mstopk/data-cache",
        "From the second epoch on DataCache makes reading over 10 times as fast.",
        "MSTopK, section 5.4, Figure 9",
        "above 10",
        "512 JPEG images over 80 MB/s and 0.5 ms a read, and over 8 MB/s and 2 ms, decoded to 96 x "
        "96: samples per second; the rate of the paper's file system is not known",
        (
            Bound("80 MB/s: second epoch / first", least=10),
            Bound("8 MB/s: second epoch / first", least=10),
        ),
        _cached,
        elsewhere=Elsewhere(
            "where the source is slow: 8 MB/s",
            (Bound("8 MB/s: second epoch / first", least=10),),
        ),
    ),
)
