"""A cache of training data in two levels, memory and local disk, behind a slow source.

DataCache of Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2020), Section 4.1. From the slow end to the model:

    source -> disk level -> prepare -> memory level -> share, order, augment, batch -> step

- `_sources`: what holds the records (`ImageFolder`, `Digits`), and `Throttled` around it.
- `_disk`: the disk level, `Disk`: records (or prepared samples) by index, on diskcache.
- `_memory`: the memory level, `Memory`: prepared samples by index.
- `_cache`: both of them as one sequence of samples, `DataCache`, with its counts.
- `_images`: `Decode`, which is deterministic and goes before the cache, and `Augment`, which is
  random and goes behind it.
- `_loader`: a worker's share, in a new order in each epoch, in batches: `Loader`, on grain.
"""

from ._cache import Counts, DataCache
from ._disk import Disk, stamp
from ._errors import CacheError
from ._images import Augment, Decode
from ._loader import Loader
from ._memory import Memory
from ._sources import Digits, ImageFolder, Source, Throttled

__all__ = [
    "Augment",
    "CacheError",
    "Counts",
    "DataCache",
    "Decode",
    "Digits",
    "Disk",
    "ImageFolder",
    "Loader",
    "Memory",
    "Source",
    "Throttled",
    "stamp",
]
