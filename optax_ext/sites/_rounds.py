"""Rounds in a store: who takes part is decided once, and all sites read the same list."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_ext.sites import _difference, _payload
from optax_ext.sites._payload import PayloadError
from optax_ext.sites._store import Store

log = logging.getLogger("optax_ext.sites")

VERSION = 1
_RUN = "run"
# Bytes of an object besides its entries.
_AROUND = _payload.LARGEST_HEADER + 256


class Share(NamedTuple):
    """A site's part in a round.

    Attributes:
      site: the name of the site.
      life: distinguishes a site from an earlier one of the same name.
      base: the digest of the parameters from which it moved.
      tokens: the data it has trained on; the weights of a round are shares of their sum.
      sent: its parameter change.
    """

    site: str
    life: str
    base: str
    tokens: int
    sent: _difference.Sent


class Closed(NamedTuple):
    """A closed round, whose list exists.

    Attributes:
      number: the number of the round.
      shares: in the order in which all sites add them.
    """

    number: int
    shares: tuple[Share, ...]


class Rounds:
    """The rounds of a run, as one site sees them in the store."""

    def __init__(
        self,
        store: Store,
        site: str,
        model: _difference.Model,
        messages: _difference.Messages,
        agreed: dict[str, Any],
        *,
        key: bytes | None,
        quorum: int,
        grace: float,
        poll: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store = store
        self._site = site
        self._model = model
        self._messages = messages
        self._key = key
        self._quorum = quorum
        self._grace = grace
        self._poll = poll
        self._clock = clock
        self._agreed = {"version": VERSION, "model": model.digest, **agreed}
        # Payloads by their names, so that a site that closes a round reads each only once.
        self._read: dict[str, bytes] = {}
        self.run = ""
        self.life = secrets.token_hex(8)

    # The run.

    def enter(self, params: np.ndarray) -> tuple[int, np.ndarray]:
        """Creates the run, or finds it: the number of the next round, and the snapshot before it.

        Raises:
          ValueError: the run has another model, density or version, or is signed with another key.
        """
        mine = {**self._agreed, "run": f"{time.time_ns():x}"}
        self._store.create(_RUN, _payload.pack(mine, b"", self._key))
        found = self._opened(_RUN, self._store.get(_RUN) or b"")[0]
        for name, value in self._agreed.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the run at {self._store.name} has {name} {found.get(name)!r}, and this site "
                    f"{value!r}: give the site what the run has, or a store of its own."
                )
        self.run = str(found["run"])
        if not self._snapshots():
            self._put_snapshot(0, params)
        number = max(self._snapshots())
        return number, self.snapshot(number)

    def snapshot(self, number: int) -> np.ndarray:
        """The parameters before a round, as a site has stored them."""
        name = f"snapshot/{number:08d}"
        header, body = self._opened(name, self._store.get(name) or b"", number=number)
        if len(body) != 4 * self._model.size:
            raise ValueError(f"{name} at {self._store.name} has {len(body)} bytes of parameters.")
        params = np.frombuffer(body, "<f4").astype(np.float32)
        if header.get("digest") != digest_of(params):
            raise ValueError(f"{name} at {self._store.name} is not what it says it is.")
        return params

    def newest_snapshot(self) -> int:
        """The number of the newest snapshot."""
        return max(self._snapshots())

    def keep(self, number: int, params: np.ndarray) -> None:
        """Stores a snapshot, and removes payloads that no site needs any more.

        The last snapshot but one, and the payloads since then, stay for sites that are reading
        them. The lists, which are short, stay for a site that was away and looks for its payload.
        """
        self._put_snapshot(number, params)
        snapshots = sorted(self._snapshots())
        oldest = snapshots[-2] if len(snapshots) > 1 else 0
        old = [f"snapshot/{x:08d}" for x in snapshots if x < oldest]
        rounds = self._store.sizes("round")
        payloads = (name for name in rounds if "/payload/" in name)
        old += [f"round/{name}" for name in payloads if int(name.partition("/")[0]) < oldest]
        self._store.delete(old)

    def _put_snapshot(self, number: int, params: np.ndarray) -> None:
        header = {"run": self.run, "number": number, "digest": digest_of(params)}
        data = _payload.pack(header, params.astype("<f4").tobytes(), self._key)
        self._store.create(f"snapshot/{number:08d}", data)

    def _snapshots(self) -> list[int]:
        return [int(name) for name in self._store.sizes("snapshot") if name.isdigit()]

    # A round.

    def put(self, number: int, body: bytes, tokens: int, base: str) -> str:
        """Stores this site's payload, unless the round has one from it; returns its digest."""
        header = {
            "run": self.run,
            "number": number,
            "site": self._site,
            "life": self.life,
            "tokens": tokens,
            "base": base,
        }
        name = f"{_round(number)}/payload/{self._site}"
        data = _payload.pack(header, body, self._key)
        self._store.create(name, data)
        return _payload.digest(data)

    def has_taken(self, number: int, digest: str) -> bool:
        """Whether a payload is in the list of its round."""
        return any(row["sha256"] == digest for row in self._listed(number) or ())

    def _listed(self, number: int) -> list[dict[str, Any]] | None:
        """The rows of the list of a round; None while the round is open."""
        data = self._store.get(f"{_round(number)}/list")
        if data is None:
            return None
        return json.loads(self._opened(f"{_round(number)}/list", data, number=number)[1])

    def closed(self, number: int) -> Closed | None:
        """A round, if it is closed; None if it is open, or if its payloads were removed.

        Raises:
          ValueError: an object is not what the list says, or this site may not take it.
        """
        rows = self._listed(number)
        if rows is None:
            return None
        shares = []
        names = [f"{_round(number)}/payload/{row['site']}" for row in rows]
        payloads = self._payloads(names)
        for row, name in zip(rows, names, strict=True):
            found = payloads.get(name)
            if found is None and self.newest_snapshot() > number:
                return None
            if found is None or _payload.digest(found) != row["sha256"]:
                self._read = {}
                raise ValueError(
                    f"{name} at {self._store.name} is not what the list of its round says: it was "
                    "removed or replaced behind the back of the sites."
                )
            shares.append(self._share(number, row["site"], found))
        self._read = {}
        return Closed(number, tuple(shares))

    def wait(self, number: int, expected: frozenset[str], seconds: float) -> None:
        """Waits until the round is closed, and closes it when that is due.

        Args:
          number: the number of the round.
          expected: the sites of the last round, for which it waits ``grace`` seconds once a quorum
            is there.
          seconds: how long to wait.

        Raises:
          TimeoutError: the round was not closed in that time.
        """
        since, began = None, self._clock()
        while "list" not in (names := self._store.sizes(_round(number))):
            found = {name.removeprefix("payload/") for name in names}
            if len(found) >= self._quorum:
                since = self._clock() if since is None else since
                if found >= expected or self._clock() - since >= self._grace:
                    self._close(number)
                    continue
            if self._clock() - began > seconds:
                raise TimeoutError(
                    f"round {number} at {self._store.name} was not closed within {seconds:g} s: it "
                    f"has {len(found)} payloads, and quorum is {self._quorum}."
                )
            time.sleep(self._poll)

    def _close(self, number: int) -> None:
        """Writes the list of the payloads that have come, unless another site is faster."""
        rows = []
        prefix = f"{_round(number)}/payload"
        sizes = sorted(self._store.sizes(prefix).items())
        most = self._messages.bytes + _AROUND
        payloads = self._payloads([f"{prefix}/{site}" for site, size in sizes if size <= most])
        for site, size in sizes:
            try:
                if size > most:
                    raise PayloadError(f"it has {size} bytes")
                data = payloads.get(f"{prefix}/{site}", b"")
                share = self._share(number, site, data)
            except PayloadError as error:
                log.warning("round %d: the payload of %s is left out: %s", number, site, error)
                continue
            digest = _payload.digest(data)
            rows.append({"site": site, "sha256": digest, "tokens": share.tokens})
        if not rows:
            time.sleep(self._poll)
            return
        header = {"run": self.run, "number": number}
        body = json.dumps(rows, separators=(",", ":")).encode()
        self._store.create(f"{_round(number)}/list", _payload.pack(header, body, self._key))

    def _payloads(self, names: Sequence[str]) -> dict[str, bytes]:
        """The objects that exist, each of which is read once; all at the same time."""
        missing = [name for name in names if name not in self._read]
        found = zip(missing, self._store.get_all(missing), strict=True)
        self._read |= {name: data for name, data in found if data is not None}
        return {name: self._read[name] for name in names if name in self._read}

    def _share(self, number: int, site: str, data: bytes) -> Share:
        """The checked content of a payload; raises a PayloadError if it may not be taken."""
        if len(data) > self._messages.bytes + _AROUND:
            raise PayloadError(f"it has {len(data)} bytes")
        header, body = _payload.unpack(data, self._key)
        wanted = {"run": self.run, "number": number, "site": site}
        for name, value in wanted.items():
            if header.get(name) != value:
                raise PayloadError(f"its {name} is {str(header.get(name))[:40]!r}, not {value!r}")
        tokens = header.get("tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 2**53:
            raise PayloadError(f"its tokens are {str(tokens)[:40]!r}")
        life, base = (str(header.get(name))[:64] for name in ("life", "base"))
        return Share(site, life, base, tokens, self._messages.decode(body))

    def _opened(self, name: str, data: bytes, **wanted: Any) -> tuple[dict[str, Any], bytes]:
        """An object that all sites need; raises a ValueError if it is not what it should be."""
        if self.run:
            wanted["run"] = self.run
        try:
            header, body = _payload.unpack(data, self._key)
            for key, value in wanted.items():
                if header.get(key) != value:
                    raise PayloadError(f"its {key} is {str(header.get(key))[:40]!r}, not {value!r}")
        except PayloadError as error:
            raise ValueError(f"{name} at {self._store.name} can't be used: {error}.") from None
        return header, body


def digest_of(params: np.ndarray) -> str:
    """The digest of the bits of the parameters, which all sites share before a round."""
    return _payload.digest(params.astype("<f4").tobytes())[:16]


def _round(number: int) -> str:
    return f"round/{number:08d}"
