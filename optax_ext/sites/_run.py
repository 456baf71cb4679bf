"""A run in a store: who takes part in a round is decided once, and all sites read that list."""

import collections
import dataclasses
import functools
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from optax_ext.sites import _contents, _parameter_change, _payload
from optax_ext.sites._contents import MOST_ROWS, Share, Snapshot, digest_of
from optax_ext.sites._objects import Name, Objects
from optax_ext.sites._payload import PayloadError
from optax_ext.sites._store import Store, StoreError

VERSION = 2
_RUN = "run"


class Found(NamedTuple):
    """What the store has for a site: closed rounds, and a snapshot before them if not None."""

    snapshot: Snapshot | None
    rounds: list[list[Share]]


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
    key: bytes | None = dataclasses.field(repr=False)
    quorum: int
    grace: float
    poll: float
    # Distinguishes this site from an earlier one of its name.
    life: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    # The payloads of one round, so that a site that closes it reads each only once.
    _shares: dict[Name, Share] = dataclasses.field(default_factory=dict)
    # The last round that had its quorum while this site waited, and since when.
    _complete: tuple[int, float] = (-1, 0.0)

    def __post_init__(self):
        self._objects = Objects(self.store, self.key)

    def enter(self, params: np.ndarray) -> Snapshot:
        """Creates the run, or finds it: its newest snapshot.

        Raises:
          ValueError: the run has another model, density or version, or is signed with another key.
        """
        agreed = {"version": VERSION, "model": self.model.digest, **self.agreed}
        mine = {**agreed, "run": f"{time.time_ns():x}"}
        created = self.store.create(_RUN, _payload.pack(mine, b"", self.key))
        try:
            data = self.store.get(_RUN, _payload.AROUND) or b""
            found, _ = _payload.unpack(data, self.key)
        except PayloadError as error:
            raise ValueError(f"{_RUN} at {self.store.name} can't be used: {error}.") from None
        for name, value in agreed.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the run at {self.store.name} has {name} {found.get(name)!r}, and this site "
                    f"{value!r}: give the site what the run has, or a store of its own."
                )
        self._objects.run = str(found.get("run"))
        # A site that has created the run and ended at once has left no snapshot.
        if created or not self.store.sizes("snapshot"):
            self._put_snapshot(Snapshot(0, params, {}))
        snapshot = self.newest()
        assert snapshot is not None
        return snapshot

    def newest(self, above: int = -1) -> Snapshot | None:
        """The newest snapshot, if it is one above a number.

        Raises:
          StoreError: the store has no snapshot.
        """
        found = self._objects.names("snapshot")
        newer = {name: size for name, size in found.items() if name.number > above}
        newer = dict(sorted(newer.items(), key=lambda item: (-item[0].number, item[0].version)))
        snapshot = self._first_snapshot(newer)
        if snapshot is None and len(newer) == len(found):
            raise StoreError(
                f"there is no snapshot of the run at {self.store.name}: the store was emptied or "
                "is not mounted, or has another run"
            )
        return snapshot

    def _first_snapshot(self, names: Mapping[Name, int]) -> Snapshot | None:
        size = self.model.size
        check = functools.partial(_contents.snapshot_of, size=size)
        return self._objects.first(names, (4 * size, 4 * size + MOST_ROWS), check)

    def keep(self, snapshot: Snapshot) -> None:
        """Stores a snapshot, and removes what no site needs any more.

        The last snapshot but one, and the rounds since then, stay for sites that are reading them.
        A site that was away reads in the snapshot whether its payload was delivered.
        """
        self._put_snapshot(snapshot)
        self._objects.remove_before(self._kept_from(snapshot.number))

    def _kept_from(self, newest: int | None = None) -> int:
        """The number of the last snapshot but one: rounds and snapshots before it are removed."""
        found = self._objects.names("snapshot").items()
        numbers = [x.number for x, size in found if size >= 4 * self.model.size]
        newest = max(numbers, default=0) if newest is None else newest
        return max((x for x in numbers if x < newest), default=0)

    def _put_snapshot(self, snapshot: Snapshot) -> None:
        def there() -> bool:
            names = self._objects.names("snapshot").items()
            same = {x: size for x, size in names if x.number == snapshot.number}
            return self._first_snapshot(same) is not None

        name, header = Name("snapshot", snapshot.number), {"digest": digest_of(snapshot.params)}
        self._objects.decide(name, header, _contents.snapshot_body(snapshot), there)

    def put(self, number: int, body: bytes, tokens: int, base: str) -> None:
        """Stores this site's payload, unless the round has one from it."""
        name = Name("payload", number, self.site)
        header = {"site": self.site, "life": self.life, "tokens": tokens, "base": base}

        def there() -> bool:
            return self.site in _sites(self._arrived(self._objects.names(name.folder)))

        self._objects.decide(name, header, body, there)

    def look(self, number: int, base: str | None = None) -> Found:
        """What the store has for a site before a round, whose parameters have a digest.

        A snapshot is there if later rounds were removed, or if the site may be the one whose
        parameters differ from all others'.

        Raises:
          StoreError: an object of a closed round was removed or replaced, and there is no newer
            snapshot yet.
        """
        # A round that was removed may have another list by now, from a site that came too late.
        if number < self._kept_from() and (snapshot := self.newest(above=number)) is not None:
            return self._after(snapshot)
        rounds: list[list[Share]] = []
        failed = None
        try:
            while shares := self.closed(number + len(rounds)):
                rounds.append(shares)
        except StoreError as error:
            failed = error
        # Whatever this site finds of a round before a snapshot, that round was closed by others.
        snapshot = self.newest(above=number + len(rounds))
        if snapshot is None and failed is not None:
            raise failed
        if snapshot is None and rounds and base is not None and _differs(rounds[0], base):
            snapshot = self.newest()
        return Found(None, rounds) if snapshot is None else self._after(snapshot)

    def _after(self, snapshot: Snapshot) -> Found:
        after = self.look(snapshot.number)
        return Found(after.snapshot or snapshot, after.rounds)

    def closed(self, number: int) -> list[Share] | None:
        """The shares of a closed round in the order in which all sites add them; None if open."""
        found = self._objects.names(Name("list", number).folder)
        if (rows := self._listed(found)) is None:
            return None
        shares = self._payloads({name: found[name] for name in rows if name in found})
        for name, digest in rows.items():
            if name not in shares or shares[name].digest != digest:
                raise StoreError(
                    f"{name.path} at {self.store.name} is not what the list of its round says: it "
                    "was removed or replaced, and this site goes on from the next snapshot"
                )
        return [shares[name] for name in rows]

    def _listed(self, found: Mapping[Name, int]) -> dict[Name, str] | None:
        """The first list of a round that can be used; None while it is open."""
        lists = {name: size for name, size in found.items() if name.kind == "list"}
        return self._objects.first(lists, (0, MOST_ROWS), _contents.listed)

    def wait(self, number: int, expected: frozenset[str], seconds: float, began: float) -> None:
        """Waits until the round is closed, and closes it when that is due.

        With a quorum it waits ``grace`` seconds for the other sites that are ``expected``. It
        raises a TimeoutError if the round is not closed so many seconds after it ``began``.
        """
        while True:
            found = self._objects.names(Name("list", number).folder)
            if self._listed(found) is not None:
                return
            shares, now = self._arrived(found), time.monotonic()
            sites = _sites(shares)
            if len(sites) >= self.quorum:
                if self._complete[0] != number:
                    # It stays for a call that is made again.
                    self._complete = number, now
                if sites >= expected or now - self._complete[1] >= self.grace:
                    self._close(number, shares)
                    return
            # This site has put its payload, so the round was removed if it is not there.
            if self.site not in sites and self.newest(above=number) is not None:
                return
            if (left := began + seconds - now) <= 0:
                has = f"{len(sites)} of the quorum={self.quorum} payloads"
                if len(sites) >= self.quorum:
                    away = ", ".join(sorted(expected - sites))
                    has = f"its quorum, and waits grace={self.grace:g} s for {away}"
                raise TimeoutError(
                    f"round {number} at {self.store.name} was not closed within give_up="
                    f"{seconds:g} s: it has {has}."
                )
            time.sleep(min(self.poll, left))

    def late(self, number: int, others: frozenset[str]) -> frozenset[str]:
        """The sites whose payloads came after a round was closed by others.

        They are still there, and without being expected they might always come too late.
        """
        found = self._objects.names(Name("list", number).folder) if number >= 0 else {}
        after = {x: size for x, size in found.items() if x.kind == "payload"}
        after = {x: size for x, size in after.items() if x.site not in others}
        return frozenset(_sites(self._payloads(after))) if after else frozenset()

    def _close(self, number: int, shares: Mapping[Name, Share]) -> None:
        """Writes the list of the payloads that have come, unless another site is faster."""
        name = Name("list", number)

        def there() -> bool:
            return self._listed(self._objects.names(name.folder)) is not None

        self._objects.decide(name, {}, _contents.list_of(shares), there)

    def _arrived(self, found: Mapping[Name, int]) -> dict[Name, Share]:
        """The payloads of an open round, of each site the first that can be used."""
        shares: dict[str, tuple[Name, Share]] = {}
        for name, share in self._payloads(found).items():
            shares.setdefault(name.site, (name, share))
        return dict(shares.values())

    def _payloads(self, names: Mapping[Name, int]) -> dict[Name, Share]:
        """The payloads of a round among these objects, each of which is read once."""
        names = {name: size for name, size in names.items() if name.kind == "payload"}
        numbers = {name.number for name in names}
        kept = {name: x for name, x in self._shares.items() if name.number in numbers}
        missing = {name: size for name, size in names.items() if name not in kept}
        check = functools.partial(_contents.share_of, messages=self.messages)
        size = self.messages.bytes
        self._shares = kept | self._objects.read(missing, (size, size), check)
        return {name: self._shares[name] for name in names if name in self._shares}


def _sites(shares: Mapping[Name, Share]) -> set[str]:
    return {name.site for name in shares}


def _differs(shares: list[Share], base: str) -> bool:
    """Whether the parameters of a digest may be the ones that differ from all others'."""
    count = collections.Counter(share.base for share in shares)
    mine = count.pop(base, 0)
    return any(mine <= others for others in count.values())
