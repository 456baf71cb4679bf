"""Writes the table of the calculator in the planner's page, from the planner itself.

The words of an optimizer are a multiple of n plus one of its square root (PowerSGD's factors), and
the work of a worker is a constant plus a multiple of n. Two sizes determine both.
"""

import json
import math
from typing import Any

from sparse_collectives.cost_model import Workload
from sparse_collectives.cost_model._formulas import BUCKET_BYTES
from sparse_collectives.planner._optimizers import CODES, optimizers
from sparse_collectives.planner._ways import BACKWARD_SHARE, CPU, GPU, MARGIN, Way

DENSITY = 0.05
WORKERS = [2**i for i in range(1, 11)]
SIZES = 10**8, 2 * 10**9


def table() -> dict[str, Any]:
    """The coefficients of all optimizers of the planner but the variants of `sparse_adamw`."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for workers in WORKERS:
        for kind, local in (("cpu", CPU), ("gpu", GPU)):
            ways = [optimizers(Workload(n, round(DENSITY * n), workers), local) for n in SIZES]
            for pair in zip(*ways, strict=True):
                way = pair[0]
                if way.name == "sparse_sgd" or way.codec == CODES:
                    continue
                row = rows.setdefault((way.name, way.codec), _row(way))
                row["words"][workers] = _coefficients([w.estimate.expected.words for w in pair])
                messages = way.estimate.expected.messages
                row["messages"][workers] = messages / way.buckets if row["buckets"] else messages
                (small, large), (one, other) = SIZES, (x.local for x in pair)
                slope = (other - one) / (large - small)
                row[kind] = [one - slope * small, slope]
    constants = {"bucket": BUCKET_BYTES, "backward": BACKWARD_SHARE, "margin": MARGIN}
    return constants | {"workers": WORKERS, "density": DENSITY, "rows": list(rows.values())}


def _row(way: Way) -> dict[str, Any]:
    buckets = way.buckets > 1
    return {
        "name": way.name,
        "codec": way.codec,
        "dense": way.steps_of == "dense" and way.exact,
        # Bytes of a parameter, if the exchange is in buckets.
        "buckets": (2 if way.codec == "float16" else 4) * buckets,
        "words": {},
        "messages": {},
    }


def _coefficients(words: list[float]) -> list[float]:
    """The factors a and b of ``words = a n + b sqrt(n)``."""
    (n, m), (x, y) = SIZES, words
    slope = (y / math.sqrt(m) - x / math.sqrt(n)) / (math.sqrt(m) - math.sqrt(n))
    return [slope, x / math.sqrt(n) - slope * math.sqrt(n)]


def script() -> str:
    """The table as a script, which a page can load without a server."""
    return f"const OPTIMIZERS = {json.dumps(table())};\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the table to the manual."""
    # The tests read the table without mkdocs.
    from mkdocs.structure.files import File

    files.append(File.generated(config, "assets/optimizers.js", content=script()))
    return files
