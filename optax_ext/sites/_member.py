"""The part of a site that has the store: rounds, on parameters as one vector."""

import collections
import concurrent.futures
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from optax_ext.sites import _parameter_change
from optax_ext.sites._contents import MOST_TOKENS, Share, Snapshot, digest_of
from optax_ext.sites._objects import log
from optax_ext.sites._parameter_change import Change
from optax_ext.sites._run import Found, Run
from optax_ext.sites._store import StoreError

_T = TypeVar("_T")
# Seconds between the first two tries when the store fails, and the most between two.
_AGAIN, _LONGEST = 1.0, 60.0


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


class _Put(NamedTuple):
    """The payload that this site puts into a round, each time that it tries."""

    number: int
    tokens: int
    body: bytes
    base: str


class _Owed(NamedTuple):
    """What a caller gave, whose call has not returned, and what it would have now."""

    given: np.ndarray
    now: np.ndarray


class _Ended(NamedTuple):
    """What a round trip has found, and the error with which it ended after that."""

    found: Found
    error: TimeoutError | None = None


class Member:
    """Takes part in the rounds of a run.

    Attributes:
      number: the round that it takes part in next.
      params: ``f32[n]``, the shared parameters.
      shown: ``f32[n]``, the shared parameters after the last call.
      last: the last round that it applied.
    """

    def __init__(self, run: Run, params: np.ndarray, *, snapshot_every: int, give_up: float):
        self._run = run
        self._name = run.site
        self._snapshot_every = snapshot_every
        self._give_up = give_up
        self.last: RoundInfo | None = None
        # The first round of this life; an earlier one of this name may have put its payload.
        self._first: int | None = None
        self.number, self.params, self._delivered = self._patiently(self._run.enter, params)
        # Snapshots have a thread of their own, so that rounds do not wait for them.
        pool = concurrent.futures.ThreadPoolExecutor
        self._closed = False
        self._pool, self._snapshots = pool(1, "round"), pool(1, "snapshot")
        # The newest snapshot that was not stored yet.
        self._unstored: collections.deque[Snapshot] = collections.deque(maxlen=1)
        self._pending: concurrent.futures.Future[_Ended] | None = None
        self._unsent = 0
        # Tokens of a call that has failed, which is made again with them.
        self._failed = 0
        self._owed: _Owed | None = None
        # The payload that was not seen in a list yet, which may be moved to a later round, and
        # whether the caller went on from the shared parameters, without its entries.
        self._put: _Put | None = None
        self._given_up = False
        self._apply(self._patiently(run.look, self.number), np.zeros_like(params), 0.0)
        self._first = self.number
        self.shown = self.params.copy()

    def exchange(self, vector: np.ndarray, tokens: int, wait: bool) -> np.ndarray:
        """As :meth:`Site.exchange`, of vectors."""
        self._check_open()
        return self._caught_up(vector, lambda now: self._exchanged(now, tokens, wait))

    def finish(self, vector: np.ndarray) -> np.ndarray:
        """As :meth:`Site.finish`, of vectors."""
        self._check_open()
        if self._pending is None and self._put is not None and self._put.number >= self.number:
            # An earlier call has failed while it waited for its round.
            self._begin(self._moved(vector))
        return self._caught_up(vector, self._applied)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(
                "this site is closed: make another optax_ext.sites.Site of the same name, which "
                "goes on with the run."
            )

    def _caught_up(self, given: np.ndarray, call: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The result of a call, which is made again with this vector or a later one if it fails.

        It may fail after it has applied a round: then the caller's vector lacks that round.
        """
        vector = given
        if np.array_equal(given, self.shown):
            # The caller has given up its own changes, also those on their way.
            vector = self.params.copy()
            self._given_up = self._put is not None
        elif self._owed is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                vector = self._owed.now + (given - self._owed.given)
        self._moved(vector)
        self._owed = _Owed(given, vector)
        try:
            vector = call(vector)
        finally:
            self.shown = self.params.copy()
        self._owed, self._failed = None, 0
        return vector

    def _exchanged(self, vector: np.ndarray, tokens: int, wait: bool) -> np.ndarray:
        # Before anything that may fail: the call may be followed by one that gives no tokens.
        self._unsent = min(self._unsent - self._failed + tokens, MOST_TOKENS - 1)
        self._failed = tokens
        vector = self._applied(vector)
        if self._unsent == 0:
            # A call that failed had put all of it into a round, which was over by now.
            return vector
        self._begin(self._moved(vector))
        return self._applied(vector) if wait else vector

    def _applied(self, vector: np.ndarray) -> np.ndarray:
        """The vector with the round that is running, once it is over."""
        moved = self._moved(vector)
        if self._pending is None:
            return vector
        began = time.monotonic()
        try:
            found, error = self._pending.result()
        except Exception:
            self._pending = None
            raise
        self._pending = None
        self._apply(found, moved, time.monotonic() - began)
        now = _parameter_change.finite_sum(self.params, moved)
        if self._owed is not None:
            self._owed = self._owed._replace(now=now)
        if error is not None:
            raise error
        return now

    def close(self) -> None:
        """Waits for writes that are under way."""
        self._closed = True
        self._pool.shutdown()
        self._snapshots.shutdown()

    def _moved(self, vector: np.ndarray) -> np.ndarray:
        """The change of the shared parameters."""
        with np.errstate(over="ignore", invalid="ignore"):
            moved = vector - self.params
        if not np.isfinite(moved).all():
            what = "further from those of all sites than float32 holds"
            raise ValueError(
                f"params are {what if np.isfinite(vector).all() else 'not finite'}, and nothing "
                "was sent: go on from the parameters of all sites, site.params."
            )
        return moved

    def _begin(self, moved: np.ndarray) -> None:
        number, base = self.number, digest_of(self.params)
        if self._put is None or self._put.number < number:
            body = self._run.messages.encode(moved, seed=number)
            self._put, self._given_up = _Put(number, self._unsent, body, base), False
        self._pending = self._pool.submit(self._round_trip, number, base, self._put)

    def _round_trip(self, number: int, base: str, put: _Put) -> _Ended:
        """Puts the payload into the round that is open, and waits until that is closed."""
        found = self._patiently(self._run.look, number, base)
        if self._is_delivered(put, found, number):
            return _Ended(found)
        number, params, delivered = found.snapshot or Snapshot(number, self.params, self._delivered)
        others = frozenset(site for site, (_, at) in delivered.items() if at == number - 1)
        if found.snapshot is not None or found.rounds:
            # A site that is slower than the others finds at each call that its round is over.
            params = params.copy()
            for shares in found.rounds:
                _add(params, shares)
                others = frozenset(share.site for share in shares)
            number, base = number + len(found.rounds), digest_of(params)
        if put.number < number:
            self._put = put = put._replace(number=number, base=base)
        try:
            others |= self._patiently(self._run.late, number - 1, others)
            self._patiently(self._run.put, number, put.body, put.tokens, put.base)
            began = time.monotonic()
            self._patiently(self._run.wait, number, others, self._give_up, began)
            after = self._patiently(self._run.look, number, base)
        except TimeoutError as error:
            return _Ended(found, error)
        if after.snapshot is not None:
            return _Ended(after)
        return _Ended(Found(found.snapshot, found.rounds + after.rounds))

    def _is_delivered(self, put: _Put, found: Found, at: int) -> bool:
        """Whether rounds that this site has not applied yet, before round ``at``, have it."""
        begin = at
        if found.snapshot is not None:
            begin = found.snapshot.number
            if found.snapshot.delivered.get(self._name) == (self._run.life, put.number):
                return True
        new = found.rounds[max(0, at - begin) :]
        return any(map(self._is_mine, itertools.chain(*new)))

    def _is_mine(self, share: Share) -> bool:
        """Whether it is from this life of the site."""
        return share.site == self._name and share.life == self._run.life

    def _apply(self, found: Found, moved: np.ndarray, waited: float) -> None:
        """Adds rounds to the parameters, and takes the delivered entries from ``moved``.

        All that it needs was read before, so that it never ends halfway.
        """
        at = self.number
        if found.snapshot is not None:
            log.warning("%s begins again from the newest snapshot of the run", self._name)
            self.number, self.params, self._delivered = found.snapshot
            put = self._put
            # It was delivered in a round before the snapshot, which has its entries.
            if put and self._delivered.get(self._name) == (self._run.life, put.number):
                self._take_off(moved, self._run.messages.decode(put.body), put.tokens)
        received = self._run.messages.bytes * sum(map(len, found.rounds))
        for shares in found.rounds:
            _add(self.params, shares)
            names = tuple(share.site for share in shares)
            delivered = False
            for share in shares:
                self._delivered[share.site] = share.life, self.number
                # The name is not enough: changes by another life are not in ``moved``, and neither
                # are changes of rounds that this site applies a second time.
                if share.site == self._name and self.number >= at:
                    delivered = self._is_mine(share)
                    if delivered:
                        self._take_off(moved, share.change, share.tokens)
                    elif self._first is not None and self.number > self._first:
                        self._warn_of_another()
            sent = self._run.messages.bytes
            self.last = RoundInfo(self.number, names, delivered, waited, sent, received)
            self.number += 1
            # Sites take turns, so that one that is gone does not keep the run from its snapshots.
            turn = self.number // self._snapshot_every % len(names)
            if self.number % self._snapshot_every == 0 and names[turn] == self._name:
                self._keep()

    def _take_off(self, moved: np.ndarray, change: Change, tokens: int) -> None:
        """Takes off entries that were delivered."""
        if not self._given_up:
            moved[change.indices] -= change.values
        self._unsent = max(0, self._unsent - tokens)
        # The tokens of a failed call may have been among them.
        self._failed = min(self._failed, self._unsent)
        self._put, self._given_up = None, False

    def _warn_of_another(self) -> None:
        """Says once that another site has this name."""
        self._first = None
        log.warning(
            "another site is called %s too: give each site of a run a name of its own, or end the "
            "older one",
            self._name,
        )

    def _keep(self) -> None:
        """Stores the newest snapshot, while rounds go on."""
        delivered = dict(self._delivered)
        self._unstored.append(Snapshot(self.number, self.params.copy(), delivered))

        def keep() -> None:
            # While one was being stored, a newer one may have taken the place of others.
            if self._unstored:
                try:
                    self._patiently(self._run.keep, self._unstored.pop())
                except TimeoutError as error:
                    log.warning("%s has stored no snapshot %s", self._name, error)

        self._snapshots.submit(keep)

    def _patiently(self, function: Callable[..., _T], *args: Any) -> _T:
        """The result, once the store can be read and written."""
        began, pause = time.monotonic(), _AGAIN
        while True:
            try:
                return function(*args)
            except StoreError as error:
                left = began + self._give_up - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"for {self._give_up:g} s: {error}") from None
                log.warning("%s tries again: %s", self._name, error)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST)


def _add(params: np.ndarray, shares: list[Share]) -> None:
    """Adds the changes of a round, each weighted by its tokens."""
    total = sum(share.tokens for share in shares)
    for share in shares:
        _parameter_change.add(params, share.change, share.tokens / total)
