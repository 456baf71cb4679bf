"""A site: a job of its own that exchanges what it has moved through an object store."""

from __future__ import annotations

import collections
import concurrent.futures
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from optax_ext.sites import _difference
from optax_ext.sites._rounds import Closed, Rounds, digest_of, log
from optax_ext.sites._store import Store, StoreError
from sparse_collectives import Codec, wire

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NARROW8, _NARROW16 = wire.narrow8(), wire.narrow16()
# Seconds between two tries where the store fails.
_AGAIN = 1.0


class RoundInfo(NamedTuple):
    """What a site knows of the last round that it applied.

    Attributes:
      number: of the round.
      sites: who took part, in the order in which all added them.
      delivered: whether this site was among them; else all that it moved waits for the next round.
      waited: seconds for which :meth:`Site.exchange` waited for the round.
      sent: bytes of the entries of this site's payload.
      received: those of all payloads that it read, in all rounds that it applied at once.
    """

    number: int
    sites: tuple[str, ...]
    delivered: bool
    waited: float
    sent: int
    received: int


class Site:
    """One of a changing number of sites that train a model together, without a server.

    Each site takes steps by itself from the parameters of all, with any optimizer. After some it
    calls :meth:`exchange`: the largest entries of what it has moved go into the store, who takes
    part in the round is decided once, by whoever creates the list of it first, and every site adds
    the same payloads in the same order, weighted by their tokens, so that the parameters of all
    have the same bits. What was not sent, or came too late, stays in the site's own parameters and
    goes with a later round: nothing is lost. A site may come and go at any time.

    Args:
      store: where the run is: a folder, a URL such as ``s3://bucket/run`` (also ``gs://`` and
        ``az://``, with the credentials that their tools use), or a store of obstore.
      name: of this site, which no other has: letters, digits, ``_``, ``.`` and ``-``.
      params: parameters in float32. The first site of a run begins with these, any other with
        those of the run, of which only the shapes have to be the same; see :attr:`params`.
      density: the share of the entries that a payload has, the same at all sites.
      codec: how they are encoded, the same at all sites; None: ``wire.narrow8()`` from 1 % on, and
        ``wire.narrow16()`` below.
      quorum: a round is not closed with fewer payloads.
      grace: seconds that the others of the last round are waited for once the quorum is there.
      key: what the sites share, to sign with; None: only damage is noticed, and who may write is
        the store's to say.
      snapshot_every: rounds after which the parameters are put into the store, for those who come;
        older payloads are removed.
      poll: seconds from one look at the store to the next.
      give_up: seconds for which a store that fails, or a round that is not closed, is waited for.

    Raises:
      TypeError: parameters that are not float32.
      ValueError: a name, number or density that is none; a run of another model, density, codec or
        key; parameters over several processes.
      TimeoutError: a store that can't be read or written for ``give_up`` seconds.
      ImportError: obstore is not installed.

    Cost: 2 n float32 on the host; in a round the bytes of its own payload up, those of all others
    down.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from sparse_collectives import wire
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     site = Site(folder, "berlin", {"w": jnp.zeros(4)}, density=0.5, codec=wire.raw())
      ...     params = {"w": site.params["w"] + jnp.array([3.0, 1.0, -2.0, 0.0])}
      ...     params = site.exchange(params, tokens=1000, wait=True)
      ...     site.params["w"].tolist(), params["w"].tolist()
      ([3.0, 0.0, -2.0, 0.0], [3.0, 1.0, -2.0, 0.0])

    References:
      Rounds as in Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023; a quorum,
      a window of grace and weights by tokens as in `Decoupled DiLoCo
      <https://arxiv.org/abs/2604.21428>`_, 2026, which has a server and no error feedback.
    """

    def __init__(
        self,
        store: str | Path | Any,
        name: str,
        params: Any,
        *,
        density: float,
        codec: Codec | None = None,
        quorum: int = 1,
        grace: float = 30.0,
        key: bytes | None = None,
        snapshot_every: int = 10,
        poll: float = 1.0,
        give_up: float = 3600.0,
    ):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"name must be 1 to 64 letters, digits, '_', '.' and '-', got {name!r}."
            )
        for what, count in {"quorum": quorum, "snapshot_every": snapshot_every}.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{what} must be a whole number of at least 1, got {count!r}.")
        for what, seconds in {"grace": grace, "poll": poll, "give_up": give_up}.items():
            if not seconds >= 0:
                raise ValueError(f"{what} must be seconds of at least 0, got {seconds!r}.")
        if key is not None and not (isinstance(key, bytes) and key):
            raise ValueError("key must be bytes, and not none of them: it signs the payloads.")
        if jax.process_count() > 1:
            raise ValueError(
                "this job has several processes: a site is one process, with any number of "
                "devices. Let one process of the site gather the parameters and exchange them."
            )
        if codec is None:
            codec = _NARROW8 if density >= 0.01 else _NARROW16
        self.name = name
        self.last: RoundInfo | None = None
        self._give_up = give_up
        self._snapshot_every = snapshot_every
        self._model = _difference.model_of(params)
        self._messages = _difference.messages(self._model.size, density, codec)
        self._store = Store(store)
        agreed = {"density": density, "codec": str(codec.spec), "bytes": self._messages.bytes}
        self._rounds = Rounds(
            self._store,
            name,
            self._model,
            self._messages,
            agreed,
            key=key,
            quorum=quorum,
            grace=grace,
            poll=poll,
        )
        first = self._model.flat(params)
        self._number, self._params = self._patiently(lambda: self._rounds.enter(first))
        # Of its own: another site may wait for this one's snapshot while a round is under way.
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="site")
        self._pending: concurrent.futures.Future[Any] | None = None
        self._unsent = 0
        # What was put and not seen in a list yet: the round, its digest, tokens and body.
        self._put: tuple[int, str, int, bytes] | None = None
        self._others: frozenset[str] = frozenset()
        moved = np.zeros(self._model.size, np.float32)
        closed = self._patiently(lambda: self._closed_from(self._number))
        self._add(closed, moved, 0.0)

    @property
    def params(self) -> Any:
        """The parameters of all sites, as far as this one has applied the rounds: to begin with."""
        return self._model.tree(self._params.copy())

    @property
    def round(self) -> int:
        """The round that this site takes part in next."""
        return self._number

    def exchange(self, params: Any, *, tokens: int, wait: bool = False) -> Any:
        """Puts what this site has moved into a round, and applies what has come of the last one.

        The round runs beside the steps that follow, and what it brings is applied at the next call.

        Args:
          params: the parameters behind this site's steps.
          tokens: what it has learned from since the last call, such as examples; at least 1.
          wait: whether to wait for this round, and apply it now.

        Returns:
          The parameters to go on with, placed as ``params`` are: those of all sites, and on top
          what this site has moved and not delivered yet.

        Raises:
          ValueError: parameters of another model, or that are not finite, of which nothing is sent;
            objects of the store that were replaced.
          TimeoutError: no answer for ``give_up`` seconds. ``params`` are still what they were: call
            again.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ValueError(f"tokens must be a whole number of at least 1, got {tokens!r}.")
        vector = self._model.flat(params)
        if not np.isfinite(vector).all():
            raise ValueError(
                "params are not finite, and nothing was sent: go on from the parameters of all "
                "sites, site.params."
            )
        vector = self._finished(vector)
        self._unsent += tokens
        self._begin(vector)
        if wait:
            vector = self._finished(vector)
        return _placed(self._model.tree(vector), params)

    def finish(self, params: Any) -> Any:
        """Applies the round that is under way, if there is one; then this site may end."""
        vector = self._finished(self._model.flat(params))
        return _placed(self._model.tree(vector), params)

    def close(self) -> None:
        """Waits for what is being written."""
        self._pool.shutdown()

    def _begin(self, vector: np.ndarray) -> None:
        number, base, tokens = self._number, digest_of(self._params), self._unsent
        body = self._messages.encode(vector - self._params, seed=number)
        others = self._others

        def round_trip() -> list[Closed] | None:
            closed = self._patiently(lambda: self._closed_from(number))
            if closed or closed is None:
                # It is over: what was to be sent waits for the next one.
                return closed
            digest = self._patiently(lambda: self._rounds.put(number, body, tokens, base))
            if self._put is None or self._put[0] != number:
                # The first one counts.
                self._put = number, digest, tokens, body
            self._patiently(lambda: self._rounds.wait(number, others, self._give_up))
            return self._patiently(lambda: self._closed_from(number))

        self._pending = self._pool.submit(round_trip)

    def _finished(self, vector: np.ndarray) -> np.ndarray:
        if self._pending is None:
            return vector
        future, self._pending = self._pending, None
        began = time.monotonic()
        closed = future.result()
        moved = vector - self._params
        self._add(closed, moved, time.monotonic() - began)
        return self._params + moved

    def _closed_from(self, number: int) -> list[Closed] | None:
        """The rounds from this one on that are closed; None where they were removed already."""
        found = []
        while closed := self._rounds.closed(number + len(found)):
            found.append(closed)
        behind = self._rounds.newest_snapshot() > number
        return None if behind and not found else found

    def _add(self, closed: list[Closed] | None, moved: np.ndarray, waited: float) -> None:
        """Adds rounds to the parameters, and takes what was delivered from what was moved."""
        if closed is None or (closed and self._differs(closed[0])):
            log.warning("%s begins again from the newest snapshot of the run", self.name)
            number = self._patiently(self._rounds.newest_snapshot)
            self._params = self._patiently(lambda: self._rounds.snapshot(number))
            if self._put is not None and self._put[0] < number:
                self._take_off(moved, *self._put)
            self._number = number
            closed = self._patiently(lambda: self._closed_from(number)) or []
        for done in closed:
            total = sum(share.tokens for share in done.shares)
            names = tuple(share.site for share in done.shares)
            delivered = False
            for share in done.shares:
                _difference.add(self._params, share.sent, share.tokens / total)
                # Not by the name alone: a life before this one moved what is not in ``moved``.
                if share.site == self.name and share.life == self._rounds.life:
                    delivered, self._put = True, None
                    moved[share.sent.indices] -= share.sent.values
                    self._unsent -= share.tokens
            size = self._messages.bytes
            received = size * sum(len(x.shares) for x in closed)
            self.last = RoundInfo(done.number, names, delivered, waited, size, received)
            self._others = frozenset(names)
            self._number = done.number + 1
            # Another site each time: one that is gone does not keep the run from its snapshots.
            turn = self._number // self._snapshot_every % len(names)
            if self._number % self._snapshot_every == 0 and names[turn] == self.name:
                self._keep(self._number, self._params.copy())

    def _take_off(
        self, moved: np.ndarray, number: int, digest: str, tokens: int, body: bytes
    ) -> None:
        """Takes off what was delivered in a round before the snapshot, which has it."""
        if self._patiently(lambda: self._rounds.has_taken(number, digest)):
            sent = self._messages.decode(body)
            moved[sent.indices] -= sent.values
            self._unsent -= tokens
        self._put = None

    def _differs(self, closed: Closed) -> bool:
        """Whether this site may be the one whose parameters are not those of the others."""
        count = collections.Counter(share.base for share in closed.shares)
        mine = count.pop(digest_of(self._params), 0)
        return any(mine <= others for others in count.values())

    def _keep(self, number: int, params: np.ndarray) -> None:
        self._pool.submit(self._patiently, lambda: self._rounds.keep(number, params))

    def _patiently(self, function: Callable[[], _T]) -> _T:
        """The result, once the store can be read and written."""
        began = time.monotonic()
        while True:
            try:
                return function()
            except StoreError as error:
                if time.monotonic() - began > self._give_up:
                    raise TimeoutError(f"for {self._give_up:g} s: {error}") from None
                log.warning("%s tries again: %s", self.name, error)
                time.sleep(_AGAIN)


def _placed(tree: Any, like: Any) -> Any:
    """Arrays of the host where those of ``like`` are."""

    def place(x: np.ndarray, other: Any) -> Any:
        return jax.device_put(x, other.sharding) if isinstance(other, jax.Array) else x

    return jax.tree.map(place, tree, like)
