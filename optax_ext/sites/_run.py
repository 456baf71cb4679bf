"""A run in a store: who takes part in a round is decided once, and all sites read that list."""

import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_ext.sites import _parameter_change, _payload
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
      change: of its parameters.
    """

    site: str
    life: str
    base: str
    tokens: int
    change: _parameter_change.Change


@dataclasses.dataclass
class Run:
    """The snapshots and rounds of a run, as one site sees them in the store."""

    store: Store
    site: str
    model: _parameter_change.Model
    messages: _parameter_change.Messages
    # The description of the run that all sites have to give.
    agreed: dict[str, Any]
    _: dataclasses.KW_ONLY
    key: bytes | None
    quorum: int
    grace: float
    poll: float
    id: str = ""
    # Distinguishes this site from an earlier one of its name.
    life: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    # Payloads by their names, so that a site that closes a round reads each only once.
    _read: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def enter(self, params: np.ndarray) -> tuple[int, np.ndarray]:
        """Creates the run, or finds it: the number of the next round, and the snapshot before it.

        Raises:
          ValueError: the run has another model, density or version, or is signed with another key.
        """
        agreed = {"version": VERSION, "model": self.model.digest, **self.agreed}
        mine = {**agreed, "run": f"{time.time_ns():x}"}
        self.store.create(_RUN, _payload.pack(mine, b"", self.key))
        found = self._opened(_RUN)[0]
        for name, value in agreed.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the run at {self.store.name} has {name} {found.get(name)!r}, and this site "
                    f"{value!r}: give the site what the run has, or a store of its own."
                )
        self.id = str(found["run"])
        if not self._snapshots():
            self._put_snapshot(0, params)
        number = self.newest_snapshot()
        return number, self.snapshot(number)

    def snapshot(self, number: int) -> np.ndarray:
        """The parameters before a round, as a site has stored them."""
        name = f"snapshot/{number:08d}"
        header, body = self._opened(name, number=number)
        if len(body) != 4 * self.model.size:
            raise ValueError(f"{name} at {self.store.name} has {len(body)} bytes of parameters.")
        params = np.frombuffer(body, "<f4").astype(np.float32)
        if header.get("digest") != digest_of(params):
            raise ValueError(f"{name} at {self.store.name} is not what it says it is.")
        return params

    def newest_snapshot(self) -> int:
        """Its number, which is also the number of the round after it."""
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
        rounds = self.store.sizes("round")
        payloads = (name for name in rounds if "/payload/" in name)
        old += [f"round/{name}" for name in payloads if int(name.partition("/")[0]) < oldest]
        self.store.delete(old)

    def _put_snapshot(self, number: int, params: np.ndarray) -> None:
        header = {"run": self.id, "number": number, "digest": digest_of(params)}
        data = _payload.pack(header, params.astype("<f4").tobytes(), self.key)
        self.store.create(f"snapshot/{number:08d}", data)

    def _snapshots(self) -> list[int]:
        return [int(name) for name in self.store.sizes("snapshot") if name.isdigit()]

    def put(self, number: int, body: bytes, tokens: int, base: str) -> str:
        """Stores this site's payload, unless the round has one from it; returns its digest."""
        header = {"run": self.id, "number": number, "site": self.site, "life": self.life}
        data = _payload.pack({**header, "tokens": tokens, "base": base}, body, self.key)
        self.store.create(f"{_round(number)}/payload/{self.site}", data)
        return _payload.digest(data)

    def has_taken(self, number: int, digest: str) -> bool:
        """Whether a payload is in the list of its round."""
        return any(row["sha256"] == digest for row in self._listed(number) or ())

    def _listed(self, number: int) -> list[dict[str, Any]] | None:
        """The rows of the list of a round; None while the round is open."""
        name = f"{_round(number)}/list"
        data = self.store.get(name)
        return None if data is None else json.loads(self._opened(name, data, number=number)[1])

    def closed(self, number: int) -> list[Share] | None:
        """The shares of a closed round, in the order in which all sites add them.

        It is None for an open round, and if payloads were removed.

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
                    f"{name} at {self.store.name} is not what the list of its round says: it was "
                    "removed or replaced behind the back of the sites."
                )
            shares.append(self._share(number, row["site"], found))
        self._read = {}
        return shares

    def wait(self, number: int, expected: frozenset[str], seconds: float) -> None:
        """Waits until the round is closed, and closes it when that is due.

        With a quorum it waits ``grace`` seconds for the other sites that are ``expected``. It
        raises a TimeoutError if the round is not closed within ``seconds``.
        """
        since, began = None, time.monotonic()
        while "list" not in (names := self.store.sizes(_round(number))):
            found = {name.removeprefix("payload/") for name in names}
            if len(found) >= self.quorum:
                since = time.monotonic() if since is None else since
                if found >= expected or time.monotonic() - since >= self.grace:
                    self._close(number)
                    continue
            if time.monotonic() - began > seconds:
                raise TimeoutError(
                    f"round {number} at {self.store.name} was not closed within {seconds:g} s: it "
                    f"has {len(found)} payloads, and quorum is {self.quorum}."
                )
            time.sleep(self.poll)

    def _close(self, number: int) -> None:
        """Writes the list of the payloads that have come, unless another site is faster."""
        rows = []
        prefix = f"{_round(number)}/payload"
        sizes = sorted(self.store.sizes(prefix).items())
        most = self.messages.bytes + _AROUND
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
            time.sleep(self.poll)
            return
        header = {"run": self.id, "number": number}
        body = json.dumps(rows, separators=(",", ":")).encode()
        self.store.create(f"{_round(number)}/list", _payload.pack(header, body, self.key))

    def _payloads(self, names: Sequence[str]) -> dict[str, bytes]:
        """The objects that exist, each of which is read once; all at the same time."""
        missing = [name for name in names if name not in self._read]
        found = zip(missing, self.store.get_all(missing), strict=True)
        self._read |= {name: data for name, data in found if data is not None}
        return {name: self._read[name] for name in names if name in self._read}

    def _share(self, number: int, site: str, data: bytes) -> Share:
        """The checked content of a payload; raises a PayloadError if it may not be taken."""
        if len(data) > self.messages.bytes + _AROUND:
            raise PayloadError(f"it has {len(data)} bytes")
        wanted = {"run": self.id, "number": number, "site": site}
        header, body = _payload.unpack(data, self.key, **wanted)
        tokens = header.get("tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 2**53:
            raise PayloadError(f"its tokens are {str(tokens)[:40]!r}")
        life, base = (str(header.get(name))[:64] for name in ("life", "base"))
        return Share(site, life, base, tokens, self.messages.decode(body))

    def _opened(
        self, name: str, data: bytes | None = None, **wanted: Any
    ) -> tuple[dict[str, Any], bytes]:
        """An object that all sites need; raises a ValueError if it is not what it should be."""
        data = (self.store.get(name) or b"") if data is None else data
        if self.id:
            wanted["run"] = self.id
        try:
            return _payload.unpack(data, self.key, **wanted)
        except PayloadError as error:
            raise ValueError(f"{name} at {self.store.name} can't be used: {error}.") from None


def digest_of(params: np.ndarray) -> str:
    """The digest of the bits of the parameters, which all sites share before a round."""
    return _payload.digest(params.astype("<f4").tobytes())[:16]


def _round(number: int) -> str:
    return f"round/{number:08d}"
