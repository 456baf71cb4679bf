"""The part of a site that has the store: rounds, on parameters as one vector."""

import collections
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from optax_ext.sites import _parameter_change
from optax_ext.sites._run import Run, Share, digest_of, log
from optax_ext.sites._store import StoreError

_T = TypeVar("_T")
# Seconds between two tries when the store fails.
_AGAIN = 1.0


class RoundInfo(NamedTuple):
    """Information about the last round that a site applied.

    Attributes:
      number: the number of the round.
      sites: the sites that took part, in the order in which all added them.
      delivered: whether this site was among them; if not, its change goes with the next round.
      waited: seconds for which :meth:`Site.exchange` waited for the round.
      sent: bytes of the entries of this site's payload.
      received: bytes of the entries of all payloads that it read, in all rounds applied at once.
    """

    number: int
    sites: tuple[str, ...]
    delivered: bool
    waited: float
    sent: int
    received: int


class Member:
    """Takes part in the rounds of a run.

    Attributes:
      number: the round that it takes part in next.
      params: ``f32[n]``, the shared parameters.
      last: the last round that it applied.
    """

    def __init__(self, run: Run, params: np.ndarray, *, snapshot_every: int, give_up: float):
        self._run = run
        self._name = run.site
        self._snapshot_every = snapshot_every
        self._give_up = give_up
        self.last: RoundInfo | None = None
        self.number, self.params = self._patiently(self._run.enter, params)
        # A pool of its own: another site may wait for this one's snapshot during a round.
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="site")
        self._pending: concurrent.futures.Future[Any] | None = None
        self._unsent = 0
        # The payload that was not seen in a list yet: its round, digest, tokens and body.
        self._put: tuple[int, str, int, bytes] | None = None
        closed = self._patiently(self._closed_from, self.number)
        self._add(closed, np.zeros_like(params), 0.0)

    def exchange(self, vector: np.ndarray, tokens: int, wait: bool) -> np.ndarray:
        """As :meth:`Site.exchange`, of vectors."""
        vector = self.finish(vector)
        self._unsent += tokens
        self._begin(vector)
        return self.finish(vector) if wait else vector

    def finish(self, vector: np.ndarray) -> np.ndarray:
        """As :meth:`Site.finish`, of vectors."""
        if self._pending is None:
            return vector
        future, self._pending = self._pending, None
        began = time.monotonic()
        closed = future.result()
        moved = vector - self.params
        self._add(closed, moved, time.monotonic() - began)
        return self.params + moved

    def close(self) -> None:
        """Waits for writes that are under way."""
        self._pool.shutdown()

    def _begin(self, vector: np.ndarray) -> None:
        number, base, tokens = self.number, digest_of(self.params), self._unsent
        body = self._run.messages.encode(vector - self.params, seed=number)
        others = frozenset(self.last.sites if self.last else ())

        def round_trip() -> list[list[Share]] | None:
            closed = self._patiently(self._closed_from, number)
            if closed or closed is None:
                # The round is over, and these entries go with the next one.
                return closed
            digest = self._patiently(self._run.put, number, body, tokens, base)
            if self._put is None or self._put[0] != number:
                # The first payload counts.
                self._put = number, digest, tokens, body
            self._patiently(self._run.wait, number, others, self._give_up)
            return self._patiently(self._closed_from, number)

        self._pending = self._pool.submit(round_trip)

    def _closed_from(self, number: int) -> list[list[Share]] | None:
        """The closed rounds from this one on; None if they were removed already."""
        found = []
        while closed := self._run.closed(number + len(found)):
            found.append(closed)
        if not found and self._run.newest_snapshot() > number:
            return None
        return found

    def _add(self, closed: list[list[Share]] | None, moved: np.ndarray, waited: float) -> None:
        """Adds rounds to the parameters, and takes the delivered entries from ``moved``."""
        if closed is None or (closed and self._differs(closed[0])):
            log.warning("%s begins again from the newest snapshot of the run", self._name)
            number = self._patiently(self._run.newest_snapshot)
            self.params = self._patiently(self._run.snapshot, number)
            if self._put is not None and self._put[0] < number:
                self._take_off(moved)
            self.number = number
            closed = self._patiently(self._closed_from, number) or []
        received = self._run.messages.bytes * sum(map(len, closed))
        for shares in closed:
            total = sum(share.tokens for share in shares)
            names = tuple(share.site for share in shares)
            delivered = False
            for share in shares:
                _parameter_change.add(self.params, share.change, share.tokens / total)
                # The name is not enough: changes by an earlier life are not in ``moved``.
                if share.site == self._name and share.life == self._run.life:
                    delivered, self._put = True, None
                    moved[share.change.indices] -= share.change.values
                    self._unsent -= share.tokens
            sent = self._run.messages.bytes
            self.last = RoundInfo(self.number, names, delivered, waited, sent, received)
            self.number += 1
            # Sites take turns, so that one that is gone does not keep the run from its snapshots.
            turn = self.number // self._snapshot_every % len(names)
            if self.number % self._snapshot_every == 0 and names[turn] == self._name:
                keep = self._run.keep, self.number, self.params.copy()
                self._pool.submit(self._patiently, *keep)

    def _take_off(self, moved: np.ndarray) -> None:
        """Takes off entries that were delivered in a round before the snapshot, which has them."""
        assert self._put is not None
        number, digest, tokens, body = self._put
        if self._patiently(self._run.has_taken, number, digest):
            change = self._run.messages.decode(body)
            moved[change.indices] -= change.values
            self._unsent -= tokens
        self._put = None

    def _differs(self, shares: list[Share]) -> bool:
        """Whether this site may be the one whose parameters differ from all others'."""
        count = collections.Counter(share.base for share in shares)
        mine = count.pop(digest_of(self.params), 0)
        return any(mine <= others for others in count.values())

    def _patiently(self, function: Callable[..., _T], *args: Any) -> _T:
        """The result, once the store can be read and written."""
        began = time.monotonic()
        while True:
            try:
                return function(*args)
            except StoreError as error:
                if time.monotonic() - began > self._give_up:
                    raise TimeoutError(f"for {self._give_up:g} s: {error}") from None
                log.warning("%s tries again: %s", self._name, error)
                time.sleep(_AGAIN)
