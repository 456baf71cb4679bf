"""DataCache's Figure 9, second half: a whole training with the cache, and without one.

The first half is about reading alone, and is ``mstopk/data-cache``. How much of that a training
gets depends on what a step computes beside it, which on a CPU, that decodes images meanwhile, is
another share than on a V100.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .._common.processes import ROOT, environment
from ..local import data_cache
from ._claims import Bound, Claim

IMAGES, PIXELS, BATCH, EPOCHS = (128, 512), 96, 32, 3
# The share of one of 16 nodes at a file server of 1 Gbit/s.
MEGABYTES, MILLISECONDS = 8.0, 2.0
_SECONDS = 900
_ROW = re.compile(r"^ *(\d+) +([\d,]+) +(\d+)%", re.MULTILINE)


def epochs(folder: Path, seed: int, *, cached: bool) -> list[tuple[float, float]]:
    """Samples per second of each epoch of ``examples/train_cached.py``, and the share of waiting.

    Args:
      folder: of classes of images.
      seed: of parameters, order and augmentation.
      cached: with both levels; otherwise every epoch reads from the source.
    """
    command = [sys.executable, str(ROOT / "examples" / "train_cached.py"), "--workers", "1"]
    command += ["--data", str(folder), "--size", str(PIXELS), "--batch", str(BATCH)]
    command += ["--bandwidth", str(MEGABYTES), "--latency", str(MILLISECONDS)]
    command += ["--epochs", str(EPOCHS), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as cache:
        command += ["--cache", cache] if cached else ["--memory-limit", "0"]
        done = subprocess.run(
            command,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    rows = _ROW.findall(done.stdout)
    if done.returncode or len(rows) != EPOCHS:
        raise RuntimeError(f"train_cached.py ended with {done.returncode}: {done.stderr[-500:]}")
    return [(float(rate.replace(",", "")), int(share) / 100) for _, rate, share in rows]


def _training(seed: int, quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        data_cache.write_images(Path(folder), IMAGES[0 if quick else 1], seed)
        naive, cached = (epochs(Path(folder), seed, cached=with_it) for with_it in (False, True))
    # From the second epoch on, as in the paper; the seconds of a sample, and those of waiting.
    (naive_rate, naive_share), (rate, share) = (runs[-1] for runs in (naive, cached))
    return {
        "training, with the cache / without": rate / naive_rate,
        "waiting, without / with": naive_share / naive_rate / max(share / rate, 1e-9),
        "waiting without a cache": naive_share,
    }


CLAIMS = (
    Claim(
        "mstopk/data-cache-training",
        "From the second epoch on DataCache makes a training about twice as fast.",
        "MSTopK, section 5.4, Figure 9",
        "about 2, as reading takes about half of a step",
        "`examples/train_cached.py`: 512 JPEG images over 8 MB/s and 2 ms a read, decoded to "
        "96 x 96, a small network, one worker, the third epoch; how much of a step is reading "
        "decides it",
        (Bound("training, with the cache / without", least=1.9),),
        _training,
    ),
)
