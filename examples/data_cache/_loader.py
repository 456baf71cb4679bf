"""A worker's share of the samples, in a new order in each epoch, in batches, on grain."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from ._errors import CacheError
from ._memory import Sample


class Loader:
    """Batches of one of the workers.

    A worker has every P-th sample, the same ones in all epochs, as in the paper: from the second
    epoch on it finds all of them in its cache. With `reshuffle` the samples are dealt out anew in
    each epoch; then a worker has had only a P-th of them in the epoch before, and its cache grows
    to hold all.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        worker: int,
        workers: int,
        batch: int,
        seed: int,
        augment: Callable[[Sample, np.random.Generator], Sample] | None = None,
        reshuffle: bool = False,
        threads: int = 8,
    ):
        """Makes the batches of a worker.

        Args:
          samples: of all workers, such as a `DataCache`; it may have a `__getitems__`.
          worker: 0 to `workers` - 1.
          workers: P.
          batch: samples of this worker in a batch.
          seed: of the order and of `augment`.
          augment: ``augment(sample, random) -> sample``, other random numbers in each epoch.
          reshuffle: deal the samples out anew in each epoch.
          threads: read as many batches at once; 0: read when asked for.

        Raises:
          CacheError: a worker that there is not, or a batch of more samples than a share has.
        """
        if not 0 <= worker < workers:
            raise CacheError(f"worker is {worker}, of {workers}: give 0 to {workers - 1}")
        share = len(samples) // workers  # the same for all: they take their steps together
        if not 0 < batch <= share:
            raise CacheError(f"a batch of {batch} samples, where each of {workers} has {share}")
        # Indices are shared out, shuffled and put into batches, and a batch reads its samples:
        # grain takes longer over a sample that passes than the memory level over finding it.
        data = grain.MapDataset.range(len(samples))
        # It numbers on from epoch to epoch, and the order and the random numbers follow.
        if reshuffle:
            data = data.shuffle(seed=seed)[worker::workers]
        else:
            data = data[worker::workers].shuffle(seed=seed)

        def read(indices: list[int], random: np.random.Generator) -> Sample:
            if hasattr(samples, "__getitems__"):
                chosen = samples.__getitems__(indices)
            else:
                chosen = [samples[index] for index in indices]
            if augment is not None:  # behind the cache
                chosen = [augment(sample, random) for sample in chosen]
            return {name: np.stack([sample[name] for sample in chosen]) for name in chosen[0]}

        # Of each worker its own, or all of them would augment alike.
        own_seed = int(np.random.SeedSequence((seed, worker)).generate_state(1)[0])
        data = data.batch(batch, drop_remainder=True, batch_fn=list)
        self._data = data.random_map(read, seed=own_seed)
        self.steps = share // batch
        self._reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)

    def epoch(self, number: int) -> Iterator[Sample]:
        """The batches of an epoch, counted from 0: the same ones however often it is asked for.

        What a last part batch would hold is left out; it is in others of the next epoch.
        """
        first = number * len(self._data)
        batches = self._data.repeat()[first : first + self.steps]
        with contextlib.closing(iter(batches.to_iter_dataset(self._reading))) as reader:
            yield from reader
